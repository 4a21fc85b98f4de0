"""Learning without forgetting."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.methods.base import finite
from zeroforget.methods.teacher import Features, Taught


def distillation(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """How far a softened prediction is from the softened target, for each image (and head): eqs. (2) and (3).

    The target's own entropy, which no weight can change, is left out: a network equal to its teacher pays nothing.
    """
    now, then = (logits / temperature).log_softmax(-1), (target / temperature).log_softmax(-1)
    return (then.exp() * (then - now)).sum(-1)


class Lwf(Taught):
    """Learn the new task while every old head goes on answering as before, on the new task's images.

    Li and Hoiem, "Learning without forgetting", ECCV 2016. Each old head has a softmax of its own, as each answers for
    its own task.

    Options:
        strength: λ, the weight of each old head's distillation.
        temperature: T, which softens both predictions.
    """

    name = "lwf"

    def __init__(self, net: nn.Module, example: Tensor, *, strength: float = 2.0, temperature: float = 1.0) -> None:
        super().__init__(net, example)
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive, not {temperature}")
        finite(0, strength=strength)
        self.strength = strength
        self.temperature = temperature

    def departure(self, now: Features, before: Tensor, task: int, batch: int) -> Tensor:
        """λ times the distillation of every old head. Those of as many classes answer together, so that a GPU has few
        operators to run, however many tasks there were."""
        old = [cast(nn.Linear, head) for head in self.heads[:task]]
        parts = []
        for classes in sorted({head.out_features for head in old}):
            alike = [head for head in old if head.out_features == classes]
            weight, bias = torch.cat([head.weight for head in alike]), torch.cat([head.bias for head in alike])
            logits, target = (
                F.linear(features, weight, bias).unflatten(1, (len(alike), classes))
                for features in (now.handed, before)
            )
            parts.append(distillation(logits, target, self.temperature))
        return self.strength * torch.cat(parts, 1).sum(1)
