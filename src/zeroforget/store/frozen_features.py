"""A task on features that stay as they are: they are computed once, and a head is fitted to them. What a task adds to
them starts from that head, and is kept only where it does better."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.labels import births_of
from zeroforget.growing.growth import Growth
from zeroforget.growing.layers import GrowingNorm
from zeroforget.growing.network import GrowingNetwork
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.lean import Lean
from zeroforget.progress import Epoch
from zeroforget.store.network import preparation
from zeroforget.store.pictures import Lesson
from zeroforget.training import FitLog, logits
from zeroforget.training.probe import Head, fit_head


@dataclass(frozen=True)
class Fitted:
    """A network that has begun the task, its head on features that were there, and how that came."""

    net: GrowingNetwork
    head: Head
    log: FitLog


@torch.no_grad()
def on_frozen(net: GrowingNetwork, ready: Lesson, growth: Growth, *, device: str) -> Fitted:
    """Begin the task on this network, and fit its head; nothing else moves."""
    began, task = time.perf_counter(), ready.task
    net.add_task(task.name, len(task.classes), growth, quiet=True)
    head = fit_newest(net.eval(), ready, device=device)
    place(net, head.weight, head.bias)
    log = FitLog(stopped="the head fits, and its features are frozen")
    log.add(Epoch(0, 0.0, head.loss, head.loss, head.accuracy, time.perf_counter() - began), "last")
    return Fitted(net, head, log)


@torch.no_grad()
def fit_newest(net: GrowingNetwork, ready: Lesson, *, device: str) -> Head:
    """A head for the newest task, fitted to its features as they are now."""
    task, prepare = ready.task, preparation(ready.preprocessing)
    extract = net.dense(len(net.history) - 1).get_submodule("features").to(device)
    train = choosing = (logits(extract, task.train, prepare, device=device), task.train.labels)
    if task.val is not task.train:
        choosing = (logits(extract, task.val, prepare, device=device), task.val.labels)
    if task.prepare.flip:
        mirrored = logits(lambda x: extract(x.flip(-1)), task.train, prepare, device=device)
        train = (torch.cat([train[0], mirrored]), task.train.labels.repeat(2))
        choosing = train if task.val is task.train else choosing
    return fit_head(train, choosing, len(task.classes))


@torch.no_grad()
def place(net: GrowingNetwork, weight: Tensor, bias: Tensor) -> None:
    """Give the newest task this head. Where it is for the features that were there before, new ones have no say yet."""
    own, births = net.heads[-1].get_parameter("weight"), births_of(net.axes.output, net.births)
    known = births < len(net.history) - 1 if weight.shape[1] < len(births) else torch.ones_like(births).bool()
    own.zero_()
    own[:, known.to(own.device)] = weight.to(own)
    net.heads[-1].get_parameter("bias").copy_(bias)


class Added(Lean):
    """`lean` on frozen features: each task starts as the head that fits them, and what is new moves it from there.

    Batch normalization goes on with the statistics that the features came with: those of a few photos are no better,
    and the head was fitted to these.
    """

    name = "added"

    def __init__(self, net: nn.Module, example: Tensor, head: Head, **lean: Any) -> None:
        super().__init__(net, example, **lean)
        self.head = head

    @classmethod
    def names(cls) -> dict[str, dict[str, Any]]:
        """None: it begins with a head that no experiment has."""
        return {}

    def add_to_net(self, spec: TaskSpec, growth: Any, rank: Any) -> None:
        """Begin a task with the head."""
        super().add_to_net(spec, growth, rank)
        place(self.net, *self.head.first)

    def train(self, mode: bool = True) -> Added:
        """Training mode or not, normalization aside."""
        super().train(mode)
        for norm in self.net.body.modules() if mode else ():
            if isinstance(norm, GrowingNorm):
                norm.tasks[-1].eval()
        return self
