"""What LwF and LFL share: the network as it was before a task, standing beside the one that learns it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.methods.activity import Activity
from zeroforget.methods.base import Method, Overhead, bits
from zeroforget.training import Fit, FitLog, Regime
from zeroforget.training.evaluate import Predictor


@dataclass(frozen=True)
class Features:
    """The last hidden layer of the network."""

    handed: Tensor
    """As a head gets it."""
    whole: Tensor
    """Before dropout thinned it, if that is the network's last act."""


class Taught(Method):
    """A method that learns each task beside the network of the task before: a frozen copy, always in eval mode.

    The copy exists only while a task is learned. It is what the network was just before, so it is never saved.
    """

    family = "distillation"
    overhead_formula = "1 float per parameter"
    tradeoff = "strength"
    graph_safe = True

    _teacher: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule

    _lr = math.inf
    _batch = 1
    _loss: Tensor | None = None

    def learn(self, task: Task, fit: Fit, past: Sequence[Task] = ()) -> FitLog:
        """Keep a copy of the network as it is, then learn."""
        self._lr, self._batch = fit.regime.reach, min(fit.regime.batch_size, len(task.train))
        if self.specs:
            self._teacher = (standing(self.net, self.get_buffer("example"), fit.regime),)
        try:
            return super().learn(task, fit, past)
        finally:
            self._teacher = ()

    def departure(self, now: Features, before: Tensor, task: int, batch: int) -> Tensor:
        """What each image of a batch of this size costs because the network left its teacher."""
        raise NotImplementedError

    def taught(self) -> Iterable[nn.Parameter]:
        """What the teacher holds back."""
        return self.net.parameters()

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """Cross-entropy on the new task, and the departure."""
        now = self._features(x)
        loss = self.cross_entropy(self.heads[task](now.handed), y)
        if self._teacher:
            loss = loss + self.departure(now, self._before(x), task, len(x)).mean()
            self._loss = loss.detach()
        return loss

    @torch.no_grad()
    def after_backward(self) -> None:
        """Shorten a step that would overshoot: none may promise to lower the loss by more than all of it.

        A strong teacher makes the loss steep, and at a fixed learning rate the network would be thrown out of the very
        answers that it should keep. A step is measured at the rate with which the task began: when the rate has fallen,
        more are shortened than would overshoot. (The bound of Loizou et al., "Stochastic Polyak step-size for SGD",
        2021.)
        """
        gradients = [p.grad for p in self.taught() if p.grad is not None]
        if self._loss is None or not gradients:
            return
        promised = self._lr * nn.utils.get_total_norm(gradients).square()
        share = (self._loss / promised.clamp(min=1e-30)).clamp(max=1.0)
        torch._foreach_mul_(gradients, share)
        self._loss = None

    def score(self, predictor: Predictor, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]:
        """The same for validation: the epoch that is kept learned well and departed little."""
        losses, correct = super().score(predictor, x, y, task)
        if self._teacher:
            losses = losses + self.departure(self._features(x), self._before(x), task, self._batch)
        return losses, correct

    def _features(self, x: Tensor) -> Features:
        with Activity() as seen:
            handed: Tensor = self.net(x)
        return Features(handed, seen.before_dropout(handed))

    @torch.no_grad()
    def _before(self, x: Tensor) -> Tensor:
        features: Tensor = self._teacher[0](x)
        return features

    def moving(self) -> dict[str, Tensor]:
        """The network and the newest head."""
        return self.tensors_of("net", self.newest_head())

    def overhead(self) -> Overhead:
        """A second network, while a task is learned."""
        return Overhead(training=bits(*self.net.parameters(), *self.net.buffers()))


def standing(net: nn.Module, example: Tensor, regime: Regime) -> nn.Module:
    """A copy of the network that only answers. Under mixed precision its layers are brought into the lower one here,
    once, and not in every step, if its answers stay the same, bit for bit: not if somebody reads a layer's weight."""
    copied = copy.deepcopy(net).eval().requires_grad_(False)
    if regime.device.startswith("cuda"):
        copied.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if regime.precision != "bf16":
        return copied
    lower = copy.deepcopy(copied)
    for module in lower.modules():
        if type(module) in (nn.Linear, nn.Conv2d):
            module.weight.data = module.weight.data.bfloat16()
    x = example
    if x.is_floating_point():  # it may be nothing but zeros
        x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    try:
        with torch.no_grad(), regime.autocast():
            return lower if torch.equal(lower(x), copied(x)) else copied
    except RuntimeError:  # it computes by itself, in full precision
        return copied
