"""TFM trained twice: first exactly as TFM, then at a tenth of the rate; and if the second fails, not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.experiments.helpers import three_digits, tiny_net
from zeroforget.data import Task
from zeroforget.experiments.again import Again
from zeroforget.methods.tfm import Tfm
from zeroforget.training import Diverged, Fit, FitLog, Regime, logits
from zeroforget.training.seeding import seeded

REGIME = Regime(epochs=3, lr=0.1, batch_size=16, patience=1)


def method(cls: type[Tfm], **options: Any) -> Tfm:
    with seeded("net"):
        return cls(tiny_net((1, 8, 8)), three_digits().example(), start=0.5, growth=0.2, **options)


def learn(one: Tfm, tasks: Sequence[Task], fit: Fit) -> list[FitLog]:
    with seeded("tasks"):
        return [one.learn(task, fit) for task in tasks]


def answers(one: Tfm, task: Task) -> Tensor:
    return logits(one.predictor(0), task.test, task.prepare)


@pytest.mark.parametrize("search", [(), (0.1, 0.3)], ids=["schedule", "search"])
def test_the_first_training_is_tfms_and_the_second_goes_on_at_a_tenth(search: tuple[float, ...]) -> None:
    options = {"search": search, "search_start": (0.4, 0.6) if search else ()}
    once, twice = method(Tfm, **options), method(Again, **options)
    (task, *_) = three_digits().tasks
    (short,) = learn(once, [task], Fit(REGIME))
    (long,) = learn(twice, [task], Fit(REGIME))
    cut = len(short.epochs)
    assert long.notes["phases"] == [cut, len(long.epochs) - cut]
    assert [e.val_loss for e in long.epochs[:cut]] == [e.val_loss for e in short.epochs]
    assert long.epochs[cut].lr == pytest.approx(REGIME.lr / 10)
    assert long.best >= cut
    assert long.notes["growth"] == short.notes["growth"]
    assert not torch.equal(answers(once, task), answers(twice, task))


def test_older_tasks_keep_every_bit() -> None:
    one, tasks, fit = method(Again), three_digits().tasks, Fit(REGIME)
    learn(one, tasks[:1], fit)
    before = answers(one, tasks[0])
    learn(one, tasks[1:], fit)
    assert torch.equal(answers(one, tasks[0]), before)


@pytest.mark.parametrize("known", [0, 1])
def test_a_second_training_that_fails_leaves_no_task(known: int) -> None:
    class Fails(Fit):
        def __call__(self, *args: Any, **changes: Any) -> FitLog:
            if "lr" in changes:
                raise Diverged("enough")
            return super().__call__(*args, **changes)

    one, tasks = method(Again), three_digits().tasks
    learn(one, tasks[:known], Fit(REGIME))
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    with pytest.raises(Diverged, match="enough"):
        learn(one, tasks[known : known + 1], Fails(REGIME))
    after = one.state_dict()
    assert len(one.specs) == known == len(one.net.history)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
