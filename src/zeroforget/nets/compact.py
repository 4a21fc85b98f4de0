"""A small residual network for photos of 64 to 128 pixels: the one whose trained weights come with the package."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from zeroforget.nets.layers import Shape, check, initialize, scaled
from zeroforget.nets.resnet import ResidualBlock, normalized

STEM, STAGES, LAST = 24, ((48, 2), (96, 3), (176, 3)), 512
"""Maps of the first convolution; maps and blocks of each stage; features."""


class Compact(nn.Module):
    """Three stages of residual blocks, a 1×1 convolution to 512 features, and the average of each: 2.2 million weights.

    The first convolution keeps every pixel; each stage halves both sides.
    """

    def __init__(self, shape: Shape, *, width: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        check(shape, width, dropout)
        maps = scaled(STEM, width)
        self.stem = nn.Sequential(*normalized(shape[0], maps, 3, 1), nn.ReLU())
        blocks: list[nn.Module] = []
        for features, repeats in STAGES:
            inner = scaled(features, width)
            for block in range(repeats):
                blocks.append(ResidualBlock((maps, inner, inner), (3, 3), (1 if block else 2, 1)))
                maps = inner
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(*normalized(maps, scaled(LAST, width), 1, 1), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(dropout)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.dropout(self.flatten(self.pool(self.last(self.blocks(self.stem(x))))))
        return features


NETWORK = "compact"
FILE = Path(__file__).with_name("compact.safetensors")


class NotEmbedded(ValueError):
    """The package has no weights in it."""


def weights() -> Path:
    """The file of weights in the package."""
    if not FILE.is_file():
        raise NotEmbedded(
            f"this copy of zeroforget comes without pretrained weights ({FILE} is missing); give a file with "
            "--weights, or train it: python -m benchmarks.backbone"
        )
    return FILE


def is_there() -> bool:
    """Whether the package has its weights."""
    return FILE.is_file()
