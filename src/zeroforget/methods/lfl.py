"""Less-forgetting learning."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeroforget.methods.base import finite
from zeroforget.methods.teacher import Features, Taught


class Lfl(Taught):
    """Learn the new task while the last hidden layer goes on saying what it said before, on the new task's images.

    Jung et al., "Less-forgetting learning in deep neural networks", 2016. The old decision boundaries, which are the
    old heads, stay as they are. Features are compared before dropout, which would only add noise to the distance.

    Options:
        strength: λ, the weight of the distance between old and new features.
    """

    name = "lfl"

    def __init__(self, net: nn.Module, example: Tensor, *, strength: float = 0.05) -> None:
        super().__init__(net, example)
        finite(0, strength=strength)
        self.strength = strength

    def departure(self, now: Features, before: Tensor, task: int, batch: int) -> Tensor:
        """λ · ½ ‖f_old(x) − f(x)‖², eq. (3), times the batch: it is summed where the rest is a mean."""
        wide = torch.promote_types(before.dtype, torch.float32)  # squares of bfloat16 differences are too coarse
        return self.strength * batch / 2 * (before.to(wide) - now.whole.to(wide)).square().sum(1)
