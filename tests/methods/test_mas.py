"""MAS on a linear network, where the sensitivity is known in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.methods import helpers
from tests.methods.test_ewc import linear_net
from zeroforget.data import Task
from zeroforget.methods.anchored import Mas


def sensitivity_by_hand(method: Mas, index: int, task: Task) -> Tensor:
    """‖H W x + b‖² has the gradient 2 Hᵀ f xᵀ by W; the mean of its absolute value factors."""
    x = task.prepare.test(task.train.images[task.train.rows]).flatten(1).double()
    H, W = method.heads[index].weight.double(), method.net[1].weight.double()
    f = x @ W.T @ H.T + method.heads[index].bias.double()
    return ((2 * f @ H).abs().T @ x.abs() / len(x)).float().detach()


def test_importance_equals_the_closed_form_and_adds_up() -> None:
    first, second, _ = helpers.tasks()
    method = helpers.make("mas", linear_net, strength=1e-4)
    assert isinstance(method, Mas)
    helpers.learn(method, first)
    one = sensitivity_by_hand(method, 0, first)
    torch.testing.assert_close(method.importance["1.weight"], one, rtol=1e-4, atol=1e-6)
    helpers.learn(method, second)
    two = sensitivity_by_hand(method, 1, second)
    torch.testing.assert_close(method.importance["1.weight"], one + two, rtol=1e-4, atol=1e-6)


def test_a_step_pulls_back_by_the_closed_form() -> None:
    method = helpers.make("mas", linear_net, strength=0.5)
    assert isinstance(method, Mas)
    for task in helpers.tasks()[:1]:
        helpers.learn(method, task)
    method.add_task(method.specs[0])
    weight, home = method.net[1].weight, method.anchor["1.weight"].clone()
    with torch.no_grad():
        weight += 0.1
    method.step_rate = 0.05
    method.before_step(0.0)
    method.after_step()
    pull = 2 * 0.05 * 0.5 * method.importance["1.weight"]  # 2 η λ Ω
    assert pull.max() > 0.1
    torch.testing.assert_close(weight.detach() - home, 0.1 / (1 + pull), rtol=1e-4, atol=1e-6)
