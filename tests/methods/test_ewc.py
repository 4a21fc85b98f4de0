"""EWC against the Fisher information of a linear softmax model, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.methods import helpers
from zeroforget.data import Task
from zeroforget.methods.anchored import Ewc
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.importance import fisher, samples_of
from zeroforget.training import Fit, Regime
from zeroforget.training.seeding import generator


def linear_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6, bias=False))


def fisher_by_hand(method: Ewc, index: int, task: Task) -> Tensor:
    """With logits H W x the gradient of −log p(y) by W is Hᵀ(p − y) xᵀ, so its mean square factors."""
    x = task.prepare.test(task.train.images[task.train.rows]).flatten(1).double()
    H, W = method.heads[index].weight.double(), method.net[1].weight.double()
    p = (x @ W.T @ H.T + method.heads[index].bias.double()).softmax(1)
    p[torch.arange(len(x)), task.train.labels] -= 1
    delta = p @ H
    return (delta.square().T @ x.square() / len(x)).float().detach()


def test_penalty_equals_the_closed_form() -> None:
    first = helpers.tasks()[0]
    method = helpers.make("ewc", linear_net, strength=30.0)
    assert isinstance(method, Ewc)
    helpers.learn(method, first)
    fisher = fisher_by_hand(method, 0, first)
    torch.testing.assert_close(method.importance["1.weight"], fisher, rtol=1e-4, atol=1e-9)

    weight = method.net[1].weight
    anchor = weight.detach().clone()
    moved = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight += moved
    method.add_task(method.specs[0])
    x, y = first.prepare.test(first.train.images[:8]), first.train.labels[:8]
    plain = torch.nn.functional.cross_entropy(method(x, 1), y)
    penalty = method.penalty()
    torch.testing.assert_close(penalty, 15.0 * (fisher * moved.square()).sum(), rtol=1e-4, atol=1e-5)  # eq. (3)
    torch.testing.assert_close(method.loss(x, y, 1), plain + penalty)
    (gradient,) = torch.autograd.grad(penalty, weight)
    torch.testing.assert_close(gradient, 30.0 * fisher * (weight - anchor), rtol=1e-3, atol=1e-5)
    (of_loss,), (of_plain,) = (torch.autograd.grad(out, weight) for out in (method.loss(x, y, 1), plain))
    torch.testing.assert_close(of_loss, of_plain)  # the optimizer sees the new task alone


@pytest.mark.parametrize("strength", [1e-3, 3.0, 1e9, 1e30])
@pytest.mark.parametrize("rate", [0.05, 2.0, math.inf])
def test_the_proximal_step_is_the_minimum_of_penalty_and_way_back(strength: float, rate: float) -> None:
    """It minimizes λ/2 Σ F (θ − θ*)² + ‖θ − where the optimizer went‖² / 2η; between the two, never past the anchor."""
    method = Ewc(linear_net(), helpers.EXAMPLE, strength=strength)
    for classes in (2, 3):
        method.add_task(TaskSpec(str(classes), classes))
    draws = torch.rand(6, 64, generator=torch.Generator().manual_seed(1))
    method.importance.put({"1.weight": torch.where(draws < 0.2, 0.0, draws)})
    weight, home = method.net[1].weight, method.anchor["1.weight"]
    with torch.no_grad():
        weight += torch.randn(6, 64)
    went = weight.detach().clone()
    method.step_rate = rate
    method.before_step(0.0)
    method.after_step()
    now, fisher = weight.detach().double(), method.importance["1.weight"].double()
    between = (now - went) * (now - home)
    assert (between <= 1e-12).all()
    assert torch.equal(weight[fisher == 0], went[fisher == 0])
    if strength * rate < 1e3:
        slope = strength * fisher * (now - home) + (now - went) / rate
        assert slope.abs().max() < 1e-4 * max(1.0, strength, 1 / rate)
    else:
        torch.testing.assert_close(weight[fisher > 0.2], home[fisher > 0.2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}])
def test_training_ends_where_loss_and_penalty_balance(options: dict[str, float]) -> None:
    """At the published minimum of ½ (θ − b)² + λ/2 (θ − θ*)², also for pulls that no gradient step could follow."""

    class Bowl(Ewc):
        def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
            return (method.net.weight - 3.0).square().sum() / 2  # type: ignore[union-attr, operator]

    for strength in (0.5, 4.0, 400.0):
        net = nn.Linear(3, 2, bias=False)
        nn.init.zeros_(net.weight)
        method = Bowl(net, torch.zeros(2, 3), strength=strength)
        for name in ("a", "b"):
            method.add_task(TaskSpec(name, 2))
        method.importance.put({"weight": torch.ones(2, 3)})
        regime = Regime(lr=0.05, options=options)
        optimizer = regime.make_optimizer([net.weight], regime.lr)
        method.step_rate = regime.carries(0.05)
        for _ in range(600):
            optimizer.zero_grad()
            method.before_step(0.0)
            method.loss(torch.zeros(1, 3), torch.zeros(1).long(), 1).backward()
            optimizer.step()
            method.after_step()
        torch.testing.assert_close(net.weight.detach(), torch.full((2, 3), 3.0 / (1 + strength)), rtol=1e-3, atol=1e-5)


def test_importance_is_the_mean_over_tasks_and_the_anchor_is_the_last_place() -> None:
    first, second, _ = helpers.tasks()
    method = helpers.make("ewc", linear_net)
    assert isinstance(method, Ewc)
    helpers.learn(method, first)
    one = fisher_by_hand(method, 0, first)
    helpers.learn(method, second)
    two = fisher_by_hand(method, 1, second)
    torch.testing.assert_close(method.importance["1.weight"], (one + two) / 2, rtol=1e-4, atol=1e-9)
    assert torch.equal(method.anchor["1.weight"], method.net[1].weight)


@pytest.mark.parametrize("labels", ["true", "sampled"])
def test_the_options_are_those_of_the_fisher_information(labels: str) -> None:
    task, fit = helpers.tasks()[0], Fit(Regime(epochs=1), seed=5)
    method = Ewc(linear_net(), helpers.EXAMPLE, samples=30, labels=labels)
    method.learn(task, fit)
    draws = generator("fisher", 5, 0)
    data = list(samples_of(task, fit, 0, 30))
    found = fisher(method, ["net.1.weight"], data, 0, labels=labels, draws=draws)["net.1.weight"]
    torch.testing.assert_close(method.importance["1.weight"], found)
    other = fisher(method, ["net.1.weight"], data, 0, labels="sampled", draws=generator("fisher", 0, 0))
    assert not torch.allclose(found, other["net.1.weight"])


def test_the_pull_of_a_part_of_the_loss_is_a_part_of_the_pull() -> None:
    method = Ewc(linear_net(), helpers.EXAMPLE)
    method.importance.put({"1.weight": torch.rand(6, 64)})
    weight = method.net[1].weight
    with torch.no_grad():
        weight += 0.1
    (whole,), (part,) = (torch.autograd.grad(share * method.pull(2.0), weight) for share in (1.0, 0.25))
    torch.testing.assert_close(part, whole / 4)
    assert whole.abs().max() > 0


def test_the_pull_is_the_formula_however_weights_lie_in_memory() -> None:
    method = Ewc(nn.Sequential(nn.Conv2d(1, 6, 3), nn.Flatten()), helpers.EXAMPLE)
    wanted = torch.zeros((), dtype=torch.float64)
    for name, weight in method.weights().items():
        method.importance[name].copy_(torch.rand_like(weight))
        method.anchor[name].add_(torch.randn_like(weight))
        wanted += (method.importance[name].double() * (weight - method.anchor[name]).detach().double().square()).sum()
    for layout in (torch.contiguous_format, torch.channels_last):
        method.net.to(memory_format=layout)  # type: ignore[call-overload]
        pull = method.pull(3.0)
        torch.testing.assert_close(pull.detach().double(), 3.0 * wanted)
        for name, weight in method.weights().items():
            (force,) = torch.autograd.grad(pull, weight, retain_graph=True)
            torch.testing.assert_close(force, 6.0 * method.importance[name] * (weight - method.anchor[name]).detach())


def test_a_pull_beyond_all_measure_holds_and_does_not_explode() -> None:
    """Gradient descent on this penalty would swing out to infinity within a few steps."""
    first, second, _ = helpers.tasks()
    regime = Regime(lr=0.05, epochs=4, batch_size=16)
    moved = {}
    for strength in (0.0, 1e9):
        method = helpers.make("ewc", strength=strength)
        helpers.learn(method, first, regime=regime)
        before = helpers.copied(dict(method.net.named_parameters()))
        helpers.learn(method, second, regime=regime)
        after = dict(method.net.named_parameters())
        moved[strength] = sum(float((after[n].detach() - before[n]).square().sum()) for n in before)
    assert moved[1e9] < 0.05 * moved[0.0]


def test_epochs_save_only_what_moves() -> None:
    method = helpers.run("ewc").method
    assert all(name.startswith(("net.", "heads.2.")) for name in method.moving())
    weights = sum(p.numel() for p in method.net.parameters())
    assert method.overhead().training == 2 * 32 * weights
    assert method.overhead().inference == 0


def test_a_network_that_is_frozen_altogether_has_nothing_to_hold() -> None:
    first, second, _ = helpers.tasks()
    method = helpers.make("ewc", lambda: helpers.plain_net().requires_grad_(False))
    for task in (first, second):
        helpers.learn(method, task, regime=Regime(lr=0.05, epochs=2))
    assert method.overhead().training == 0


@pytest.mark.parametrize("dampening", [0.0, 0.9, 0.99])
def test_momentum_does_not_let_a_strong_pull_diverge(dampening: float) -> None:
    first, second, _ = helpers.tasks()
    method = Ewc(helpers.plain_net(), helpers.EXAMPLE, strength=1e9)
    regime = Regime(lr=0.2, epochs=12, options={"momentum": 0.9, "dampening": dampening})
    for task in (first, second):
        helpers.learn(method, task, regime=regime)
    assert 0 < method.step_rate <= regime.reach
    assert all(p.isfinite().all() for p in method.parameters())
