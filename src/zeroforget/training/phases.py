"""The numbers of a task's phases of training: the same calls get the same ones, and so find their checkpoints again."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn


class _Learns(Protocol):
    def trainable(self) -> Iterable[nn.Parameter]: ...


@dataclass
class _Attempt:
    """The phases in which one learner learns a task."""

    learner: weakref.ref[_Learns]
    parameters: list[weakref.ref[nn.Parameter]]
    """Those that its first phase trained."""
    first: int
    cut: bool = False

    def taken_back(self) -> bool:
        """Whether it was interrupted and the task's structure dropped, so that all its phases come again."""
        learner = self.learner()
        held: Iterable[nn.Parameter] = learner.parameters() if isinstance(learner, nn.Module) else ()
        here = {id(parameter) for parameter in held}
        trained = [parameter() for parameter in self.parameters]
        return self.cut and any(parameter is None or id(parameter) not in here for parameter in trained)


class Phases:
    """Counts the phases of each task; one that was interrupted gives its number back to whoever tries again."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self._counts = Counter(counts)
        self._attempts: dict[int, _Attempt] = {}

    def take(self, learners: Sequence[_Learns], task: int) -> range:
        """The numbers of the next phase of these learners."""
        attempt = self._attempts.get(task)
        if attempt is None or attempt.learner() is not learners[0]:
            self._begin(learners[0], task)
        elif attempt.taken_back():
            self._counts[task] = attempt.first
            self._begin(learners[0], task)
        first = self._counts[task]
        self._counts[task] += len(learners)
        return range(first, self._counts[task])

    def give_back(self, numbers: range, task: int) -> None:
        """This phase was interrupted."""
        self._counts[task] = numbers.start
        self._attempts[task].cut = True

    def forget(self, task: int) -> None:
        """This phase failed and would again: whatever is tried next has a number of its own."""
        self._attempts.pop(task, None)

    def _begin(self, learner: _Learns, task: int) -> None:
        parameters = [weakref.ref(parameter) for parameter in learner.trainable()]
        self._attempts[task] = _Attempt(weakref.ref(learner), parameters, self._counts[task])
