"""What our networks share: how their layers start, and the hidden linear layers at their end."""

from __future__ import annotations

from itertools import count, pairwise

from torch import nn


def initialize(net: nn.Module) -> None:
    """Start every layer so that a ReLU network trains from scratch without normalization (He et al., 2015).

    Weights are normal with variance 2 / fan-in. The fan must be that of the input: a layer that grows rescales by it.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def hidden(sizes: list[int], dropout: float) -> nn.Sequential:
    """Linear layers from each size to the next, each with its ReLU and dropout."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers)


WIDEST = 1000
"""Whatever the network, more is a slip of the pen."""
Shape = tuple[int, int, int]
"""Channels, height and width of one image."""


def scaled(features: int, width: float) -> int:
    """A layer's features at a width; a layer never vanishes."""
    return max(1, round(features * width))


def flattened(network: str, layers: nn.Sequential, shape: Shape) -> int:
    """How many numbers an image of this shape is after the convolutions and a flatten."""
    _, height, width = shape
    rows, columns = _spatial(layers, height, 0), _spatial(layers, width, 1)
    if not (rows and columns):
        least = [next(size for size in count(1) if _spatial(layers, size, d)) for d in (0, 1)]
        raise ValueError(
            f"{network} needs images of at least {least[0]}×{least[1]}, and these are {height}×{width}; "
            "make them larger or choose a smaller network"
        )
    channels = [m.out_channels for m in layers.modules() if isinstance(m, nn.Conv2d)]
    return channels[-1] * rows * columns


def check(shape: Shape, width: float, dropout: float) -> None:
    """Refuse what no network can be built with."""
    if len(shape) != 3 or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"an input shape is three positive integers (channels, height, width), not {shape!r}")
    if not 0 < width <= WIDEST:
        raise ValueError(
            f"width must be a positive number of at most {WIDEST} (1.0 is the published network), not {width!r}"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout!r}")


def _spatial(layers: nn.Sequential, size: int, dimension: int) -> int:
    """The size of one image dimension after these layers, or 0 if the image does not reach that far."""
    for layer in layers.modules():
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            kernel, stride, padding = (
                _along(value, dimension) for value in (layer.kernel_size, layer.stride, layer.padding)
            )
            size = (size + 2 * padding - kernel) // stride + 1
            if size < 1:
                return 0
    return size


def _along(value: int | str | tuple[int, ...], dimension: int) -> int:
    return value[dimension] if isinstance(value, tuple) else int(value)
