"""What every method has from the base class: heads, structure that comes and goes, and two phases told as one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.methods import helpers
from zeroforget.methods import Method, TaskSpec, importance
from zeroforget.methods.phases import joined
from zeroforget.training import Fit, FitLog
from zeroforget.training.log import Epoch


def test_only_the_newest_head_learns_and_the_one_before_does_again_without_it() -> None:
    method = helpers.make("finetuning", helpers.plain_net)
    for name in "abc":
        method.add_task(TaskSpec(name, 2))
    assert [head.weight.requires_grad for head in method.heads] == [False, False, True]
    method.drop_task()
    assert [head.weight.requires_grad for head in method.heads] == [False, True]


@pytest.mark.parametrize("mode", [True, False])
def test_a_look_at_the_features_leaves_the_mode_as_it_was(mode: bool) -> None:
    method = helpers.make("finetuning").train(mode)
    assert method.features() == 32
    assert method.net.training == mode


def test_heads_are_of_the_networks_own_kind_of_number() -> None:
    method = Method(helpers.plain_net().double(), helpers.EXAMPLE.double())
    method.add_task(TaskSpec("a", 2))
    assert method(helpers.EXAMPLE.double(), 0).dtype == torch.float64


def test_what_was_found_of_a_network_is_found_anew_for_each_task() -> None:
    method = helpers.make("finetuning", helpers.plain_net)
    method._rectified = [nn.Identity()]
    helpers.learn(method, helpers.tasks()[2], regime=replace(helpers.REGIME, epochs=1))
    assert method._rectified is None


def test_two_phases_are_told_as_one() -> None:
    def log(epochs: int, best: int, **notes: int) -> FitLog:
        each = [Epoch(k, 0.1, 1.0, 1.0, 0.5, 2.0) for k in range(epochs)]
        return FitLog(each, best, f"after {epochs}", 2.0 * epochs, dict(notes))

    both = joined(log(3, 2, a=1), log(2, 1, b=2))
    assert (len(both.epochs), both.best, both.stopped, both.seconds) == (5, 4, "after 2", 10.0)
    assert both.notes == {"a": 1, "b": 2, "phases": [3, 2]}
    assert joined(log(3, 2), log(2, -1)).best == -1  # no epoch of the second was kept


@pytest.mark.parametrize("name", ["packnet", "progress-compress"])
def test_methods_of_two_phases_tell_both(name: str) -> None:
    method = helpers.make(name, helpers.plain_net)
    log = method.learn(helpers.tasks()[2], Fit(replace(helpers.REGIME, epochs=2)))
    assert log.notes["phases"] == [2, 2]
    assert len(log.epochs) == 4


@pytest.mark.parametrize("name", ["ewc", "r-ewc", "imm-mode", "mas", "ssl", "progress-compress"])
def test_importance_looks_at_as_many_images_as_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], importance.batches

    def batches(split: importance.Split, *args: object) -> object:
        seen.append(len(split))
        return real(split, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(importance, "batches", batches)
    method = helpers.make(name, helpers.plain_net, samples=7)
    helpers.learn(method, helpers.tasks()[2], regime=replace(helpers.REGIME, epochs=1))
    assert set(seen) == {7}


@pytest.mark.parametrize("name", ["packnet", "piggyback"])
def test_a_tasks_own_network_is_in_eval_mode_though_the_method_trains(name: str) -> None:
    method = helpers.make(name)
    for task in "ab":
        method.add_task(TaskSpec(task, 2))
    method.train()
    assert not any(module.training for module in method.task_net(0).modules())


@pytest.mark.parametrize("name", ["ewc", "mas", "si", "lwf", "lfl"])
def test_validation_counts_what_training_does(name: str) -> None:
    """The epoch that is kept learned well and strayed little."""
    method = helpers.make(name, helpers.plain_net, strength=10.0)
    first, second, _ = helpers.tasks()
    helpers.learn(method, first, regime=replace(helpers.REGIME, epochs=2))
    if name in ("lwf", "lfl"):
        method._teacher = (copy.deepcopy(method.net),)
    method.add_task(TaskSpec("b", 3))
    with torch.no_grad():
        for parameter in method.net.parameters():
            parameter += 0.05
    x, y = second.prepare.test(second.val.images[second.val.rows][:16]), second.val.labels[:16]
    method._batch = len(x)
    losses, _ = method.score(method.predictor(1), x, y, 1)
    plain, _ = Method.score(method, method.predictor(1), x, y, 1)
    assert float((losses - plain).min().detach()) > 0
    torch.testing.assert_close(losses.mean(), method.loss(x, y, 1))
