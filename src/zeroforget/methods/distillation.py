"""Methods that ask the network as it was before a task, standing beside the one that learns it: LwF and LFL."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.data import Task
from zeroforget.methods.activity import Activity
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits, finite
from zeroforget.training import Fit, FitLog, Regime
from zeroforget.training.evaluate import Predictor
from zeroforget.training.log import joined


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
