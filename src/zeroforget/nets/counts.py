"""Weights and features of a network, what their masks cost, and how the paper's Table 1 counted them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from zeroforget.nets.registry import build, find

SHORTCUTS = {"shortcut", "downsample"}
"""Names of modules that carry a residual sum's input past a block (the second is torchvision's)."""


@dataclass(frozen=True)
class Published:
    """A row of the paper's Table 1, and why it is not what we count."""

    weights: int
    features: int
    why: str


_VGG = Published(
    119_579_904,
    10_880,
    "The paper's weights are those of vgg16 at 3×224×224, counted as for alexnet; its features those of vgg16-tiny.",
)
PAPER = {
    "lenet": Published(
        59_956,
        226,
        "The paper counts the original of 1998, where each map of the second convolution reads only some of the first"
        " (60 of 96 pairs); ours reads all, as LeNet is built today.",
    ),
    "alexnet": Published(
        54_547_712,
        9_344,
        "The paper counts a convolution as k²·out + out, as if it read one map, and linear layers without biases.",
    ),
    "vgg16": _VGG,
    "vgg16-tiny": _VGG,
    "resnet50": Published(
        19_330_304,
        22_720,
        "No rule we know gives the paper's weights; ours are all parameters without the head, BatchNorm and shortcuts"
        " included. Features of shortcuts are not counted, by the paper or by us: they are those of the sum.",
    ),
}


@dataclass(frozen=True)
class Counts:
    """A network's size without a head, and what one more task's masks over it would cost."""

    weights: int
    features: int

    @property
    def weight_mask_bytes(self) -> int:
        """A binary mask over weights: 1 bit each."""
        return math.ceil(self.weights / 8)

    @property
    def feature_mask_bytes(self) -> int:
        """A ternary mask over features: 2 bits each."""
        return math.ceil(2 * self.features / 8)


def count(net: nn.Module) -> Counts:
    """Count a network as it is."""
    return Counts(weights(net), features(net))


def count_named(name: str, shape: tuple[int, int, int] | None = None) -> Counts:
    """Count a network of ours at full width, for its own input shape unless told another, without its weights."""
    with torch.device("meta"):
        return count(build(name, shape or find(name).shape))


def weights(net: nn.Module) -> int:
    """All parameters: weights, biases and affine parameters."""
    return sum(p.numel() for p in net.parameters())


def features(net: nn.Module) -> int:
    """Outputs of every convolution and linear layer, but for shortcuts, whose outputs are added to others."""
    return sum(layer.weight.shape[0] for layer in _layers(net))


def paper_rule_weights(net: nn.Module) -> int:
    """The paper's rule for AlexNet and VGG: k²·out + out for a convolution, in·out for a linear layer."""
    return sum(
        math.prod(layer.kernel_size) * layer.out_channels + layer.out_channels
        if isinstance(layer, nn.Conv2d)
        else layer.in_features * layer.out_features
        for layer in _layers(net)
    )


def paper_weights(name: str) -> int | None:
    """The paper's weights worked out anew by its own rule, or None where no rule is known to give them."""
    with torch.device("meta"):
        if name == "lenet":
            # LeCun et al. (1998), table I: 36 of the 6 · 16 pairs of maps are not connected, 5 · 5 weights each.
            return weights(build("lenet", (1, 32, 32))) - 36 * 25
        if name == "alexnet":
            return paper_rule_weights(build("alexnet", (3, 224, 224)))
        if name in ("vgg16", "vgg16-tiny"):
            return paper_rule_weights(build("vgg16", (3, 224, 224)))
    return None


def _layers(net: nn.Module) -> Iterator[nn.Conv2d | nn.Linear]:
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and not SHORTCUTS.intersection(name.split(".")):
            yield module
