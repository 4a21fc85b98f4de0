"""The course of training, told by validation losses that are given and by what each step draws and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.test_fit import Scripted, method, task
from zeroforget.data import Preparation
from zeroforget.methods import TaskSpec
from zeroforget.methods.finetuning import Finetuning
from zeroforget.training import Fit, FitLog, Progress, Regime
from zeroforget.training.log import Epoch
from zeroforget.training.seeding import seeded


class Stop(Exception):
    """Someone pulled the plug."""


def scripted(script: list[float], regime: Regime) -> FitLog:
    learner = method(Scripted)
    assert isinstance(learner, Scripted)
    learner.script = script
    return learner.learn(task(), Fit(regime))


@pytest.mark.parametrize("script", [[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 2.0, 1.5, 1.2]])
def test_only_a_loss_below_the_best_one_is_better(script: list[float]) -> None:
    """Neither an equal one nor one that is merely better than the last."""
    log = scripted(script, Regime(lr=0.09, epochs=5, patience=2))
    assert [epoch.lr for epoch in log.epochs] == pytest.approx([0.09, 0.09, 0.09, 0.03, 0.03])
    assert log.best == 0


@pytest.mark.parametrize(("keep", "kept"), [("best", 1), ("accurate", 3)])
def test_of_equals_the_first_is_kept_and_of_equal_accuracies_the_smaller_loss(keep: str, kept: int) -> None:
    log = FitLog()
    for k, values in enumerate([(3.0, 0.7), (1.0, 0.7), (2.0, 0.8), (1.5, 0.8), (1.5, 0.8), (1.0, 0.7)]):
        log.add(Epoch(k, 0.1, 0.0, *values, 1.0), keep)
    assert log.best == kept


class Even(Finetuning):
    """Validation says the same after every epoch, so that the rate falls as patience says."""

    def score(self, predictor: object, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]:
        return torch.ones(len(x)), torch.zeros(len(x))


@pytest.mark.parametrize("epoch", [2, 3, 4])
def test_patience_does_not_begin_anew_after_an_interruption(epoch: int, tmp_path: Path) -> None:
    regime = Regime(lr=0.09, epochs=7, patience=3)

    def stop(progress: Progress) -> None:
        if (progress.epoch, progress.step) == (epoch, 1) and progress.steps > 1:
            raise Stop

    whole, broken = method(Even), method(Even)
    log = whole.learn(task(), Fit(replace(regime, batch_size=27)))
    with pytest.raises(Stop):
        broken.learn(task(), Fit(replace(regime, batch_size=27), folder=tmp_path, progress=stop))
    again = broken.learn(task(), Fit(replace(regime, batch_size=27), folder=tmp_path))
    assert [e.lr for e in again.epochs] == [e.lr for e in log.epochs]
    assert len({e.lr for e in log.epochs}) == 2


def test_the_loss_of_an_epoch_is_the_mean_over_its_images() -> None:
    """The last batch is smaller than the others, and has another loss."""

    class Told(Finetuning):
        def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
            return super().loss(x, y, task) * 0 + (1.0 if len(x) == 40 else 8.0)

    log = method(Told).learn(task(), Fit(Regime(epochs=1, batch_size=40)))
    assert log.epochs[0].loss == pytest.approx((40 * 1.0 + 14 * 8.0) / 54)


def test_fit_by_itself_leaves_no_half_trained_weights() -> None:
    learner = method(Finetuning)
    learner.add_task(TaskSpec("t", 3))
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}

    def stop(progress: Progress) -> None:
        if progress.epoch == 1:
            raise Stop

    with pytest.raises(Stop):
        Fit(Regime(epochs=3), progress=stop)(learner, task(), 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state_dict().items())


def test_an_epochs_end_is_reported_however_rare_reports_are() -> None:
    heard: list[Progress] = []
    method(Finetuning).learn(task(), Fit(Regime(epochs=3, batch_size=18), progress=heard.append, pause=1e9))
    ends = [each for each in heard if each.last is not None and each.last.epoch == each.epoch]
    assert [(each.epoch, each.step) for each in ends] == [(0, 3), (1, 3), (2, 3)]
    assert {each.step for each in heard[1:]} == {3}


def test_validation_is_in_eval_mode_whatever_answers() -> None:
    class Own(Finetuning):
        def predictor(self, task: int) -> Callable[[Tensor], Tensor]:
            assert not self.training
            return lambda x: self(x, task)

    method(Own).learn(task(), Fit(Regime(epochs=1)))


def test_a_share_that_an_interrupted_step_left_does_not_count() -> None:
    learner, plain = method(Finetuning), method(Finetuning)
    learner.share = torch.zeros(54)
    logs = []
    for each in (learner, plain):
        with seeded("learn"):
            logs.append(each.learn(task(), Fit(Regime(epochs=1))))
    assert logs[0].epochs[0].loss == logs[1].epochs[0].loss


@dataclass(frozen=True)
class Noted(Preparation):
    """Notes the seed that augmentation draws from."""

    seeds: tuple[list[int], ...] = ([],)

    def train(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        assert generator is not None
        self.seeds[0].append(generator.initial_seed())
        return super().train(images, generator)


def test_every_task_and_epoch_has_its_own_order_and_augmentation_and_every_phase_its_own_noise() -> None:
    orders, noise = [], []

    class Curious(Finetuning):
        def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
            orders.append(tuple(y.tolist()))
            noise.append(float(torch.rand(())))
            return super().loss(x, y, task)

    learner, fit = method(Curious), Fit(Regime(epochs=2))
    own = replace(task(), prepare=Noted((0.0,) * 4, (1.0,) * 4, seeds=([],)))
    for index in range(2):
        learner.add_task(TaskSpec(str(index), 3))
        for _ in range(2):
            fit(learner, own, index)
    assert isinstance(own.prepare, Noted)
    (seeds,) = own.prepare.seeds
    assert len(noise) == len(set(noise)) == 8  # tasks, phases, epochs
    assert len(set(orders)) == len(set(seeds)) == 4  # tasks, epochs
