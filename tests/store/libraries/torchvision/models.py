"""A registry of classifiers with the calls of `torchvision.models`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn1(self.conv1(x)))


class Residual(nn.Module):
    """A stem, two blocks, a mean and a head."""

    def __init__(self, num_classes: int = 1000, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Block(width), Block(width))
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.layer1(self.stem(x)).mean((2, 3)))
        return out


class Baked(nn.Module):
    """Remembers a width by a name that does not say so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = width
        self.conv = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x)).mean((2, 3)).reshape(-1, self.q)


class Awkward(nn.Module):
    """Features of a module with its own code, and some that are sorted, which nobody can follow."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, stride=2)
        self.baked = Baked(5)
        self.mix = nn.Linear(5, 7)
        self.last = nn.Linear(7, 9)
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(9, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.last(self.mix(self.baked(self.stem(x))).sort(1).values))
        out: Tensor = self.classifier(x)
        return out


_MODELS = {"residual10": Residual, "awkward": Awkward}


def list_models(module: ModuleType | None = None) -> list[str]:
    return sorted(_MODELS)


def get_model(name: str, weights: str | None = None, **config: Any) -> nn.Module:
    if weights is not None:
        raise OSError("this would fetch something")
    return _MODELS[name](**config)
