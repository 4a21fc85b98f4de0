"""Learning without forgetting."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.data import Task
from zeroforget.methods.base import TaskSpec, finite
from zeroforget.methods.teacher import Features, Taught
from zeroforget.training import Fit, FitLog
from zeroforget.training.log import joined


def distillation(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """How far a softened prediction is from the softened target, for each image (and head): eqs. (2) and (3).

    The target's own entropy, which no weight can change, is left out: a network equal to its teacher pays nothing.
    """
    now, then = (logits / temperature).log_softmax(-1), (target / temperature).log_softmax(-1)
    return (then.exp() * (then - now)).sum(-1)


class Lwf(Taught):
    """Learn the new task while every old head goes on answering as before, on the new task's images.

    Li and Hoiem, "Learning without forgetting", ECCV 2016. Each old head has a softmax of its own, as each answers for
    its own task. As published, a new head first warms up alone and old heads then learn with the rest: set `warmup`
    and `old_heads` for that.

    Options:
        strength: λ, the weight of each old head's distillation.
        temperature: T, which softens both predictions.
        warmup: so many epochs of each later task train the new head alone, on features that stand still.
        old_heads: old heads learn too; else they stay as their task left them.
    """

    name = "lwf"

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        strength: float = 2.0,
        temperature: float = 1.0,
        warmup: int = 0,
        old_heads: bool = False,
    ) -> None:
        super().__init__(net, example)
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive, not {temperature}")
        if warmup < 0:
            raise ValueError(f"warmup is a number of epochs, 0 or more, not {warmup}")
        finite(0, strength=strength)
        self.strength = strength
        self.temperature = temperature
        self.warmup = warmup
        self.old_heads = old_heads
        self._warming = False
        self._heads_before: tuple[nn.ModuleList, ...] = ()  # in a tuple, so that they are no submodules

    def add_task(self, spec: TaskSpec) -> None:
        """A head; those before it may go on learning."""
        super().add_task(spec)
        self.heads.requires_grad_(self.old_heads)
        self.heads[-1].requires_grad_(True)

    def learn(self, task: Task, fit: Fit, past: Sequence[Task] = ()) -> FitLog:
        """Old heads that learn have a teacher too: themselves, as they were."""
        if self.old_heads:
            self._heads_before = (copy.deepcopy(self.heads).requires_grad_(False),)
        try:
            return super().learn(task, fit, past)
        finally:
            self._heads_before = ()

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """The new head alone, if it is to warm up; then everything."""
        index = len(self.specs) - 1
        if not (self.warmup and index):
            return super().train_task(task, fit)
        self._warming = True
        try:
            first = fit(self, task, index, epochs=self.warmup, warmup=0.0)
        finally:
            self._warming = False
        return joined(first, fit(self, task, index))

    def train(self, mode: bool = True) -> Self:
        """While a head warms up, neither dropout nor the batch touches what it reads."""
        super().train(mode)
        if self._warming:
            self.net.eval()
        return self

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """The new task's alone while its head warms up: nothing departs from the teacher."""
        if not self._warming:
            return super().loss(x, y, task)
        with torch.no_grad():
            features = self.net(x)
        return self.cross_entropy(self.heads[task](features), y)

    def trainable(self) -> Iterable[nn.Parameter]:
        """The network and the newest head, and old ones if they learn; while it warms up, the newest head."""
        yield from () if self._warming else self.taught()
        yield from self.heads[-1].parameters()

    def taught(self) -> Iterable[nn.Parameter]:
        """The network, and old heads if they learn."""
        yield from self.net.parameters()
        yield from (p for head in self.heads[: -1 if self.old_heads else 0] for p in head.parameters())

    def moving(self) -> dict[str, Tensor]:
        """The same, statistics included."""
        return self.tensors_of("net", "heads") if self.old_heads else super().moving()

    def departure(self, now: Features, before: Tensor, task: int, batch: int) -> Tensor:
        """λ times the distillation of every old head. Those of as many classes answer together, so that a GPU has few
        operators to run, however many tasks there were."""
        before_heads = self._heads_before[0] if self._heads_before else self.heads
        pairs = [(cast(nn.Linear, self.heads[k]), cast(nn.Linear, before_heads[k])) for k in range(task)]
        parts = []
        for classes in sorted({now_head.out_features for now_head, _ in pairs}):
            alike = [pair for pair in pairs if pair[0].out_features == classes]
            logits, target = (
                _together([pair[side] for pair in alike], features)
                for side, features in enumerate((now.handed, before))
            )
            parts.append(distillation(logits, target, self.temperature))
        return self.strength * torch.cat(parts, 1).sum(1)


def _together(heads: Sequence[nn.Linear], features: Tensor) -> Tensor:
    """(batch, heads, classes) of heads of as many classes."""
    weight, bias = torch.cat([head.weight for head in heads]), torch.cat([head.bias for head in heads])
    logits: Tensor = F.linear(features, weight, bias).unflatten(1, (len(heads), heads[0].out_features))
    return logits
