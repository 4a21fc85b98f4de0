"""LFL's gradient by hand, and that it compares the right features."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.methods import helpers
from tests.methods.test_ewc import linear_net
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.distillation import Features, Lfl
from zeroforget.training import Regime


def with_teacher(net: nn.Module, strength: float) -> Lfl:
    method = Lfl(net, helpers.EXAMPLE, strength=strength)
    for classes in (3, 2):
        method.add_task(TaskSpec(str(classes), classes))
    method._teacher = (copy.deepcopy(method.net).eval(),)
    return method


def test_gradient_by_hand() -> None:
    """λ · ½ ‖W_old x − W x‖² summed over the batch has the gradient λ (W − W_old) x xᵀ."""
    method = with_teacher(linear_net(), 0.2)
    weight = method.net[1].weight
    moved = torch.randn(6, 64)
    with torch.no_grad():
        weight += moved
    x, y = torch.randn(5, 1, 8, 8), torch.randint(2, (5,))
    (whole,) = torch.autograd.grad(method.loss(x, y, 1), weight)
    (plain,) = torch.autograd.grad(F.cross_entropy(method(x, 1), y), weight)
    flat = x.flatten(1)
    torch.testing.assert_close(whole - plain, 0.2 * moved @ flat.T @ flat, rtol=1e-3, atol=1e-3)


def test_features_are_compared_before_dropout() -> None:
    """A network that has not moved is at no distance from itself, however much dropout thins it."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5))
    far, near = with_teacher(net, 1000.0), with_teacher(copy.deepcopy(net), 0.0)
    near.load_state_dict(far.state_dict())
    x, y = torch.randn(6, 1, 8, 8), torch.randint(2, (6,))
    losses = []
    for method in (far, near):
        torch.manual_seed(1)
        losses.append(method.train().loss(x, y, 1))
    torch.testing.assert_close(*losses)


class Weighed(Lfl):
    """Remembers what batch the departure was weighed for."""

    seen: set[int]

    def departure(self, now: Features, before: Tensor, task: int, batch: int) -> Tensor:
        self.seen = {*getattr(self, "seen", ()), batch}
        return super().departure(now, before, task, batch)


def test_validation_weighs_the_departure_as_training_does() -> None:
    """Also where a task has fewer images than a batch would hold."""
    few = helpers.tasks(((0, 1), (2, 3)), each=10)
    method = Weighed(helpers.plain_net(), helpers.EXAMPLE)
    for task in few:
        helpers.learn(method, task, regime=Regime(epochs=1, batch_size=64))
    assert method.seen == {20}


def test_old_heads_are_the_boundary_that_stays() -> None:
    states = helpers.run("lfl").states
    assert torch.equal(states[0]["heads.0.weight"], states[2]["heads.0.weight"])
    first = helpers.tasks()[0]
    kept = {name: helpers.score(helpers.run(name).method, 0, first) for name in ("finetuning", "lfl")}
    assert kept["lfl"] > kept["finetuning"] + 0.1


def test_features_in_half_precision_are_compared_in_full() -> None:
    method = Lfl(linear_net(), helpers.EXAMPLE, strength=2.0)
    now, before = (torch.randn(3, 400, generator=torch.Generator().manual_seed(k)).bfloat16() for k in (0, 1))
    found = method.departure(Features(now, now), before, 1, 5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, 2.0 * 5 / 2 * (before.float() - now.float()).square().sum(1))
