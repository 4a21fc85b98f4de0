"""The one training loop: `Fit` trains a learner on a task, or several that race, an epoch at a time.

What becomes of an epoch, and of a batch, stands in `epochs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zeroforget.data import Task
from zeroforget.processes import current
from zeroforget.training.checkpoint import Phases
from zeroforget.training.epochs import VALIDATED, Training
from zeroforget.training.feed import LoadedTask, feeds
from zeroforget.training.learner import Diverged, FitSettings, Learner, check_shared
from zeroforget.training.log import FitLog

Turns = Callable[[list[FitLog]], Iterable[int]]
"""Of learners that race: given their logs so far, the positions of those that train an epoch next."""


@dataclass
class Fit(FitSettings):
    """Trains a method on a task under one regime: `fit(method, task, index)`.

    Everything random follows from `seed`. With a `folder`, each epoch leaves a checkpoint there. A second run of the
    same calls, or a second try with the same `Fit` after an interruption, goes on from the last finished one.
    `progress` hears of each epoch and, in between, of steps, `pause` seconds apart. `save_every` so many seconds a
    checkpoint is written beside training (None: after every epoch on a CPU, every 20 seconds on a GPU). `optimizer`
    makes another one than the regime's out of parameters and learning rate. `after_epoch` hears of each epoch that is
    trained, and ends training when it returns True.

    Where torch.distributed has joined several processes, each calls the same and learns from its part of every batch.

    Example:
        >>> import torch, zeroforget
        >>> x, y = torch.randn(64, 3, 8, 8), torch.arange(64) % 2
        >>> part = zeroforget.Split(x, y)
        >>> task = zeroforget.Task("signs", ("stop", "go"), train=part, val=part, test=part)
        >>> body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.ReLU())
        >>> method = zeroforget.Method(body, x)
        >>> fit = zeroforget.Fit(zeroforget.Regime(epochs=2), seed=0)
        >>> log = method.learn(task, fit)
        >>> len(log.epochs)
        2
    """

    _phases: Phases = field(default_factory=Phases, repr=False, compare=False)

    def __call__(self, learner: Learner, task: Task | LoadedTask, index: int, **changes: Any) -> FitLog:
        """Train; `changes` override parts of the regime for this call only, such as lr=0.005."""
        return self.race([learner], task, index, **changes)[0]

    def race(
        self,
        learners: Sequence[Learner],
        task: Task | LoadedTask,
        index: int,
        turns: Turns | None = None,
        **changes: Any,
    ) -> list[FitLog]:
        """Train several, an epoch at a time: all of them, or those whose turn it is, until it is nobody's.

        `turns` sees what a run that was never interrupted would show it, so a resumed race takes the same course.
        """
        task.check()
        regime = replace(self.regime, **changes)
        processes = current()
        check_shared(task, regime, processes)
        images = feeds(task.parts, (regime.batch_size, VALIDATED), torch.device(regime.device), processes)
        numbers, trainings = self._phases.take(learners, index), list[Training]()
        try:
            shared = *images, len(learners), processes
            for learner, phase in zip(learners, numbers, strict=True):
                trainings.append(Training(self, regime, learner, task, index, phase, *shared))
            for training in trainings:
                training.begin()
            done = [0] * len(trainings)
            while True:
                logs = [each.log.until(count, regime.keep) for each, count in zip(trainings, done, strict=True)]
                going = [i for i in (turns(logs) if turns else range(len(logs))) if not logs[i].stopped]
                if not going:
                    break
                for i in going:
                    done[i] += 1
                    if len(trainings[i].log.epochs) < done[i]:  # after an interruption there may be more
                        trainings[i].epoch()
            self.later.wait()
            return [training.finish() for training in trainings]
        except BaseException as error:  # Ctrl-C included: nobody is left with half-trained weights
            if isinstance(error, Diverged):
                self._phases.forget(index)
            else:
                self._phases.give_back(numbers, index)
            for training in trainings:
                training.undo()
            raise
        finally:
            with suppress(Exception):  # where it matters it was raised above
                self.later.wait()
