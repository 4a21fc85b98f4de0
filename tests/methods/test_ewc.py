"""EWC against the Fisher information of a linear softmax model, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.methods import helpers
from zeroforget.data import Task
from zeroforget.methods.ewc import Ewc
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
    method.firmest = math.inf
    x, y = first.prepare.test(first.train.images[:8]), first.train.labels[:8]
    plain = torch.nn.functional.cross_entropy(method(x, 1), y)
    penalty = method.loss(x, y, 1) - plain
    torch.testing.assert_close(penalty, 15.0 * (fisher * moved.square()).sum(), rtol=1e-4, atol=1e-5)  # eq. (3)
    (gradient,) = torch.autograd.grad(penalty, weight)
    torch.testing.assert_close(gradient, 30.0 * fisher * (weight - anchor), rtol=1e-3, atol=1e-5)


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
    """Without its bound, gradient descent on this penalty swings out to infinity within a few steps."""
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
    assert method.firmest == regime.stiffest / 2
    assert all(p.isfinite().all() for p in method.parameters())


def test_the_firmest_pull_brings_a_weight_home_in_one_step_and_no_further() -> None:
    method = Ewc(linear_net(), helpers.EXAMPLE, strength=1e9)
    helpers.learn(method, helpers.tasks()[2], regime=Regime(lr=0.2, epochs=1))
    method.importance.put({"1.weight": torch.ones(6, 64)})
    weight, home = method.net[1].weight, method.anchor["1.weight"].clone()
    with torch.no_grad():
        weight += torch.randn(6, 64)
    (gradient,) = torch.autograd.grad(method.penalty(), weight)
    torch.testing.assert_close(weight.detach() - 0.2 * gradient, home)


def test_how_firmly_weights_are_held_is_found_once_a_task_and_anew_for_the_next() -> None:
    first, second, third = helpers.tasks()
    method = Ewc(linear_net(), helpers.EXAMPLE, strength=3.0)
    seen: list[tuple[int, Tensor]] = []
    plain = method.firmness

    def firmness(name: str, strength: float) -> Tensor:
        seen.append((len(method.specs), plain(name, strength)))
        torch.testing.assert_close(seen[-1][1], (strength * method.importance[name]).clamp(max=method.firmest))
        return seen[-1][1]

    method.firmness = firmness  # type: ignore[method-assign]
    for task in (first, second, third):
        helpers.learn(method, task)
    for number in (2, 3):
        found = [tensor for tasks, tensor in seen if tasks == number]
        assert len(found) > 2
        assert all(tensor is found[0] for tensor in found)
    method.importance.put({"1.weight": torch.rand(6, 64)})
    firmness("1.weight", 3.0)  # outside of learning, as it is
