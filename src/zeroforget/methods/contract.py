"""What every method promises, tried out on digits: `zeroforget methods check` runs this on anybody's class."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from zeroforget import nets
from zeroforget.data import Split, Task, scenario
from zeroforget.methods import registry
from zeroforget.methods.base import Method
from zeroforget.training import Fit, Progress, Regime, logits
from zeroforget.training.seeding import seeded

REGIME = Regime(lr=0.05, epochs=10, batch_size=16, patience=4, clip=2.0)
Outcome = tuple[str, str | None]
"""A promise, and what is wrong with it, if anything."""


class _Pulled(Exception):
    """The plug, in the middle of an epoch."""


class NotKept(ValueError):
    """A promise that a method does not keep."""


class Contract:
    """A method by name, over small tasks (by default three of digits) and a small network that `build` makes."""

    def __init__(
        self, name: str, tasks: Sequence[Task] | None = None, build: Callable[[], nn.Module] | None = None
    ) -> None:
        self.name = name
        self.cls, _ = registry.find(name)
        self.tasks = digits() if tasks is None else tasks
        images, _ = self.tasks[0].train.batch(torch.arange(2))
        self.example = self.tasks[0].prepare.test(images)
        channels, height, width = self.example.shape[1:]
        self.build = build or partial(nets.build, "small", (channels, height, width), width=0.5)

    def promises(self) -> dict[str, Callable[[], None]]:
        """What is checked, in order."""
        return {
            "says what it is": self.describes_itself,
            "learns each task far above chance": self.learns,
            "gives the same bits for the same seed": self.repeats,
            "answers as before when it is saved and loaded": self.loads,
            "goes on as if nothing had been when it is interrupted": self.resumes,
            "saves all that learns": self.saves,
        } | ({"forgets nothing, bit for bit": self.keeps} if self.cls.zero_forgetting else {})

    def outcomes(self) -> Iterator[Outcome]:
        """Each promise as it is found to be."""
        for promise, check in self.promises().items():
            try:
                check()
            except Exception as error:  # somebody's code may raise anything
                why = str(error) or type(error).__name__
                yield promise, why if isinstance(error, NotKept) else f"{type(error).__name__}: {why}"
            else:
                yield promise, None

    # Runs ------------------------------------------------------------------------------------------------------

    def make(self, seed: int = 0) -> Method:
        """The method over a fresh network."""
        with seeded("init", seed):
            net = self.build()
        with seeded("method", seed):
            return registry.build(self.name, net, self.example)

    def learn(self, method: Method, index: int, fit: Fit | None = None) -> None:
        """One more task, everything random drawn from its place."""
        past = self.tasks[:index] if method.uses_past_data else ()
        with seeded("learn", 0, index):
            method.learn(self.tasks[index], fit or Fit(REGIME), past)

    def answers(self, method: Method, count: int) -> list[Tensor]:
        """The logits of the test images of the first tasks, as they are served."""
        return [logits(method.predictor(k), task.test, task.prepare) for k, task in enumerate(self.tasks[:count])]

    def learned(self) -> tuple[Method, list[list[Tensor]]]:
        """A method that went through all tasks, and all answers after each."""
        if not hasattr(self, "_learned"):
            method, answers = self.make(), []
            for index in range(len(self.tasks)):
                self.learn(method, index)
                answers.append(self.answers(method, index + 1))
            self._learned = method, answers
        return self._learned

    # Promises --------------------------------------------------------------------------------------------------

    def describes_itself(self) -> None:
        """The docstring tells the idea and every option; the trade-off, if any, is an option."""
        options = registry.options(self.cls)
        if not self.cls.__doc__:
            raise NotKept("the class has no docstring")
        if untold := options.keys() - registry.told_options(self.cls).keys():
            raise NotKept(f"the docstring's options do not tell what '{min(untold)}' is")
        if self.cls.tradeoff is not None and self.cls.tradeoff not in options:
            raise NotKept(f"its tradeoff '{self.cls.tradeoff}' is none of its options")

    def learns(self) -> None:
        """Right after learning."""
        _, answers = self.learned()
        for index, task in enumerate(self.tasks):
            found, chance = _right(answers[index][index], task), 1 / len(task.classes)
            if found < chance + 0.5 * (1 - chance):
                raise NotKept(f"task {index + 1}: {100 * found:.0f} % right, {100 * chance:.0f} % would be by chance")

    def repeats(self) -> None:
        """Two runs of one seed."""
        method = self.make()
        self.learn(method, 0)
        if not torch.equal(self.answers(method, 1)[0], self.learned()[1][0][0]):
            raise NotKept("a second run of the same seed answers otherwise: draw from torch's own generator")

    def loads(self) -> None:
        """Structure replayed on another start, tensors loaded."""
        method, answers = self.learned()
        twin = self.make(seed=9)
        twin.replay(json.loads(json.dumps(method.structure())))
        twin.load_state_dict(method.state_dict())
        if not _equal(self.answers(twin, len(self.tasks)), answers[-1]):
            raise NotKept("loaded, it answers otherwise: what it keeps must be parameters or buffers")

    def resumes(self) -> None:
        """Stopped in the second epoch of the second task; started again from the checkpoint."""

        def pull(progress: Progress) -> None:
            if progress.epoch == 1 and progress.step > 1:
                raise _Pulled

        method = self.make()
        self.learn(method, 0)
        before = self.answers(method, 1)
        with tempfile.TemporaryDirectory() as folder:
            try:
                self.learn(method, 1, Fit(REGIME, progress=pull, folder=Path(folder)))
            except _Pulled:
                if not _equal(self.answers(method, 1), before):
                    raise NotKept("half-learned weights are left behind by an interruption") from None
                self.learn(method, 1, Fit(REGIME, folder=Path(folder)))
        if not _equal(self.answers(method, 2), self.learned()[1][1]):
            raise NotKept("a training that was interrupted and resumed ends with other bits")

    def saves(self) -> None:
        """`moving` holds every parameter that learns."""
        method, _ = self.learned()
        saved = {tensor.data_ptr() for tensor in method.moving().values()}
        if any(p.requires_grad and p.data_ptr() not in saved for p in method.trainable()):
            raise NotKept("`moving` lacks a parameter that is trainable: the best epoch would not be restored")

    def keeps(self) -> None:
        """Logits after every later task."""
        _, answers = self.learned()
        for later in answers[1:]:
            for k, now in enumerate(later):
                if not torch.equal(now, answers[k][k]):
                    raise NotKept(f"it claims zero forgetting; task {k + 1} answers otherwise after task {len(later)}")


def _right(answers: Tensor, task: Task) -> float:
    return (answers.argmax(1) == task.test.labels).double().mean().item()


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def digits() -> Sequence[Task]:
    """Ten digits in three tasks, every second image."""
    whole = scenario({"name": "contract", "data": "digits", "sizes": [4, 3, 3], "shuffle": False})
    return [_smaller(task) for task in whole.tasks]


def _smaller(task: Task) -> Task:
    """Every second image."""

    def half(split: Split) -> Split:
        chosen = torch.arange(0, len(split), 2)
        rows = chosen if split.rows is None else split.rows[chosen]
        return Split(split.images, split.labels[chosen], rows)

    return replace(task, train=half(task.train), test=half(task.test))
