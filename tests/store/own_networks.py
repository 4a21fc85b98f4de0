"""Networks of a user's own, which a model's folder names and does not hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zeroforget


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
