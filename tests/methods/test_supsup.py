"""SupSup: no weight ever moves, and a seed makes all of them again."""

from __future__ import annotations

import math

import pytest
import torch

from tests.methods.small_tasks import answers, example, net, regime, right, tasks
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.scored import SupSup, signed_constants
from zeroforget.training import Fit

MOVING = {"momentum": 0.9, "weight_decay": 0.1}


@pytest.mark.parametrize("lr", [1e-2, None])
def test_weights_never_move_at_all(lr: float | None) -> None:
    method = SupSup(net(norm=True), example(), lr=lr)
    before = {name: method.net.get_parameter(name).detach().clone() for name in method.masks.shapes}
    biases = {n: p.detach().clone() for n, p in method.net.named_parameters() if n in ("0.bias", "9.bias")}
    then = []
    for index, task in enumerate(tasks()):
        method.learn(task, Fit(regime(2, options=MOVING)))
        then.append(answers(method, index))
    for name, was in (before | biases).items():
        assert torch.equal(method.net.get_parameter(name), was), name
    assert all(torch.equal(answers(method, index), was) for index, was in enumerate(then))


def test_it_learns_by_choosing_alone() -> None:
    method = SupSup(net(width=16), example(), lr=1e-2)
    method.learn(tasks()[0], Fit(regime(12)))
    assert right(method, 0) > 0.85
    assert not torch.equal(method.masks.read(0)["9.weight"], torch.ones(32, 128).bool())


def test_a_seed_makes_the_weights_again() -> None:
    one, two = SupSup(net(seed=1), example()), SupSup(net(seed=2), example())
    again = signed_constants(two.net, two.masks.shapes, int(one.get_buffer("seed")))
    for name, weight in again.items():
        assert torch.equal(weight, one.net.get_parameter(name))
        assert not torch.equal(weight, two.net.get_parameter(name))
        inputs = weight[0].numel()
        assert weight.unique().tolist() == pytest.approx([-math.sqrt(2 / inputs), math.sqrt(2 / inputs)])
    weights = sum(p.numel() for p in again.values())
    assert one.overhead().spared == 32 * weights
    one.learn(tasks()[0], Fit(regime(1)))
    assert one.overhead().inference == 8 * -(-weights // 8) + 64


def test_a_share_or_all_scores_of_zero_or_more() -> None:
    method = SupSup(net(), example(), capacity=0.2)
    method.learn(tasks()[0], Fit(regime(1)))
    assert all(int(m.sum()) == round(0.2 * m.numel()) for m in method.masks.read(0).values())
    method = SupSup(net(), example())
    method.learn(tasks()[0], Fit(regime(1)))
    for mask, score in zip(method.masks.read(0).values(), method.scores, strict=True):
        assert torch.equal(mask, score >= 0)


def test_every_task_begins_with_fresh_scores_and_normalization() -> None:
    method = SupSup(net(norm=True), example())
    given = method.net.get_buffer("1.running_mean").clone()
    method.learn(tasks()[0], Fit(regime(2)))
    scores = [score.detach().clone() for score in method.scores]
    assert not torch.equal(method.net.get_buffer("1.running_mean"), given)
    method.add_task(TaskSpec("next", 2))
    assert torch.equal(method.net.get_buffer("1.running_mean"), given)
    assert all(not torch.equal(now, then) for now, then in zip(method.scores, scores, strict=True))
