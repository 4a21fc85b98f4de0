"""VGG-16 (Simonyan and Zisserman, 2014), and the shorter one that the paper uses for Tiny ImageNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from zeroforget.nets.layers import Shape, check, flattened, hidden, initialize, scaled

Norm = Literal["none", "batch"]
Start = Literal["he", "torchvision"]
VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Each stage's maps and number of convolutions; a max-pool ends a stage."""


class Vgg(nn.Module):
    """Stages of 3×3 convolutions, then two hidden linear layers of 4096."""

    def __init__(
        self,
        name: str,
        stages: Sequence[tuple[int, int]],
        shape: Shape,
        *,
        width: float = 1.0,
        dropout: float = 0.5,
        norm: Norm = "none",
        start: Start = "he",
    ) -> None:
        super().__init__()
        check(shape, width, dropout)
        for option, value, kinds in (("norm", norm, get_args(Norm)), ("start", start, get_args(Start))):
            if value not in kinds:
                raise ValueError(f"{name} has {option} '{kinds[0]}' or '{kinds[1]}', not {value!r}")
        layers: list[nn.Module] = []
        inputs = shape[0]
        for maps, convolutions in stages:
            for _ in range(convolutions):
                outputs = scaled(maps, width)
                # BatchNorm's own shift makes a bias before it idle.
                layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=norm == "none"))
                if norm == "batch":
                    layers.append(nn.BatchNorm2d(outputs))
                layers.append(nn.ReLU())
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.convolutions = nn.Sequential(*layers)
        self.flatten = nn.Flatten()
        last = scaled(4096, width)
        self.hidden = hidden([flattened(name, self.convolutions, shape), last, last], dropout)
        initialize(self)
        if start == "torchvision":
            self._begin_small(width)

    @torch.no_grad()
    def _begin_small(self, width: float) -> None:
        """Variance 2 / fan-out for convolutions, 0.01² for linear layers (at full width), as torchvision's VGG begins.

        At full width the spreads of all layers, multiplied, are then 1 / 45 of He's.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01 / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.hidden(self.flatten(self.convolutions(x)))
        return features


def vgg16(shape: Shape, *, width: float = 1.0, dropout: float = 0.5, norm: Norm = "none", start: Start = "he") -> Vgg:
    """Thirteen convolutions, for images of 224×224."""
    return Vgg("vgg16", VGG16, shape, width=width, dropout=dropout, norm=norm, start=start)


def vgg16_tiny(
    shape: Shape, *, width: float = 1.0, dropout: float = 0.5, norm: Norm = "none", start: Start = "he"
) -> Vgg:
    """VGG-16 without its last three convolutions and its last max-pool, for images of 64×64."""
    return Vgg("vgg16-tiny", VGG16[:-1], shape, width=width, dropout=dropout, norm=norm, start=start)
