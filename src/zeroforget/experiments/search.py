"""Hyperparameters without looking back: plasticity, then stability, on the data of the task at hand only.

1. *Plasticity*: the learning rate with which fine-tuning, from the current model, reaches the best validation accuracy
   on the new task. Fine-tuning is the method itself with its trade-off at 0 and nothing done after training.
2. *Stability*: start with the trade-off as configured, or so many times `above` it, and halve it (or divide it by
   another number) until the new task's validation accuracy is within a share `drop` of what fine-tuning reached.

The first task has nothing to forget, and some methods have no trade-off: there only the learning rate is searched.
After De Lange et al. (2021) and Masana et al. (2020), to whom the paper refers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zeroforget.data import Task
from zeroforget.experiments.disk import read_json, write_json
from zeroforget.methods import Method
from zeroforget.processes import current
from zeroforget.training import Diverged, FitLog, accuracy

Learn = Callable[[Method, float, str], FitLog]
"""Let this method learn the task at this learning rate; the name is the trial's, under which it may be resumed."""


@dataclass(frozen=True)
class SearchSettings:
    """What is tried, and how much plasticity may be given up."""

    enabled: bool = False
    """Whether each task is searched before it is learned."""
    learning_rates: tuple[float, ...] = ()
    """Those to try; without any, the regime's own is taken as the best."""
    drop: float = 0.2
    """The share of fine-tuning's validation accuracy that may be lost for stability."""
    halvings: int = 10
    """How often the trade-off may be divided."""
    divide: float = 2.0
    """What the trade-off is divided by at each of these "halvings": more than 2 tries fewer values, further apart."""
    above: float = 1.0
    """How many times its configured value the trade-off begins at. Far above 1, the search has to move."""
    tasks: tuple[int, ...] = ()
    """The tasks to search in, counted from 1; the others take what was found last. None named: all."""

    def __post_init__(self) -> None:
        if min(self.learning_rates, default=1.0) <= 0:
            raise ValueError(f"[search] learning_rates must be positive numbers, not {list(self.learning_rates)}")
        if not 0 <= self.drop < 1 or self.halvings < 0:
            raise ValueError(f"[search] needs 0 <= drop < 1 and halvings >= 0, not {self.drop} and {self.halvings}")
        if not 0 < self.above < math.inf:
            raise ValueError(f"[search] above is how many times the value to begin at, so positive, not {self.above}")
        if self.divide <= 1 or min(self.tasks, default=1) < 1:
            raise ValueError(
                f"[search] needs divide > 1 and tasks counted from 1, not {self.divide} and {list(self.tasks)}"
            )

    def check(self, tasks: int) -> None:
        """Raise ValueError if none of a scenario's tasks would be searched."""
        if self.enabled and not any(self.covers(index) for index in range(tasks)):
            raise ValueError(f"[search] tasks are {list(self.tasks)}, but there are {tasks}: nothing would be searched")

    def covers(self, index: int) -> bool:
        """Whether the task of this number (counted from 0) is searched."""
        return self.enabled and (not self.tasks or index + 1 in self.tasks)


def carried(method: Method, notes: Sequence[Mapping[str, Any]], lr: float) -> float:
    """The learning rate for a task that is not searched: that found last, according to the notes of the tasks before.

    The method's trade-off is set to the one found last, likewise.
    """
    for found in (note["hyperparameters"] for note in notes if "hyperparameters" in note):
        lr = found["lr"]
        if found["value"] is not None and method.tradeoff is not None:
            setattr(method, method.tradeoff, found["value"])
    return lr


@dataclass(frozen=True)
class SearchTrial:
    """One training from the same start, and the validation accuracy it came to."""

    name: str
    lr: float
    value: float | None
    accuracy: float | None
    """None: training diverged."""


@dataclass
class Search:
    """The search for one task. Call it once: it returns the method that has learned the task.

    `lr` is the regime's learning rate, `start` the trade-off's configured value. With a `file`, finished trials are
    kept there and not repeated.
    """

    method: Method
    task: Task
    learn: Learn
    lr: float
    settings: SearchSettings = field(default_factory=SearchSettings)
    start: float | None = None
    file: Path | None = None
    device: str = "cpu"
    trials: list[SearchTrial] = field(default_factory=list)

    def __call__(self) -> tuple[Method, FitLog]:
        """The trained method and its log, whose notes tell what was tried."""
        self._done = current().by_first(self._read)
        self._trained: dict[str, tuple[Method, FitLog]] = {}
        self._failure: Diverged | None = None
        option = self.method.tradeoff
        if option is not None and not hasattr(self.method, option):
            raise ValueError(
                f"{type(self.method).__name__}.tradeoff is '{option}', but the method has no attribute of that name: a "
                "search would change nothing. Keep the option under its own name"
            )
        both = option is not None and self.start is not None and bool(self.method.specs)
        chosen = self._plasticity(finetune=both)
        reached = chosen.accuracy
        if both:
            chosen = self._stability(chosen.lr, (1 - self.settings.drop) * (reached or 0.0))
        method, log = self._trained.get(chosen.name) or self._train(chosen.name, chosen.lr, chosen.value)
        log.notes["hyperparameters"] = {
            "lr": chosen.lr,
            "option": option if both else None,
            "value": chosen.value if both else None,
            "finetuning": reached if both else None,
            "trials": [asdict(trial) for trial in self.trials],
        }
        return method, log

    def _plasticity(self, finetune: bool) -> SearchTrial:
        """The best learning rate; the earlier one in the list if two are equally good."""
        best: SearchTrial | None = None
        for lr in self.settings.learning_rates or (self.lr,):
            trial = self._try(f"lr-{lr:g}", lr, 0.0 if finetune else self.start, finetune)
            if best is None or _figure(trial) > _figure(best):
                best = trial
            self._keep_only(best.name)
        if best is None or best.accuracy is None:
            raise self._failure or ValueError(f"task '{self.task.name}': training diverged at every learning rate")
        return best

    def _stability(self, lr: float, enough: float) -> SearchTrial:
        """Halve the trade-off until the new task is learned well enough, or as often as is allowed."""
        value = self.settings.above * float(self.start or 0.0)
        for halving in range(self.settings.halvings + 1):
            trial = self._try(f"value-{halving:02d}", lr, value)
            self._keep_only(trial.name)
            if _figure(trial) >= enough:
                return trial
            value /= self.settings.divide
        if trial.accuracy is None:
            raise self._failure or ValueError(f"task '{self.task.name}': training diverged with {trial.value:g}")
        return trial

    def _try(self, name: str, lr: float, value: float | None, finetune: bool = False) -> SearchTrial:
        if name not in self._done:
            try:
                method, _ = self._train(name, lr, value, finetune)
                index = len(method.specs) - 1
                self._done[name] = current().by_first(lambda: self._accuracy(method, index))
            except Diverged as failure:
                self._failure, self._done[name] = failure, None
            self._write()
        trial = SearchTrial(name, lr, value, self._done[name])
        self.trials.append(trial)
        return trial

    def _accuracy(self, method: Method, index: int) -> float:
        return accuracy(method.predictor(index), self.task.val, self.task.prepare, device=self.device)

    def _train(self, name: str, lr: float, value: float | None, finetune: bool = False) -> tuple[Method, FitLog]:
        method = copy.deepcopy(self.method)
        if method.tradeoff is not None and value is not None:
            setattr(method, method.tradeoff, value)
        if finetune:
            setattr(method, "end_task", lambda task, fit: None)  # noqa: B010
        self._trained[name] = method, self.learn(method, lr, name)
        return self._trained[name]

    def _keep_only(self, name: str) -> None:
        """Trained copies are as large as the model: hold no more than the best one so far."""
        self._trained = {n: t for n, t in self._trained.items() if n == name}

    def _read(self) -> dict[str, float | None]:
        if self.file is None or not self.file.exists():
            return {}
        return read_json(self.file, "delete it, and the trials of this task are made anew")

    def _write(self) -> None:
        if self.file is not None and current().first:
            write_json(self.file, self._done)


def _figure(trial: SearchTrial) -> float:
    return -math.inf if trial.accuracy is None else trial.accuracy
