"""What every method has from the base class: heads, structure that comes and goes, and two phases told as one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.methods import helpers
from zeroforget.data import Split
from zeroforget.methods import Method, TaskSpec, find, importance, names
from zeroforget.methods.tfm import Tfm
from zeroforget.progress import Epoch
from zeroforget.training import Fit, FitLog, Progress
from zeroforget.training.evaluate import batches as batches_of_a_split
from zeroforget.training.log import joined

FIXED = [name for name in names() if not issubclass(find(name)[0], Tfm)]
"""Methods over a network as it is given."""


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
    seen, real = [], batches_of_a_split

    def batches(split: Split, *args: object) -> object:
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


@pytest.mark.parametrize("name", ["packnet", "piggyback"])
def test_what_a_later_task_may_not_learn_gets_no_gradient_until_that_task_is_taken_back(name: str) -> None:
    method = helpers.make(name)
    method.add_task(TaskSpec("a", 2))
    assert all(p.requires_grad for p in method.net.parameters())
    method.add_task(TaskSpec("b", 2))
    learning = {id(p) for p in method.trainable()}
    assert [p.requires_grad for p in method.net.parameters()] == [id(p) in learning for p in method.net.parameters()]
    assert not method.net.get_parameter("5.bias").requires_grad
    assert method.net.get_parameter("1.weight").requires_grad  # of a normalization
    for _ in range(2):
        method.drop_task()
        assert all(p.requires_grad for p in method.net.parameters())


@pytest.mark.parametrize("name", ["packnet", "piggyback", "hat"])
def test_an_earlier_task_that_is_asked_directly_answers_by_its_own_network(name: str) -> None:
    done, first = helpers.run(name), helpers.tasks()[0]
    x = first.prepare.test(first.test.batch(torch.arange(len(first.test)))[0])
    with torch.no_grad():
        assert torch.equal(done.method.eval()(x, 0), done.method.predictor(0)(x))


@pytest.mark.parametrize("name", ["packnet", "piggyback", "hat"])
def test_the_newest_task_is_judged_as_it_is_now(name: str) -> None:
    """What is kept of it is written when it has ended."""
    method = helpers.make(name).eval()
    for task in "ab":
        method.add_task(TaskSpec(task, 2))
    told = [method.predictor(1)(helpers.EXAMPLE)]
    with torch.no_grad():
        method.net.get_buffer("1.running_mean").add_(1.0)
        told.append(method.predictor(1)(helpers.EXAMPLE))
        for learned in method.trainable():
            learned.mul_(torch.rand_like(learned))
        told.append(method.predictor(1)(helpers.EXAMPLE))
        torch.testing.assert_close(told[2], method(helpers.EXAMPLE, 1))
    assert not torch.allclose(told[0], told[1])
    assert not torch.allclose(told[1], told[2])


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


@pytest.mark.parametrize("name", [n for n in FIXED if n != "ssl"])
def test_a_network_without_parameters_serves_heads(name: str) -> None:
    """Linear classifiers on what is given: a baseline that wants no network."""
    method = helpers.make(name, nn.Flatten)
    for k, task in enumerate(sequence := helpers.tasks(((0, 1), (2, 3)), 20)):
        helpers.learn(
            method, task, sequence[:k], regime=replace(helpers.REGIME, epochs=40 if name in {"wsn", "supsup"} else 10)
        )
    assert [head.in_features for head in method.heads] == [64, 64]
    assert min(helpers.score(method, k, task) for k, task in enumerate(sequence)) > 0.7


@pytest.mark.parametrize("name", FIXED)
def test_making_a_method_and_its_tasks_moves_no_statistics(name: str) -> None:
    net = helpers.normed_net().train()
    before = helpers.copied(dict(net.named_buffers()))
    method = helpers.make(name, lambda: net, **({"full": True} if name == "pnn" else {}))
    for task in "ab":
        method.train().add_task(TaskSpec(task, 2))
    assert all(torch.equal(net.get_buffer(key), buffer) for key, buffer in before.items())


@pytest.mark.parametrize("name", names())
def test_a_first_task_that_fails_leaves_the_method_as_it_was_made(name: str) -> None:
    method, task = helpers.make(name), helpers.tasks(((0, 1),), 12)[0]
    before = helpers.copied(dict(method.state_dict()))
    learning = [p.requires_grad for p in method.parameters()]

    def stop(_: Progress) -> None:
        raise helpers.Interrupted

    with pytest.raises(helpers.Interrupted):
        helpers.learn(method, task, progress=stop)
    assert not method.specs
    after = method.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert [p.requires_grad for p in method.parameters()] == learning


@pytest.mark.parametrize("name", ["finetuning", "tfm"])
def test_a_hand_on_the_keyboard_leaves_the_method_as_it_was(name: str) -> None:
    method, (first, second, _) = helpers.make(name, helpers.plain_net), helpers.tasks()
    helpers.learn(method, first, regime=replace(helpers.REGIME, epochs=1))
    before = helpers.copied(dict(method.state_dict()))

    def stop(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        helpers.learn(method, second, progress=stop)
    assert [spec.name for spec in method.specs] == [first.name]
    after = method.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_a_network_that_ends_in_maps_is_told_apart_from_one_with_features() -> None:
    method = Method(nn.Conv2d(1, 4, 3), helpers.EXAMPLE)
    with pytest.raises(ValueError, match=r"must return \(batch, features\).*\(2, 4, 6, 6\)"):
        method.add_task(TaskSpec("a", 2))


def test_of_the_example_a_little_is_kept_and_that_is_the_methods_own() -> None:
    given = torch.randn(9, 1, 8, 8)
    method = Method(helpers.plain_net(), given)
    kept = method.get_buffer("example")
    assert torch.equal(kept, given[:2])
    given.zero_()
    assert kept.all()
