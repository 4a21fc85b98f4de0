"""SqueezeNet 1.0 (Iandola et al., 2016), its parameters named as in torchvision, so that published weights fit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeroforget.nets.layers import Shape, check, initialize, scaled

FIRES = ((16, 64), (16, 64), (32, 128), None, (32, 128), (48, 192), (48, 192), (64, 256), None, (64, 256))
"""Of each fire module the maps that it squeezes to and twice expands to; None is a max-pool."""
SMALLEST = 21
"""Below this nothing would be left after the last pooling."""


class Fire(nn.Module):
    """Few maps by a 1×1 convolution, then many: half of them by 1×1, half by 3×3 convolutions."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.squeeze_activation = nn.ReLU()
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand1x1_activation = nn.ReLU()
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)
        self.expand3x3_activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The two halves, one after the other."""
        x = self.squeeze_activation(self.squeeze(x))
        return torch.cat(
            [self.expand1x1_activation(self.expand1x1(x)), self.expand3x3_activation(self.expand3x3(x))], 1
        )


class SqueezeNet(nn.Module):
    """A convolution, eight fire modules, and the average of each of 512 maps."""

    def __init__(self, shape: Shape, *, width: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        check(shape, width, dropout)
        if min(shape[1:]) < SMALLEST:
            raise ValueError(
                f"squeezenet needs images of at least {SMALLEST}×{SMALLEST}, and these are {shape[1]}×{shape[2]}; "
                "make them larger or choose a smaller network"
            )
        maps = scaled(96, width)
        layers: list[nn.Module] = [nn.Conv2d(shape[0], maps, 7, stride=2), nn.ReLU(), _pool()]
        for fire in FIRES:
            if fire is None:
                layers.append(_pool())
            else:
                squeezed, expanded = (scaled(size, width) for size in fire)
                layers.append(Fire(maps, squeezed, expanded))
                maps = 2 * expanded
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(dropout)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.dropout(self.flatten(self.pool(self.features(x))))
        return features


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)
