"""Stands in for the library: its calling convention, and a small classifier of patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__version__ = "9.2.0"


class Patches(nn.Module):
    """Patches, a position embedding of fixed size, an MLP with a residual, a head."""

    def __init__(self, num_classes: int = 1000, in_chans: int = 3, img_size: int = 32, dim: int = 6) -> None:
        super().__init__()
        self.img_size = img_size
        self.pretrained_cfg = {"input_size": (3, 8, 8), "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
        self.patch_embed = nn.Conv2d(in_chans, dim, 4, stride=4)
        self.pos_embed = nn.Parameter(torch.randn(1, (img_size // 4) ** 2, dim) * 0.02)
        self.norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 10), nn.Linear(10, dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.img_size, f"Input height ({x.shape[-1]}) doesn't match model ({self.img_size})."
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        x = x + self.fc2(torch.relu(self.fc1(self.norm(x))))
        out: Tensor = self.head(x.mean(1))
        return out


class Heads(nn.Module):
    """Patches that attend to each other with two heads of four channels."""

    def __init__(self, num_classes: int = 1000, in_chans: int = 3) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 4
        self.patch_embed = nn.Conv2d(in_chans, 6, 4, stride=4)
        self.qkv, self.proj = nn.Linear(6, 24), nn.Linear(8, 6)
        self.head = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).reshape(len(x), -1, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        out: Tensor = self.head(x.mean(1))
        return out


_MODELS: dict[str, Any] = {"patches_tiny": Patches, "heads_tiny": Heads}


def list_models() -> list[str]:
    return sorted(_MODELS)


def create_model(model_name: str, pretrained: bool = False, checkpoint_path: str = "", **kwargs: Any) -> nn.Module:
    if pretrained or checkpoint_path:
        raise OSError("this would fetch something")
    made: nn.Module = _MODELS[model_name.partition(".")[0]](**kwargs)
    return made
