"""SI on a quadratic, where the path integral is the fall of the loss along each coordinate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.methods import helpers
from zeroforget.methods.anchored import Si
from zeroforget.methods.base import TaskSpec
from zeroforget.training import Fit

CURVATURE = torch.tensor([[4.0, 1.0, 0.0]])
GOAL = torch.tensor([[1.0, -2.0, 5.0]])


class Quadratic(Si):
    """½ Σ a (θ − b)² in place of cross-entropy."""

    goal = GOAL

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        theta = self.weights()["weight"]
        loss = (CURVATURE * (theta - self.goal).square()).sum() / 2
        return loss + self.pull(self.strength).detach() if task else loss


def quadratic(**options: float) -> Quadratic:
    net = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(net.weight)
    method = Quadratic(net, torch.zeros(2, 3), **options)
    method.add_task(TaskSpec("bowl", 2))
    return method


def walk(method: Quadratic, task: int, steps: int, lr: float = 1e-3) -> None:
    optimizer = torch.optim.SGD(method.net.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        method.step_rate = lr
        method.before_step(0.0)
        method.loss(torch.zeros(1, 3), torch.zeros(1).long(), task).backward()
        method.after_backward()
        optimizer.step()
        method.after_step()


def test_path_integral_and_importance_on_a_quadratic() -> None:
    method = quadratic(damping=0.3)
    walk(method, 0, 3000)
    theta = method.net.weight.detach().clone()
    fallen = CURVATURE * (GOAL.square() - (theta - GOAL).square()) / 2
    torch.testing.assert_close(method.path["weight"], fallen, rtol=5e-3, atol=1e-5)
    method.end_task(helpers.tasks()[0], Fit())
    torch.testing.assert_close(method.importance["weight"], fallen / (theta**2 + 0.3), rtol=5e-3, atol=1e-5)  # eq. (5)
    assert method.path["weight"].abs().max() == 0
    assert torch.equal(method.anchor["weight"], theta)


def test_the_path_is_the_losss_gradient_times_the_whole_step() -> None:
    method = quadratic(strength=0.7)
    walk(method, 0, 500)
    method.end_task(helpers.tasks()[0], Fit())
    method.add_task(TaskSpec("next", 2))
    method.goal = torch.zeros(1, 3)
    weight, home = method.weights()["weight"], method.anchor["weight"].clone()
    with torch.no_grad():
        weight += 0.5
    method.step_rate, weight.grad = 0.01, None
    method.before_step(0.0)
    method.loss(torch.zeros(1, 3), torch.zeros(1).long(), 1).backward()
    assert weight.grad is not None
    plain = CURVATURE * weight.detach()
    method.after_backward()
    torch.testing.assert_close(weight.grad, plain)  # the pull has no gradient
    before = weight.detach().clone()
    with torch.no_grad():
        weight -= 0.01 * weight.grad
    stepped = weight.detach().clone()
    method.after_step()
    pull = 2 * 0.01 * 0.7 * method.importance["weight"]
    torch.testing.assert_close(weight.detach(), (stepped + pull * home) / (1 + pull))
    torch.testing.assert_close(method.path["weight"], -plain * (weight - before))
    assert (weight - stepped).abs().max() > 1e-4


def test_a_path_uphill_makes_nothing_important() -> None:
    method = quadratic()
    method.path.put({"weight": torch.tensor([[-3.0, 2.0, 0.0]])})
    method.end_task(helpers.tasks()[0], Fit())
    assert (method.importance["weight"] > 0).tolist() == [[False, True, False]]
    assert method.importance["weight"].min() == 0


def test_a_parameter_without_a_gradient_is_passed_over() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    method = Si(Idle(), torch.zeros(2, 3))
    method.add_task(TaskSpec("a", 2))
    method.loss(torch.ones(4, 3), torch.tensor([0, 1, 0, 0]), 0).backward()
    method.after_backward()
    with torch.no_grad():
        method.net.layer.weight += 1.0  # type: ignore[union-attr, operator]
    method.after_step()
    assert method.path["layer.weight"].abs().min() > 0
    assert method.path["idle"].abs().max() == 0


def test_what_it_keeps_is_importance_anchor_and_path() -> None:
    assert quadratic().overhead().training == 3 * 3 * 32


def test_importance_never_falls_and_the_path_is_saved_with_an_epoch() -> None:
    states = helpers.run("si").states
    for name in (n for n in states[0] if n.startswith("importance.")):
        assert (states[0][name] >= 0).all()
        assert (states[1][name] >= states[0][name]).all()
    assert any(name.startswith("path.") for name in helpers.run("si").method.moving())
    assert max(float(t.max()) for n, t in states[0].items() if n.startswith("importance.")) > 0


def test_damping_must_be_positive() -> None:
    with pytest.raises(ValueError, match="damping"):
        helpers.make("si", damping=0.0)
