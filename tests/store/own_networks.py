"""Networks of a user's own, which a model's folder names and does not hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zeroforget
from tests.growing import test_rank_births
from tests.proving.patterns import VisionTransformer
from zeroforget.nets import build


def table(width: int = 24) -> nn.Module:
    """For rows of eight numbers."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 12), nn.ReLU())


class Waves(nn.Module):
    """For a second of sound, in two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 6, 5, stride=2)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Conv1d(6, 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.norm(self.first(x))))).mean(2)


def pictures() -> nn.Module:
    """For gray pictures of 8×8 pixels."""
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())


def growing() -> nn.Module:
    """Not the plain network."""
    return zeroforget.grow(table(), torch.zeros(2, 8))


def strings() -> str:
    """No network."""
    return "no"


KINDS = {"vgg": "vgg16-tiny", "resnet": "resnet18", "transformer": "transformer"} | {
    kind: kind for kind in ("depthwise", "attention")
}
"""Builders below, and the networks of `tests.growing.test_rank_births` that they give."""


def vgg() -> nn.Module:
    """A narrow VGG."""
    return build("vgg16-tiny", (3, 16, 16), width=0.06)


def resnet() -> nn.Module:
    """A narrow ResNet, with batch norm."""
    return build("resnet18", (3, 8, 8), width=0.12)


def transformer() -> nn.Module:
    """A small vision transformer."""
    return VisionTransformer()


def depthwise() -> nn.Module:
    """Separable convolutions."""
    return test_rank_births.depthwise()


def attention() -> nn.Module:
    """torch's own attention."""
    return test_rank_births.Attending()
