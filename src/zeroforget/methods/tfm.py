"""Ternary feature masks: the paper's own method, with and without feature normalization."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.growing.growth import evenly, smallest_within, suited_to, tapered
from zeroforget.growing.network import GrowingNetwork
from zeroforget.methods.base import Method, Overhead, TaskSpec
from zeroforget.methods.growth_search import standing, turns
from zeroforget.proving.grow import grow
from zeroforget.training import Fit, FitLog, Regime
from zeroforget.training.evaluate import Predictor
from zeroforget.training.learner import Diverged, diverged
from zeroforget.training.log import UNFINISHED


class Candidate(NamedTuple):
    """What a task may add."""

    growth: float
    rank: Any = 0


class Tfm(Method):
    """Each task adds a few features, trains them alone, and reads all older ones; older tasks never see the new.

    Masana, Tuytelaars and van de Weijer, "Ternary Feature Masks: zero-forgetting for task-incremental learning", 2021.

    A network that grows already is taken as it is, with its tasks; `unit`, `align`, `fn`, `bridge`, `keep` and
    `unknown` are then its own.

    Options:
        start: the share of the network that the first task gets.
        growth: the share that each later task adds, while there is room.
        early: the first layer's share for the first task, if it is not `start` too: layers in between get shares
            in between, and all layers are full at the same time. Early features are few, cost little and serve all
            tasks.
        search: growths to try for each later task instead (section 4.1): the smallest within `margin` of the best wins.
        search_start: shares to try for the first task, likewise.
        margin: how much validation accuracy may be given up for a smaller growth.
        prune: stop those candidates of a search that cannot be chosen any more.
        unit: what the shares are of, "features" or "weights".
        align: keep the widths of layers at multiples of this; by default of 8 on a GPU, of 1 elsewhere.
        fn: feature normalization: "reused" features, "all", or "none" ("TFM w/o FN").
        bridge: "zero" or "random": how weights from new features into old ones start.
        keep: paths of modules whose features shall not grow.
        unknown: "refuse" a network if some of its features cannot be followed, or "keep" those as they are.
    """

    name = "tfm"
    graph_safe = True
    family = "mask-based"
    zero_forgetting = True
    grows = True
    overhead_formula = "2 bits (+ 2 floats with fn) per feature and task"

    net: GrowingNetwork

    @classmethod
    def names(cls) -> dict[str, dict[str, Any]]:
        """TFM, and the paper's ablation of it."""
        return {"tfm": {}, "tfm-nofn": {"fn": "none"}}

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        start: float = 0.55,
        growth: float = 0.05,
        early: float | None = None,
        search: Sequence[float] = (),
        search_start: Sequence[float] = (),
        margin: float = 0.015,
        prune: bool = True,
        unit: str = "features",
        align: int | None = None,
        fn: str = "reused",
        bridge: str = "zero",
        keep: Sequence[str] = (),
        unknown: str = "refuse",
    ) -> None:
        if early is not None and not 0 < early <= 1:
            raise ValueError(f"early is a share of the first layer's features, above 0 and at most 1, not {early}")
        if early is not None and unit != "features":
            raise ValueError(f"early is a share of features, so unit must be 'features', not '{unit}'")
        _check(start, growth, search, search_start, margin)
        if not isinstance(net, GrowingNetwork):
            smallest = min([start, *search_start])
            options: dict[str, Any] = dict(unit=unit, fn=fn, bridge=bridge, keep=keep, unknown=unknown)
            net = grow(net, example, start=smallest, limit=1.0, align=1 if align is None else align, **options)
        else:
            align = net.limits.align
        super().__init__(net, example)
        self.specs = [TaskSpec(record.name, record.classes) for record in net.history]
        self.align = align
        self.start = start
        self.growth = growth
        self.early = early
        self.search = tuple(search)
        self.search_start = tuple(search_start)
        self.margin = margin
        self.prune = prune

    # Structure -------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec) -> None:
        """Grow by the smallest of what may be tried next, as far as there is room."""
        self._add(spec, *self.candidates()[0])

    def _add(self, spec: TaskSpec, growth: float | Mapping[str, float], rank: Any) -> None:
        if self.early is not None and not isinstance(growth, Mapping):
            first = not self.specs
            growth = tapered(self.net.axes.sizes, self.early, growth) if first else evenly(self.net.shares, growth)
        self.add_to_net(spec, growth, rank)
        self.specs.append(spec)

    def add_to_net(self, spec: TaskSpec, growth: float | Mapping[str, float], rank: Any) -> None:
        """Let the network begin a task."""
        self.net.add_task(spec.name, spec.classes, growth, rank, quiet=True)  # a step of a schedule may be that small

    def drop_task(self) -> None:
        """Take back the newest task."""
        self.net.drop_task()
        self.specs.pop()

    def structure(self) -> list[dict[str, Any]]:
        """Each task with the growth it got, and of what number widths were multiples."""
        records = [asdict(record) for record in self.net.history]
        return [
            {key: value for key, value in record.items() if key != "names" or value} | {"align": self.net.limits.align}
            for record in records
        ]

    def replay(self, structure: Sequence[dict[str, Any]]) -> None:
        """Grow as it was."""
        for entry in structure:
            self._keep_to(entry.get("align", 1 if self.align is None else self.align))
            self._add(TaskSpec(entry["name"], entry["classes"]), entry["growth"], entry.get("rank", 0))

    @classmethod
    def settled(cls, options: Mapping[str, Any], regime: Regime) -> dict[str, Any]:
        """Where widths are left open, the device decides."""
        left_open = options.get("align") is None
        return dict(options) | ({"align": suited_to(regime.device)} if left_open else {})

    def _keep_to(self, align: int) -> None:
        """Widths are multiples of this from now on."""
        self.align = align
        self.net.limits = replace(self.net.limits, align=align)

    def candidates(self) -> list[Candidate]:
        """What to try for the next task, smallest first, none beyond what is left."""
        wanted = (self.search or [self.growth]) if self.specs else (self.search_start or [self.start])
        if not self.specs:
            return [Candidate(growth) for growth in sorted(set(wanted))]
        left = max(0.0, self.net.left())
        return [Candidate(growth) for growth in sorted({float(min(g, left)) for g in wanted})]

    def _size(self, candidate: Candidate) -> float:
        """By what candidates are compared."""
        return candidate.growth

    # Learning --------------------------------------------------------------------------------------------------

    def learn(self, task: Task, fit: Fit, past: Sequence[Task] = ()) -> FitLog:
        """Learn a task: with the schedule's growth, or side by side with every growth of the search."""
        task.check()
        spec = TaskSpec(task.name, len(task.classes))
        if self.align is None:
            self._keep_to(self.net.limits.align if self.specs else suited_to(fit.regime.device))
        candidates, draws = self.candidates(), torch.get_rng_state()
        if len(candidates) == 1:
            return self._learn_in_place(spec, candidates[0], task, fit)
        trials = [self.candidate(spec, one, draws) for one in candidates]

        def next_ones(logs: list[FitLog]) -> list[int]:
            return turns([standing(log, len(task.val)) for log in logs], self.margin)

        logs = fit.race(trials, task, len(self.specs), next_ones if self.prune else None, **self.changes(fit.regime))
        ended = [i for i, log in enumerate(logs) if log.stopped != UNFINISHED]
        sound = [i for i in ended if math.isfinite(logs[i].val_accuracy)]
        if not sound:
            raise _never_finite(task, fit)
        accuracies = [logs[i].val_accuracy for i in sound]
        chosen = sound[smallest_within([self._size(candidates[i]) for i in sound], accuracies, self.margin)]
        self.net, log = trials[chosen].net, logs[chosen]
        self.specs.append(spec)
        log.notes |= _noted(candidates[chosen])
        log.notes["search"] = [
            _noted(candidates[i])
            | {
                "val_accuracy": each.val_accuracy,
                "chosen": i == chosen,
                "ended": i in ended,
                "epochs": len(each.epochs),
                "seconds": each.seconds,
            }
            for i, each in enumerate(logs)
        ]
        return log

    def candidate(self, spec: TaskSpec, chosen: Candidate, draws: Tensor) -> Tfm:
        """A copy that has grown so much; every candidate starts from the same draws."""
        torch.set_rng_state(draws)
        trial = copy.deepcopy(self)
        trial._add(spec, *chosen)
        return trial

    def _learn_in_place(self, spec: TaskSpec, candidate: Candidate, task: Task, fit: Fit) -> FitLog:
        unlearned = None if self.specs else copy.deepcopy(self.net)  # a first task cannot be dropped
        self._add(spec, *candidate)
        try:
            log = fit(self, task, len(self.specs) - 1, **self.changes(fit.regime))
            if not math.isfinite(log.val_accuracy):
                raise _never_finite(task, fit)
        except BaseException:
            if unlearned is None:
                self.drop_task()
            else:
                self.net, self.specs = unlearned, []
            raise
        log.notes |= _noted(candidate)
        return log

    def changes(self, regime: Regime) -> dict[str, Any]:
        """What is to be otherwise than the regime has it."""
        return {}

    def trainable(self) -> Iterable[nn.Parameter]:
        """What is born with the newest task."""
        return self.net.newborn()

    def moving(self) -> dict[str, Tensor]:
        """Newborn tensors, and the newest task's statistics."""
        return self.net.moving()

    # Use -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, task: int) -> Tensor:
        """A task's logits."""
        out: Tensor = self.net(x, task)
        return out

    def predictor(self, task: int) -> Predictor:
        """The task's own dense network."""
        return self.net.dense(task)

    def overhead(self) -> Overhead:
        """Masks, feature normalization and normalization layers of all tasks, while training and afterwards."""
        total = self.net.overhead().total
        return Overhead(training=total, inference=total)


def _noted(candidate: Candidate) -> dict[str, Any]:
    """A candidate, for the log."""
    return {"growth": candidate.growth} | ({"rank": candidate.rank} if candidate.rank else {})


def _check(start: float, growth: float, search: Sequence[float], search_start: Sequence[float], margin: float) -> None:
    """Refuse what no network can grow by."""
    for name, values in (("start", [start]), ("search_start", search_start)):
        if wrong := [value for value in values if not 0 < value <= 1]:
            raise ValueError(f"{name}: the first task gets a share above 0, at most 1, not {wrong[0]}; 0.55 is usual")
    for name, values in (("growth", [growth]), ("search", search)):
        if wrong := [value for value in values if not 0 <= value < math.inf]:
            raise ValueError(f"{name}: a later task adds a share of 0 or more, not {wrong[0]}; 0.05 is usual")
    if not margin >= 0:
        raise ValueError(f"margin is the accuracy that may be given up, so 0 or more, not {margin}")


def _never_finite(task: Task, fit: Fit) -> Diverged:
    what = f"the validation loss was never a number, from learning rate {fit.regime.lr:g} on"
    return diverged(task, fit.regime, what)
