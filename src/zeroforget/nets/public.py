"""The networks of the tables that GPM, WSN and their kin print, as plain feature extractors."""

from __future__ import annotations

from torch import Tensor, nn

from zeroforget.nets.layers import Shape, check, flattened, hidden, initialize, scaled


class Convolutional(nn.Module):
    """Convolutions, a flatten, hidden linear layers."""

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
