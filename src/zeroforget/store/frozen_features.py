"""A task on features that stay as they are: they are computed once, and a head is fitted to them. What a task adds to
them starts from that head, and is kept only where it does better. Small test parts are cross-validated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.labels import births_of
from zeroforget.data import Split
from zeroforget.growing.growth import Growth
from zeroforget.growing.layers import GrowingNorm
from zeroforget.growing.network import GrowingNetwork
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.lean import Lean
from zeroforget.progress import Epoch
from zeroforget.store.network import preparation
from zeroforget.store.pictures import ALIKE, EVEN, SIDE, Lesson, selected, thumbnails
from zeroforget.store.schema import interval
from zeroforget.training import FitLog, logits
from zeroforget.training.probe import Head, fit_head
from zeroforget.training.seeding import generator


class TaskFeatures:
    """What a task's network makes of the task's pictures, those of each part computed once."""

    def __init__(self, net: GrowingNetwork, ready: Lesson, device: str) -> None:
        self.extract = net.dense(len(net.history) - 1).get_submodule("features").to(device)
        self.prepare, self.device = preparation(ready.preprocessing), device
        self._known: list[tuple[Split, Tensor]] = []

    def of(self, part: Split) -> Tensor:
        """A row for each picture of a part of the task."""
        for split, values in self._known:
            if split is part:
                return values
        values = logits(self.extract, part, self.prepare, device=self.device)
        self._known.append((part, values))
        return values

    def mirrored(self, part: Split) -> Tensor:
        """Of the same pictures, left to right."""
        return logits(lambda x: self.extract(x.flip(-1)), part, self.prepare, device=self.device)


@dataclass(frozen=True)
class Fitted:
    """A network that has begun the task, its head on features that were there, and how that came."""

    net: GrowingNetwork
    features: TaskFeatures
    head: Head
    log: FitLog


@torch.no_grad()
def on_frozen(net: GrowingNetwork, ready: Lesson, growth: Growth, *, device: str) -> Fitted:
    """Begin the task on this network, and fit its head; nothing else moves."""
    began, task = time.perf_counter(), ready.task
    net.add_task(task.name, len(task.classes), growth, quiet=True)
    features = TaskFeatures(net.eval(), ready, device)
    head = fit_newest(features, ready)
    place(net, head.weight, head.bias)
    log = FitLog(stopped="the head fits, and its features are frozen")
    log.add(Epoch(0, 0.0, head.loss, head.loss, head.accuracy, time.perf_counter() - began), "last")
    return Fitted(net, features, head, log)


@torch.no_grad()
def fit_newest(features: TaskFeatures, ready: Lesson) -> Head:
    """A head for the newest task, fitted to its features as they are now."""
    task = ready.task
    train = choosing = (features.of(task.train), task.train.labels)
    if task.val is not task.train:
        choosing = (features.of(task.val), task.val.labels)
    if task.prepare.flip:
        train = (torch.cat([train[0], features.mirrored(task.train)]), task.train.labels.repeat(2))
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


FOLDS = 5
"""Parts, where a head on frozen features has fewer test pictures than `ENOUGH`."""
ENOUGH = 200
CROSS_VALIDATION = "cross_validation"
"""Where a task's training tells what was found."""
Judged = Callable[[Split, Split, Split], int]
"""Learn from the first, choose by the second, and count the right answers on the third."""


def pooled(ready: Lesson) -> list[Split]:
    """The parts of a task, but for a folder of test pictures."""
    task = ready.task
    parts = [task.train, *([] if task.val is task.train else [task.val])]
    return parts + ([task.test] if task.test.images is task.train.images else [])


def pool(ready: Lesson) -> Split:
    """All pictures of these parts."""
    parts = pooled(ready)
    rows = [part.rows for part in parts if part.rows is not None]
    return Split(ready.task.train.images, torch.cat([part.labels for part in parts]), torch.cat(rows))


def folds(pictures: Split, count: int, seed: int) -> Tensor:
    """The part of each picture: every class in even shares, near copies in the same part."""
    out = torch.zeros(len(pictures), dtype=torch.int64)
    for label in pictures.labels.unique().tolist():
        rows = (pictures.labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(rows), generator=generator("folds", seed, label))
        out[rows[order]] = torch.arange(len(rows)) % count
    assert pictures.rows is not None
    small = thumbnails(pictures.images, pictures.rows)
    for start in range(0, len(small), 1024):
        some = small[start : start + 1024]
        alike = (torch.cdist(some, small) < ALIKE * SIDE).int().argmax(1)  # itself, or the first that it looks like
        own = torch.arange(start, start + len(some))
        out[own] = out[torch.where(some.std(1) > EVEN, alike, own)]
    return out


def cross_validated(known: Split, parts: Tensor, seed: int, share: float, judge: Judged) -> dict[str, Any]:
    """The share of right answers over all parts; `share` of what is learned from chooses."""
    right, every = 0, torch.arange(len(known))
    for number in parts.unique().tolist():
        learned = parts != number
        choosing = selected(known.labels, learned, share, seed)
        train, val, test = (_part(known, every[chosen]) for chosen in (learned & ~choosing, choosing, ~learned))
        right += judge(train, val if len(val) else train, test)
    return {"folds": len(parts.unique()), "pictures": len(known), "accuracy": right / len(known)}


def _part(known: Split, index: Tensor) -> Split:
    return Split(known.images, known.labels[index], index if known.rows is None else known.rows[index])


@dataclass(frozen=True)
class Found:
    """What a cross-validation found."""

    folds: int
    pictures: int
    accuracy: float

    def __str__(self) -> str:
        low, high = (f"{100 * bound:.0f}" for bound in interval(self.accuracy, self.pictures))
        return (
            f"{100 * self.accuracy:.1f} % of {self.pictures:,} pictures (95 % interval: {low} to {high} %), each "
            f"tested by one of {self.folds} that learned from the others"
        )

    @staticmethod
    def of(training: Mapping[str, Any]) -> Found | None:
        """As it was written down; None where it was not. A model may come from others: nothing is taken on trust."""
        told = training.get(CROSS_VALIDATION)
        if not isinstance(told, dict):
            return None
        counts, right = [told.get(name) for name in ("folds", "pictures")], told.get("accuracy")
        parts, pictures = (n if isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**40 else 0 for n in counts)
        if not parts or not pictures or not isinstance(right, float) or not 0 <= right <= 1:
            return None
        return Found(parts, pictures, right)


def judge_head(train: Split, val: Split, test: Split) -> int:
    """Of a head on features, which stand in the place of pictures."""
    learned, choosing, tested = (
        (part.images[part.rows], part.labels) for part in (train, val, test) if part.rows is not None
    )
    head = fit_head(learned, learned if val is train else choosing, int(train.labels.max()) + 1)
    return int(((tested[0] @ head.weight.T + head.bias).argmax(1) == tested[1]).sum())
