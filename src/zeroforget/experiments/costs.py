"""What methods took: operations counted, parameters, bytes and seconds, and a table of these beside the results.

Operations: torch counts the products of one step, or of one answer, as they run (a multiplication and an addition are
two), and a step's are multiplied by the images that training saw.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from zeroforget.data import Task
from zeroforget.experiments.comparability import same_training
from zeroforget.experiments.results import Results, mean
from zeroforget.experiments.tables import average_from, by_method, groups, signed, title_of, titles
from zeroforget.training import Fit, FitLog
from zeroforget.training.evaluate import Predictor
from zeroforget.training.feed import LoadedTask
from zeroforget.training.fit import Turns
from zeroforget.training.learner import Learner

LOOKED_AT = 4
"""So many images make the step that is counted; each image of a batch costs the same."""


@dataclass
class CountingFit(Fit):
    """A fit that adds up the operations of all that it trains, the candidates of a growth search included."""

    operations: int = field(default=0, init=False, compare=False)

    def race(
        self,
        learners: Sequence[Learner],
        task: Task | LoadedTask,
        index: int,
        turns: Turns | None = None,
        **changes: Any,
    ) -> list[FitLog]:
        """Count a step of each before they train."""
        assert isinstance(task, Task), "experiments learn from splits"
        device = replace(self.regime, **changes).device
        each = [operations_of_a_step(learner, task, index, device) for learner in learners]
        logs = super().race(learners, task, index, turns, **changes)
        images = len(task.train)
        self.operations += sum(count * images * len(log.epochs) for count, log in zip(each, logs, strict=True))
        return logs


def operations_of_a_step(learner: Learner, task: Task, index: int, device: str) -> int:
    """What a step costs for each image, forward and back, on a copy: nothing of the learner moves, nor a random number.

    A step that cannot be copied or run by itself counts nothing; its training will say why.
    """
    rows = torch.arange(min(LOOKED_AT, len(task.train)), device=task.train.labels.device)
    images, y = task.train.batch(rows)
    cuda = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(cuda):
        try:
            twin = copy.deepcopy(learner)
            twin.train()
            twin.before_step(0.0)
            x = task.prepare.test(images.to(device))
            with FlopCounterMode(display=False) as counter:
                loss = twin.loss(x, y.to(device), index)
                if loss.requires_grad:
                    loss.backward()
        except (ValueError, RuntimeError, TypeError, AttributeError, NotImplementedError):
            return 0
    total: int = counter.get_total_flops()
    return round(total / len(rows))


@torch.no_grad()
def operations_of_an_answer(predictor: Predictor, x: Tensor) -> int:
    """What one image's logits cost."""
    with FlopCounterMode(display=False) as counter:
        predictor(x[:1])
    total: int = counter.get_total_flops()
    return total


@dataclass(frozen=True)
class Cost:
    """What one method took: means over seeds, after the last task. Overhead is in bits."""

    method: str
    parameters: float
    training: float
    inference: float
    epochs: float
    seconds: float
    kept: float
    tasks: int
    transfer: float | None
    average: float
    network: float
    everything: float
    packed: float | None
    learning: float | None
    answer: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        """A row under the header `COSTS`."""
        return (
            title_of(self.method),
            f"{self.parameters:,.0f}",
            size(self.training),
            size(self.inference),
            f"{self.epochs:.0f}",
            f"{self.seconds:.1f}",
            f"{round(self.kept, 1):g} of {self.tasks} tasks",
            "–" if self.transfer is None else signed(self.transfer),
            f"{self.average:.1f}",
            size(self.network),
            size(self.everything),
            "–" if self.packed is None else size(self.packed),
            count(self.learning),
            count(self.answer),
        )


@dataclass(frozen=True)
class CostTable:
    """The costs of the methods that stand in one table."""

    title: str
    rows: tuple[Cost, ...]
    notes: tuple[str, ...] = ()


COSTS = (
    *("Method", "parameters", "overhead training", "inference", "epochs kept", "seconds", "bits kept", "transfer"),
    *("Avg.", "network", "all kept", "packed", "training operations", "operations of an answer"),
)


def cost_tables(runs: Iterable[Results]) -> list[CostTable]:
    """What each method took, for each table among the runs."""
    found = groups(runs)
    return [replace(costs(group), title=title) for group, title in zip(found, titles(found), strict=True)]


def costs(group: Sequence[Results]) -> CostTable:
    """What each method of one table took.

    "epochs kept": of the trainings that were kept, while the seconds are of all, trials of a search included. "bits
    kept": how many tasks' logits are bit-equal to those right after learning. "transfer": forward transfer, where the
    runs hold a method `alone` with the same seed and the same regime, and every task was learned in its turn. "all
    kept": the bytes of network, heads and what serving needs beside them; "packed": in the smallest code there is.
    Operations are those of products: of all steps of the trainings that were kept (no trials of a trade-off, no
    importance or merging after them), and of one image through the dearest task.
    """
    alone = {r.seed: r for r in group if r.method == "alone"}
    methods = by_method(group)
    beside = [[r for r in runs if _has_reference(r, alone)] for runs in methods]
    rows = tuple(_cost(runs, part, alone) for runs, part in zip(methods, beside, strict=True))
    fewer = [title_of(runs[0].method) for runs, part in zip(methods, beside, strict=True) if 0 < len(part) < len(runs)]
    notes = (f"Transfer is of fewer seeds than the rest, those that 'alone' has: {', '.join(fewer)}.",) if fewer else ()
    return CostTable(titles([group])[0], rows, notes)


def _has_reference(run: Results, alone: dict[int, Results]) -> bool:
    """Whether forward transfer can be told: by a network alone that was trained alike."""
    fit = run.method != "alone" and len(run.tasks) > 1 and all(run.trained) and run.seed in alone
    return fit and same_training(alone[run.seed], run)


def _cost(runs: Sequence[Results], beside: Sequence[Results], alone: dict[int, Results]) -> Cost:
    method = runs[0].method
    transfers = [100 * r.forward_transfer(alone[r.seed].learned) for r in beside]
    return Cost(
        method,
        parameters=mean([r.parameters[-1] for r in runs]),
        training=mean([r.overhead[-1]["training"] for r in runs]),
        inference=mean([r.overhead[-1]["inference"] for r in runs]),
        epochs=mean([sum(r.epochs) for r in runs]),
        seconds=mean([sum(r.seconds) for r in runs]),
        kept=mean([sum(r.unchanged) for r in runs]),
        tasks=len(runs[0].tasks),
        transfer=mean(transfers) if transfers else None,
        average=100 * mean([mean(r.final[average_from(r) - 1 :]) for r in runs]),
        network=mean([32 * r.parameters[-1] - r.overhead[-1].get("spared", 0) for r in runs]),
        everything=mean([r.kept for r in runs]),
        packed=mean([r.packed or 0 for r in runs]) if all(r.packed is not None for r in runs) else None,
        learning=_operations(runs, "training", sum),
        answer=_operations(runs, "answer", max),
    )


def _operations(runs: Sequence[Results], kind: str, over: Callable[[list[int]], int]) -> float | None:
    """Of all tasks together, or of the dearest; None if a run did not count them."""
    if not all(r.operations for r in runs):
        return None
    return mean([over([task[kind] for task in r.operations]) for r in runs])


def count(operations: float | None) -> str:
    """How many, in units that people read."""
    if operations is None:
        return "–"
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if operations >= size:
            return f"{operations / size:.1f} {unit}"
    return f"{operations:.0f}"


def size(bits: float) -> str:
    """Bits as bytes that people read."""
    value, unit = bits / 8, "B"
    for larger in ("kB", "MB", "GB"):
        if round(value, unit != "B") < 1000:  # as it is printed
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
