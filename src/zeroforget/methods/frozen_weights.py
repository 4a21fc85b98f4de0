"""Single weights that may not move while their neighbours in the same tensor learn."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class FrozenWeights:
    """Of a network's named weights only the elements marked in `free` may move; the others keep their bits."""

    def __init__(self, net: nn.Module, free: Mapping[str, Tensor]) -> None:
        self.free = dict(free)
        self.weights = {name: net.get_parameter(name) for name in free}
        self.still = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def silence(self) -> None:
        """After the backward pass: frozen weights have no say in how the others move."""
        for name, free in self.free.items():
            if (gradient := self.weights[name].grad) is not None:
                gradient.masked_fill_(~free, 0.0)

    @torch.no_grad()
    def restore(self) -> None:
        """After a step: momentum and weight decay move weights without a gradient, so the old bits are written back."""
        for name, free in self.free.items():
            weight = self.weights[name]
            torch.where(free, weight, self.still[name], out=weight)
