"""Joint training sees all past data, and judges each image by its own head."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.methods import helpers
from zeroforget.methods.baselines import Joint, merged
from zeroforget.training import Fit, Regime


def test_every_image_of_every_task_is_seen_each_epoch() -> None:
    seen: list[Tensor] = []

    class Watched(Joint):
        def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
            seen.append(y)
            return super().loss(x, y, task)

    method = Watched(helpers.plain_net(), helpers.EXAMPLE)
    tasks = helpers.tasks()
    for k, task in enumerate(tasks):
        seen.clear()
        helpers.learn(method, task, tasks[:k], regime=Regime(epochs=1))
        counted = torch.cat(seen).bincount()
        expected = torch.cat([t.train.labels.bincount() for t in tasks[: k + 1]])
        assert torch.equal(counted, expected)


def test_loss_and_score_use_each_image_s_own_head() -> None:
    tasks = helpers.tasks()
    method = helpers.run("joint").method
    assert isinstance(method, Joint)
    whole = merged(tasks).test
    x, y = (tasks[0].prepare.test(part) if i == 0 else part for i, part in enumerate(whole.batch(torch.arange(300))))
    by_hand, right = [], []
    for k, task in enumerate(tasks):
        offset = sum(len(t.classes) for t in tasks[:k])
        own = (y >= offset) & (y < offset + len(task.classes))
        logits = method(x[own], k)
        by_hand.append(F.cross_entropy(logits, y[own] - offset, reduction="none"))
        right.append(logits.argmax(1) == y[own] - offset)
    method._past = ()
    losses, correct = method.score(method.predictor(0), x, y, 2)
    mean = method.loss(x, y, 2)
    method._past = None
    torch.testing.assert_close(losses, torch.cat(by_hand), rtol=1e-4, atol=1e-5)
    assert torch.equal(correct, torch.cat(right))
    torch.testing.assert_close(mean, losses.mean())


def test_all_heads_learn_and_nothing_is_lost() -> None:
    done = helpers.run("joint")
    assert not torch.equal(done.states[0]["heads.0.weight"], done.states[2]["heads.0.weight"])
    for k, task in enumerate(helpers.tasks()):
        assert helpers.score(done.method, k, task) > 0.9


def test_the_past_is_required_in_full() -> None:
    first, second, third = helpers.tasks()
    method = helpers.make("joint", helpers.plain_net)
    helpers.learn(method, first, regime=Regime(epochs=1))
    for past in ((), (second,), (first, second)):
        with pytest.raises(ValueError, match="every task so far"):
            method.learn(third, Fit(), past)
    odd = dataclasses.replace(second, prepare=dataclasses.replace(second.prepare, flip=True))
    with pytest.raises(ValueError, match="prepared differently"):
        method.learn(odd, Fit(), [first])
    assert [spec.name for spec in method.specs] == [first.name]


def test_restart_begins_at_the_first_network_and_is_undone_when_interrupted() -> None:
    first, second, _ = helpers.tasks()
    nothing = Regime(epochs=1, lr=1e-12, min_lr=1e-13)
    method = helpers.make("joint", helpers.plain_net, restart=True)
    start = helpers.copied(dict(method.net.state_dict()))
    helpers.learn(method, first)
    learned = helpers.copied(dict(method.state_dict()))

    def stop(_: object) -> None:
        raise helpers.Interrupted

    with pytest.raises(helpers.Interrupted):
        helpers.learn(method, second, [first], progress=stop)
    assert all(torch.equal(value, learned[name]) for name, value in method.state_dict().items())
    helpers.learn(method, second, [first], regime=nothing)
    assert not torch.allclose(method.heads[0].weight, learned["heads.0.weight"], atol=1e-3)
    for name, value in method.net.state_dict().items():
        torch.testing.assert_close(value, start[name], rtol=0, atol=1e-6)
        assert not torch.allclose(value, learned[f"net.{name}"], atol=1e-3)


def test_a_task_that_only_waits_is_checked_all_the_same() -> None:
    method = helpers.make("joint", helpers.plain_net, begin=2)
    with pytest.raises(ValueError, match="at least 2"):
        method.learn(dataclasses.replace(helpers.tasks()[0], classes=("0",)), Fit())
    assert not method.specs


def test_training_may_begin_with_the_last_task_and_is_then_that_of_all_data_at_once() -> None:
    tasks = helpers.tasks()
    waiting = Joint(helpers.plain_net(), helpers.EXAMPLE, begin=len(tasks))
    first = {name: tensor.clone() for name, tensor in waiting.net.state_dict().items()}
    logs = []
    for k, task in enumerate(tasks):
        if k == len(tasks) - 1:
            assert all(torch.equal(tensor, first[name]) for name, tensor in waiting.net.state_dict().items())
        logs.append(waiting.learn(task, Fit(Regime(epochs=3)), tasks[:k]))
    assert [len(log.epochs) for log in logs] == [0] * (len(tasks) - 1) + [3]
    whole = merged(tasks)
    assert max(int(y) for y in whole.train.labels) + 1 == sum(spec.classes for spec in waiting.specs)
    assert logs[-1].epochs[-1].loss < logs[-1].epochs[0].loss


def test_heads_that_begin_again_are_drawn_by_the_seed_and_the_first_network_is_not_saved_with_an_epoch() -> None:
    first = helpers.tasks()[0]
    heads = []
    for seed in (0, 0, 1):
        method = helpers.make("joint", helpers.plain_net, restart=True)
        helpers.learn(method, first, regime=Regime(epochs=1, lr=1e-12, min_lr=1e-13), seed=seed)
        heads.append(method.heads[0].weight.detach().clone())
    torch.testing.assert_close(heads[0], heads[1], rtol=0, atol=0)
    assert not torch.allclose(heads[0], heads[2], atol=1e-3)
    assert any(name.startswith("start.") for name in method.state_dict())
    assert not any(name.startswith("start.") for name in method.moving())


def test_validation_sees_every_task_too() -> None:
    tasks = helpers.tasks()
    whole = merged(tasks)
    for part in ("train", "val", "test"):
        expected = torch.cat([getattr(t, part).labels.bincount() for t in tasks])
        assert torch.equal(getattr(whole, part).labels.bincount(), expected)
    assert whole.classes[:6] == (*(f"{tasks[0].name}/{c}" for c in tasks[0].classes), f"{tasks[1].name}/5")


def test_a_network_to_restart_from_is_kept_and_counted() -> None:
    method = helpers.make("joint", restart=True)
    network = 32 * sum(p.numel() for p in method.net.parameters()) + 2 * 8 * 32 + 64
    assert (method.overhead().training, method.overhead().inference) == (network, 0)
    assert helpers.make("joint").overhead().training == 0
