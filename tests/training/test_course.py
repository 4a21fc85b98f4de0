"""The course of training, told by validation losses that are given and by what each step draws and reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.test_fit import Scripted, method, task
from zeroforget.data import Preparation
from zeroforget.methods import TaskSpec
from zeroforget.methods.baselines import Finetuning
from zeroforget.progress import Epoch
from zeroforget.training import Diverged, Fit, FitLog, Progress, Regime
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


@pytest.mark.parametrize(("script", "best"), [([1.0, 2.0, 3.0, 4.0], 0), ([1.0, 2.0, 0.5, 3.0], 2)])
def test_the_best_and_the_newest_weights_outlast_an_interruption(
    script: list[float], best: int, tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        if progress.epoch == 2:
            raise Stop

    regime, learners, logs = Regime(epochs=4, batch_size=27), [], []
    for progress in (None, stop):
        learner = method(Scripted)
        assert isinstance(learner, Scripted)
        learner.script = script
        if progress is not None:
            with seeded("learn"), pytest.raises(Stop):
                learner.learn(task(), Fit(regime, folder=tmp_path, progress=progress))
        with seeded("learn"):
            logs.append(learner.learn(task(), Fit(regime, folder=tmp_path if progress else None)))
        learners.append(learner)
    assert [(log.best, len(log.epochs)) for log in logs] == [(best, 4)] * 2
    whole = learners[0].state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in learners[1].state_dict().items())


def test_no_epoch_is_saved_before_it_was_reported(tmp_path: Path) -> None:
    """Who keeps a log of what is reported would never hear of it again."""
    ends: list[int] = []

    def listen(progress: Progress) -> None:
        if progress.last is not None and progress.last.epoch == progress.epoch:
            if progress.epoch == 1 and not ends.count(-1):
                ends.append(-1)
                raise Stop
            ends.append(progress.epoch)

    learner, fit = method(Finetuning), Fit(Regime(epochs=3, batch_size=54), folder=tmp_path, progress=listen)
    with pytest.raises(Stop):
        learner.learn(task(), fit)
    learner.learn(task(), fit)
    assert ends == [0, -1, 1, 2]


def test_the_loss_of_an_epoch_is_the_mean_over_its_images() -> None:
    """The last batch is smaller than the others, and has another loss."""

    class Told(Finetuning):
        def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
            return super().loss(x, y, task) * 0 + (1.0 if len(x) == 40 else 8.0)

    log = method(Told).learn(task(), Fit(Regime(epochs=1, batch_size=40)))
    assert log.epochs[0].loss == pytest.approx((40 * 1.0 + 14 * 8.0) / 54)


def test_seconds_are_those_that_the_epochs_took() -> None:
    began = time.perf_counter()
    log = method(Finetuning).learn(task(), Fit(Regime(epochs=3)))
    assert 0 < log.seconds < time.perf_counter() - began
    assert log.seconds == pytest.approx(sum(epoch.seconds for epoch in log.epochs))
    assert all(epoch.seconds > 0 for epoch in log.epochs)


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
    Fit(Regime(epochs=2), seed=1)(learner, own, 0)
    assert len(noise) == len(set(noise)) == 10
    assert len(set(orders)) == len(set(seeds)) == 6  # another seed draws nothing of what the first one drew


def added(cls: type) -> Finetuning:
    """One with room for a task, which `Fit` trains by itself."""
    learner = method(cls)
    assert isinstance(learner, Finetuning)
    learner.add_task(TaskSpec("t", 3))
    return learner


def test_what_a_call_changes_holds_for_that_call_alone() -> None:
    learner, fit = added(Finetuning), Fit(Regime(lr=0.05, epochs=3))
    log = fit(learner, task(), 0, lr=0.01, epochs=1)
    assert [epoch.lr for epoch in log.epochs] == [0.01]
    assert [epoch.lr for epoch in fit(learner, task(), 0).epochs] == [0.05] * 3


def test_fit_by_itself_refuses_data_that_cannot_be_learned() -> None:
    data = task()
    with pytest.raises(ValueError, match="labels run from"):
        Fit(Regime(epochs=1))(added(Finetuning), replace(data, classes=("a", "b")), 0)


def test_what_a_method_makes_of_the_gradient_is_bounded_too() -> None:
    norms = []

    class Loud(Finetuning):
        def after_backward(self) -> None:
            for parameter in self.parameters():
                parameter.grad = torch.ones_like(parameter)

        def after_step(self) -> None:
            norms.append(float(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()))

    for clip in (None, 0.25):
        Fit(Regime(epochs=1, batch_size=54, clip=clip))(added(Loud), task(), 0)
    count = sum(parameter.numel() for parameter in added(Loud).parameters())
    assert norms == pytest.approx([count**0.5, 0.25], rel=1e-4)


def test_where_nothing_learns_nothing_moves() -> None:
    learner = added(Finetuning)
    learner.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    log = Fit(Regime(epochs=2))(learner, task(), 0)
    assert len(log.epochs) == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state_dict().items())


@pytest.mark.parametrize(("precision", "mixed", "fast"), [("float32", 0, 0), ("tf32", 0, 1), ("bf16", 1, 0)])
def test_precision_is_of_training_and_only_mixed_precision_of_validation_too(
    precision: str, mixed: int, fast: int
) -> None:
    """Both are of those moments alone."""
    seen = []

    def look() -> None:
        half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        seen.append((half, torch.backends.cuda.matmul.allow_tf32))

    class Looking(Finetuning):
        def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
            look()
            return super().loss(x, y, task)

        def after_step(self) -> None:
            look()

        def score(
            self, predictor: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, task: int
        ) -> tuple[Tensor, Tensor]:
            look()
            return super().score(predictor, x, y, task)

    Fit(Regime(epochs=1, batch_size=54, precision=precision))(added(Looking), task(), 0)
    look()
    assert seen == [(mixed, fast), (False, fast), (mixed, False), (False, False)]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_only_in_mixed_precision_more_of_it_is_a_remedy(precision: str) -> None:
    class Wild(Finetuning):
        def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
            return super().loss(x, y, task) * torch.inf

    with pytest.raises(Diverged) as caught:
        Fit(Regime(epochs=1, precision=precision))(added(Wild), task(), 0)
    assert ("or precision='float32'." in str(caught.value)) == (precision == "bf16")


def test_reports_name_the_rate_of_the_moment_and_keep_their_distance() -> None:
    heard: list[Progress] = []
    regime = Regime(epochs=2, batch_size=9, schedule="cosine", lr=0.1)
    Fit(regime, progress=heard.append, pause=1e9)(added(Finetuning), task(), 0)
    assert [(each.epoch, each.step) for each in heard] == [(0, 1), (0, 6), (0, 6), (1, 6), (1, 6)]
    rates = [regime.cosine(done, 1 / 6) for done in (0, 5 / 6, 5 / 6, 11 / 6, 11 / 6)]
    assert [each.lr for each in heard] == pytest.approx(rates)
