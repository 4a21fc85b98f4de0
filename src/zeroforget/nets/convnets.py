"""Convolutional networks without shortcuts: LeNet-5, AlexNet, VGG-16, SqueezeNet, and those of GPM and its kin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from zeroforget.nets.layers import Shape, check, flattened, hidden, initialize, scaled


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al., 1998) with ReLU and max-pooling: 6, 16, 120 and 84 features.

    Every map of the second convolution reads every one of the first.
    """

    def __init__(self, shape: Shape, *, width: float = 1.0, dropout: float = 0.5) -> None:
        super().__init__()
        check(shape, width, dropout)
        first, second, third, last = (scaled(n, width) for n in (6, 16, 120, 84))
        # Published for 32×32; padding lets 28×28 digits fill the same 5×5 maps.
        padding = 2 if min(shape[1:]) < 32 else 0
        self.convolutions = nn.Sequential(
            nn.Conv2d(shape[0], first, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.flatten = nn.Flatten()
        self.hidden = hidden([flattened("lenet", self.convolutions, shape), third, last], dropout)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.hidden(self.flatten(self.convolutions(x)))
        return features


class Small(nn.Module):
    """Two 3×3 convolutions of 16 and 32 maps and a linear layer of 64 features."""

    def __init__(self, shape: Shape, *, width: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        check(shape, width, dropout)
        first, second, last = (scaled(n, width) for n in (16, 32, 64))
        self.convolutions = nn.Sequential(
            nn.Conv2d(shape[0], first, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.flatten = nn.Flatten()
        self.hidden = hidden([flattened("small", self.convolutions, shape), last], dropout)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.hidden(self.flatten(self.convolutions(x)))
        return features


class AlexNet(nn.Module):
    """AlexNet (Krizhevsky et al., 2012) as one column: five convolutions and two hidden linear layers, for 224×224.

    These widths, of the one-column version of 2014, are the paper's: they sum to its 9,344 features and, by its rule
    for counting, give its 54,547,712 weights. Those of the two-column original (96, 256, 384, 384, 256) would sum to
    9,568.
    """

    def __init__(self, shape: Shape, *, width: float = 1.0, dropout: float = 0.5) -> None:
        super().__init__()
        check(shape, width, dropout)
        a, b, c, d, e, f, g = (scaled(n, width) for n in (64, 192, 384, 256, 256, 4096, 4096))
        self.convolutions = nn.Sequential(
            nn.Conv2d(shape[0], a, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(a, b, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(b, c, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c, d, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(d, e, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        self.flatten = nn.Flatten()
        self.hidden = hidden([flattened("alexnet", self.convolutions, shape), f, g], dropout)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.hidden(self.flatten(self.convolutions(x)))
        return features


Norm = Literal["none", "batch"]
Start = Literal["he", "torchvision"]
VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Each stage's maps and number of convolutions; a max-pool ends a stage."""


class Vgg(nn.Module):
    """VGG (Simonyan and Zisserman, 2014): stages of 3×3 convolutions, then two hidden linear layers of 4096."""

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
    """What the paper uses for Tiny ImageNet, 64×64: VGG-16 without its last three convolutions and last max-pool."""
    return Vgg("vgg16-tiny", VGG16[:-1], shape, width=width, dropout=dropout, norm=norm, start=start)


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
    """SqueezeNet 1.0 (Iandola et al., 2016): a convolution, eight fire modules, and the average of each of 512 maps.

    Parameters are named as in torchvision, so that published weights fit.
    """

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


class Convolutional(nn.Module):
    """Convolutions, a flatten, hidden linear layers: the networks of the tables that GPM, WSN and their kin print."""

    def __init__(self, convolutions: nn.Sequential, hidden: nn.Sequential) -> None:
        super().__init__()
        self.convolutions = convolutions
        self.flatten = nn.Flatten()
        self.hidden = hidden
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) of images."""
        features: Tensor = self.hidden(self.flatten(self.convolutions(x)))
        return features


def alexnet_cifar(shape: Shape, *, width: float = 1.0, dropout: float = 0.5) -> Convolutional:
    """The "AlexNet" of the CIFAR-100 tables: convolutions of 64 (4×4), 128 (3×3) and 256 (2×2) maps without padding.

    Then two linear layers of 2048. Batch norm behind each, no biases. The first two drop out 0.4 times as much as the
    rest.

    The published batch norm keeps no statistics: it normalizes test images by the test batch itself, so that answers
    depend on what else is in the batch. Ours keeps running statistics, of each task's own.
    """
    check(shape, width, dropout)
    layers: list[nn.Module] = []
    inputs = shape[0]
    for maps, kernel, share in ((64, 4, 0.4), (128, 3, 0.4), (256, 2, 1.0)):
        outputs = scaled(maps, width)
        layers += [nn.Conv2d(inputs, outputs, kernel, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.Dropout(share * dropout), nn.MaxPool2d(2)]
        inputs = outputs
    convolutions = nn.Sequential(*layers)
    last = scaled(2048, width)
    ends: list[nn.Module] = []
    for reads in (flattened("alexnet-cifar", convolutions, shape), last):
        ends += [nn.Linear(reads, last, bias=False), nn.BatchNorm1d(last), nn.ReLU(), nn.Dropout(dropout)]
    return Convolutional(convolutions, nn.Sequential(*ends))


def lenet_wide(shape: Shape, *, width: float = 1.0, dropout: float = 0.0) -> Convolutional:
    """The "LeNet" of the superclasses' tables, wider than the original: 20 and 50 maps of 5×5, 800 and 500 features."""
    check(shape, width, dropout)
    first, second, third, last = (scaled(n, width) for n in (20, 50, 800, 500))
    convolutions = nn.Sequential(
        nn.Conv2d(shape[0], first, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    return Convolutional(convolutions, hidden([flattened("lenet-wide", convolutions, shape), third, last], dropout))


def conv4(shape: Shape, *, width: float = 1.0, dropout: float = 0.0) -> Convolutional:
    """Four convolutions of 160 maps (3×3, stride 2) and two hidden linear layers of 640, for Tiny ImageNet in 40 tasks.

    The tables say "4 convolutions and 3 linear layers"; the widths are our choice.
    """
    check(shape, width, dropout)
    maps, last = scaled(160, width), scaled(640, width)
    layers: list[nn.Module] = []
    inputs = shape[0]
    for _ in range(4):
        layers += [nn.Conv2d(inputs, maps, 3, stride=2, padding=1), nn.ReLU()]
        inputs = maps
    convolutions = nn.Sequential(*layers)
    return Convolutional(convolutions, hidden([flattened("conv4", convolutions, shape), last, last], dropout))
