"""Low-rank adapters beside every convolution of a frozen network, after LoRA (Hu et al., 2021), to compare with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.nets.resnet import ResNet


class LowRank(nn.Module):
    """A frozen convolution and a branch beside it: as large a kernel down to `rank` maps, 1×1 up from there.

    The way up starts at zero, so the branch adds nothing until it has learned.
    """

    def __init__(self, plain: nn.Conv2d, rank: int) -> None:
        super().__init__()
        if plain.groups != 1 or plain.padding_mode != "zeros":
            raise ValueError("low-rank branches are made for convolutions without groups that pad with zeros")
        self.plain = plain.requires_grad_(False)
        # A convolution of the same geometry, whatever that is.
        numbers: dict[str, Any] = {k: getattr(plain, k) for k in ("kernel_size", "stride", "padding", "dilation")}
        self.down = nn.Conv2d(plain.in_channels, rank, bias=False, **numbers)
        self.up = nn.Conv2d(rank, plain.out_channels, 1, bias=False)
        nn.init.kaiming_normal_(self.down.weight)
        nn.init.zeros_(self.up.weight)
        self.to(plain.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """What the convolution gives, and what the branch adds."""
        out: Tensor = self.plain(x) + self.up(self.down(x))
        return out


class Adapted(nn.Module):
    """A task's own branches, batch norms and head around a copy of a frozen classifier."""

    def __init__(self, backbone: ResNet, classes: int, rank: int) -> None:
        super().__init__()
        self.features: nn.Module = copy.deepcopy(backbone)
        width = 0
        for path, module in list(self.features.named_modules()):
            if isinstance(module, nn.Conv2d):
                parent, _, child = path.rpartition(".")
                setattr(self.features.get_submodule(parent), child, LowRank(module, capped(module, rank)))
                width = module.out_channels
            elif isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(True)
        self.head = nn.Linear(width, classes, device=next(backbone.parameters()).device)

    def forward(self, x: Tensor) -> Tensor:
        """The task's logits."""
        out: Tensor = self.head(self.features(x))
        return out

    def own(self) -> dict[str, Tensor]:
        """All that this task must store: everything but the frozen convolutions."""
        return {name: tensor for name, tensor in self.state_dict().items() if ".plain." not in name}


def capped(conv: nn.Conv2d, rank: int) -> int:
    """The rank for a convolution: from some rank on, a branch is larger than the convolution itself."""
    inputs = conv.weight[0].numel()
    return max(1, min(rank, inputs * conv.out_channels // (inputs + conv.out_channels)))


def nbytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def rank_near(backbone: ResNet, classes: int, wanted: float) -> int:
    """The rank whose task costs closest to so many bytes; the smaller one if two are as close."""
    convolutions = [module for module in backbone.modules() if isinstance(module, nn.Conv2d)]

    def added(rank: int) -> int:
        return sum(4 * capped(c, rank) * (c.weight[0].numel() + c.out_channels) for c in convolutions)

    with torch.random.fork_rng(devices=[]):
        fixed = nbytes(Adapted(copy.deepcopy(backbone).cpu(), classes, 1).own()) - added(1)
    return min(
        range(1, max(c.out_channels for c in convolutions) + 1), key=lambda r: (abs(fixed + added(r) - wanted), r)
    )
