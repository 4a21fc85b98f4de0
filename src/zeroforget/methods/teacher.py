"""What LwF and LFL share: the network as it was before a task, standing beside the one that learns it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, bits
from zeroforget.training import Fit, FitLog


class Taught(Method):
    """A method that learns each task beside the network of the task before: a frozen copy, always in eval mode.

    The copy exists only while a task is learned. It is what the network was just before, so it is never saved.
    """

    family = "distillation"
    overhead_formula = "1 float per parameter"
    tradeoff = "strength"

    _teacher: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule

    def learn(self, task: Task, fit: Fit, past: Sequence[Task] = ()) -> FitLog:
        """Keep a copy of the network as it is, then learn."""
        if self.specs:
            self._teacher = (copy.deepcopy(self.net).eval().requires_grad_(False),)
        try:
            return super().learn(task, fit, past)
        finally:
            self._teacher = ()

    def taught(self, x: Tensor) -> Tensor:
        """The features that the network had before this task."""
        with torch.no_grad():
            features: Tensor = self._teacher[0](x)
        return features

    def moving(self) -> dict[str, Tensor]:
        """The network and the newest head."""
        newest = f"heads.{len(self.heads) - 1}."
        return {n: t for n, t in self.state_dict().items() if n.startswith(("net.", newest))}

    def overhead(self) -> Overhead:
        """A second network, while a task is learned."""
        return Overhead(training=bits(*self.net.parameters(), *self.net.buffers()))
