"""What our networks share: how their layers start, and the hidden linear layers at their end."""

from __future__ import annotations

from itertools import pairwise

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
