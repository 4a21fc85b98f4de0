"""TFM with rank births: what is old leans towards each new task, and no old task notices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.rank_births import as_rank
from zeroforget.methods.base import TaskSpec, adams_rate
from zeroforget.methods.tfm import Candidate, Tfm
from zeroforget.training import Fit, FitLog, Regime


class Lean(Tfm):
    """TFM, where each task also adds a step of low rank to the weights older than it, which older tasks never see.

    The step is a birth like any other: W(k) = W + Σ up(s) · down(s) over s ≤ k, each on the block older than s, kept in
    16 bits and folded into an ordinary weight for use. Its directions start where a layer's inputs on the task's own
    images are largest. `adapters` is the same without growth: a fixed network and a step of low rank for each task.

    Options:
        rank: of each weight's step: a number, or a share below 1 of its full rank.
        aim: how many training images show where to start the steps; 0: in random directions.
        pairs: pairs (growth, rank) to try for each later task instead: the one of the fewest bytes within `margin` of
            the best wins.
        budget: bytes that each later task may add: tries all of it as growth, all as rank, and half of it as each, and
            keeps the most accurate.
        lr: Adam's learning rate for every task; None: the regime's optimizer and rate. Thin steps may want another rate
            than whole weights do.
    """

    name = "lean"
    overhead_formula = "2 bits (+ 2 floats with fn) per feature and task, 16 bits per number of a step"

    @classmethod
    def names(cls) -> dict[str, dict[str, Any]]:
        """Growth and rank, and rank alone."""
        return {"lean": {}, "adapters": {"start": 1.0, "growth": 0.0, "rank": 32}}

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        start: float = 0.8,
        growth: float = 0.02,
        rank: float = 32,
        aim: int = 256,
        pairs: Sequence[Sequence[float]] = (),
        budget: int | None = None,
        lr: float | None = None,
        **tfm: Any,
    ) -> None:
        if aim < 0:
            raise ValueError(f"aim is a number of images, 0 or more, not {aim}")
        if wrong := [pair for pair in pairs if len(pair) != 2 or not pair[0] >= 0]:
            raise ValueError(f"pairs are of a growth and a rank, such as [[0.02, 16], [0.05, 0]], not {wrong[0]!r}")
        if budget is not None and budget < 1:
            raise ValueError(f"budget is the bytes that a task may add, so at least 1, not {budget}")
        tried = {"pairs": pairs, "search": tfm.get("search"), "budget": budget}
        if len(given := [name for name, value in tried.items() if value]) > 1:
            raise ValueError(f"{' and '.join(given)} each say what to try for a task; choose one")
        if budget is not None:
            tfm = {"margin": 0.0} | tfm  # what fits is all the same: the most accurate is kept
        super().__init__(net, example, start=start, growth=growth, **tfm)
        self.rank = as_rank(rank)
        self.aim = aim
        self.pairs = [(float(pair[0]), as_rank(pair[1])) for pair in pairs]
        self.budget = budget
        self.lr = adams_rate(lr)
        self._images: Tensor | None = None

    # Structure -------------------------------------------------------------------------------------------------

    def add_to_net(self, spec: TaskSpec, growth: float | Mapping[str, float], rank: Any) -> None:
        """Let the network begin a task, its steps aimed at the task's images."""
        self.net.add_task(spec.name, spec.classes, growth, rank, images=self._images, quiet=True)

    def candidates(self) -> list[Candidate]:
        """Growths and ranks to try for the next task, those of the fewest bytes first."""
        if not self.specs:
            return super().candidates()
        left = max(0.0, self.net.left())
        if self.budget:
            return within_budget(self.net, self.budget, left)
        pairs = self.pairs or [(growth, self.rank) for growth in self.search or [self.growth]]
        found = [Candidate(min(growth, left), rank) for growth, rank in pairs]
        return sorted(dict.fromkeys(found), key=lambda one: self.net.added_bytes(*one))

    def _size(self, candidate: Candidate) -> float:
        """The bytes of a later task."""
        if not self.specs:
            return super()._size(candidate)
        return float(self.net.added_bytes(*candidate))

    # Learning --------------------------------------------------------------------------------------------------

    def changes(self, regime: Regime) -> dict[str, Any]:
        """Adam, where a rate for it was given."""
        return regime.with_adam(self.lr)

    def learn(self, task: Task, fit: Fit, past: Sequence[Task] = ()) -> FitLog:
        """As TFM does, with the task's own images to aim by."""
        task.check()
        try:
            self._images = self._looked_at(task) if self.specs and self.aim else None
            return super().learn(task, fit, past)
        finally:
            self._images = None

    def _looked_at(self, task: Task) -> Tensor:
        """Some of the task's training images, as the network takes them; always the same ones."""
        order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(0))
        images, _ = task.train.batch(order[: self.aim].to(task.train.labels.device))
        return task.prepare.test(images.to(self.get_buffer("example").device))


def within_budget(net: GrowingNetwork, budget: int, left: float) -> list[Candidate]:
    """What a task could add for so many bytes: all of them as rank, half of them, none. Growth has `left` at most."""
    cost = net.added_bytes
    ranks = [_largest(2**12, lambda rank, most=part: cost(0.0, rank) <= most) for part in (budget, budget // 2, 0)]
    found = {Candidate(0.0, ranks[0])}
    for rank in ranks[1:]:
        parts = _largest(1000, lambda n, rank=rank: cost(left * n / 1000, rank) <= budget)
        found.add(Candidate(left * parts / 1000, rank))
    return sorted(found, key=lambda one: cost(*one))


def _largest(most: int, fits: Callable[..., bool]) -> int:
    """The largest whole number from 0 to `most` that fits, if all below it do."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
