"""Finding networks by name. The keyword arguments of what builds one are its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroforget.files.text import nearest
from zeroforget.nets.convnets import (
    AlexNet,
    LeNet,
    Small,
    SqueezeNet,
    alexnet_cifar,
    conv4,
    lenet_wide,
    vgg16,
    vgg16_tiny,
)
from zeroforget.nets.layers import Shape
from zeroforget.nets.resnet import Compact, resnet18, resnet50


@dataclass(frozen=True)
class Network:
    """What builds a network, and the input shape that it was made for."""

    factory: Callable[..., nn.Module]
    shape: Shape


MOST_WEIGHTS = 2**33
"""No network is built that has more."""

NETWORKS = {
    "small": Network(Small, (1, 8, 8)),
    "lenet": Network(LeNet, (1, 32, 32)),
    "compact": Network(Compact, (3, 64, 64)),
    "squeezenet": Network(SqueezeNet, (3, 224, 224)),
    "lenet-wide": Network(lenet_wide, (3, 32, 32)),
    "conv4": Network(conv4, (3, 64, 64)),
    "alexnet-cifar": Network(alexnet_cifar, (3, 32, 32)),
    "alexnet": Network(AlexNet, (3, 224, 224)),
    "vgg16": Network(vgg16, (3, 224, 224)),
    "vgg16-tiny": Network(vgg16_tiny, (3, 64, 64)),
    "resnet18": Network(resnet18, (3, 224, 224)),
    "resnet50": Network(resnet50, (3, 224, 224)),
}


def names() -> list[str]:
    """Every network of ours, from small to large."""
    return list(NETWORKS)


def find(name: str) -> Network:
    """A network by name; a misspelling is an error that names the nearest one."""
    if name not in NETWORKS:
        raise ValueError(f"no network '{name}'{nearest(name, NETWORKS)} (zeroforget networks lists all)")
    return NETWORKS[name]


def options(name: str) -> dict[str, inspect.Parameter]:
    """A network's options: the keyword-only arguments of what builds it."""
    parameters = inspect.signature(find(name).factory).parameters
    return {n: p for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def build(name: str, shape: Shape, *, width: float = 1.0, dropout: float | None = None, **chosen: Any) -> nn.Module:
    """A feature extractor for images of shape (channels, height, width), at a share of its published width.

    Without `dropout` it is the network's own: 0.5 on the hidden linear layers of LeNet, AlexNet and VGG, else none.
    """
    known = options(name)
    for key in chosen:
        if key not in known:
            has = ", ".join(known)
            raise ValueError(f"network '{name}' has no option '{key}'{nearest(key, known)} (its options: {has})")
    if dropout is not None:
        chosen["dropout"] = dropout
    factory, size = find(name).factory, tuple(shape)
    with torch.device("meta"):  # without storage
        weights = sum(p.numel() for p in factory(size, width=width, **chosen).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(
            f"{name} would have {weights:,} weights, and {MOST_WEIGHTS:,} are the most; "
            "choose a smaller width, smaller images or another network"
        )
    return factory(size, width=width, **chosen)
