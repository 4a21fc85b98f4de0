"""Residual networks: ResNet-18 and -50, and a small one for photos whose trained weights come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from zeroforget.nets.layers import Shape, check, initialize, scaled

SMALL = 64
"""Images no larger than this get a 3×3 stem and no max-pool."""


class ResidualBlock(nn.Module):
    """A residual block: ReLU(path(x) + shortcut(x)), each convolution with its BatchNorm."""

    def __init__(self, features: Sequence[int], kernels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (kernel, stride) in enumerate(zip(kernels, strides, strict=True)):
            layers += [*([nn.ReLU()] if i else []), *normalized(features[i], features[i + 1], kernel, stride)]
        self.path = nn.Sequential(*layers)
        inputs, outputs, stride = features[0], features[-1], max(strides)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*normalized(inputs, outputs, 1, stride))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the block's output width."""
        maps: Tensor = self.relu(self.path(x) + self.shortcut(x))
        return maps


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, and the average of each map (He et al., 2016).

    The stem leaves small images their pixels.
    """

    def __init__(
        self, blocks: Sequence[int], bottleneck: bool, shape: Shape, *, width: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check(shape, width, dropout)
        trunk = scaled(64, width)
        self.stem = _stem(shape, trunk)
        stages: list[nn.Module] = []
        for stage, repeats in enumerate(blocks):
            maps = 64 * 2**stage
            for block in range(repeats):
                stride = 2 if stage and not block else 1
                inner = scaled(maps, width)
                if bottleneck:
                    # The stride sits in the 3×3 convolution, which reads every pixel; in the 1×1 it would skip most.
                    outputs = scaled(4 * maps, width)
                    stages.append(ResidualBlock((trunk, inner, inner, outputs), (1, 3, 1), (1, stride, 1)))
                else:
                    outputs = inner
                    stages.append(ResidualBlock((trunk, inner, outputs), (3, 3), (stride, 1)))
                trunk = outputs
        self.blocks = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(dropout)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.dropout(self.flatten(self.pool(self.blocks(self.stem(x)))))
        return features


def resnet18(shape: Shape, *, width: float = 1.0, dropout: float = 0.0) -> ResNet:
    """Eight blocks of two 3×3 convolutions; dropout acts on the averaged features."""
    return ResNet((2, 2, 2, 2), False, shape, width=width, dropout=dropout)


def resnet50(shape: Shape, *, width: float = 1.0, dropout: float = 0.0) -> ResNet:
    """Sixteen blocks of a 1×1, a 3×3 and a 1×1 convolution; dropout acts on the averaged features."""
    return ResNet((3, 4, 6, 3), True, shape, width=width, dropout=dropout)


def _stem(shape: Shape, outputs: int) -> nn.Sequential:
    if max(shape[1:]) <= SMALL:
        return nn.Sequential(*normalized(shape[0], outputs, 3, 1), nn.ReLU())
    return nn.Sequential(*normalized(shape[0], outputs, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))


def normalized(inputs: int, outputs: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    """A convolution that keeps the image's size (but for its stride), and its BatchNorm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


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


EMBEDDED = "compact"
EMBEDDED_FILE = Path(__file__).with_name("compact.safetensors")


class NotEmbedded(ValueError):
    """The package has no weights in it."""


def embedded_weights() -> Path:
    """The file of weights in the package."""
    if not EMBEDDED_FILE.is_file():
        raise NotEmbedded(
            f"this copy of zeroforget comes without pretrained weights ({EMBEDDED_FILE} is missing); give a file with "
            "--weights, or train it: python -m benchmarks.backbone"
        )
    return EMBEDDED_FILE


def is_embedded() -> bool:
    """Whether the package has its weights."""
    return EMBEDDED_FILE.is_file()
