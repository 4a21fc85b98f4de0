"""Piggyback's masks switch weights off, and its backbone never moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.methods.small_tasks import answers, example, learned, net, regime, replayed, right, tasks
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.piggyback import Piggyback
from zeroforget.training import Fit, FitLog

QUICK = {"mask_lr": 1e-3, "lr": 1e-2}


def test_masks_differ_from_all_ones_and_the_backbone_never_moves() -> None:
    method = Piggyback(net(norm=True), example(), **QUICK)
    fit = Fit(regime(6, options={"momentum": 0.9, "weight_decay": 0.1}))
    method.learn(tasks()[0], fit)
    weights = {n: p.detach().clone() for n, p in method.net.named_parameters() if p.dim() > 1}
    biases = method.net.get_parameter("9.bias").detach().clone()
    then = [answers(method, 0)]
    for index, each in enumerate(tasks()[1:], 1):
        method.learn(each, fit)
        then.append(answers(method, index))
        off = [float((~mask).float().mean()) for mask in method.masks.read(index - 1).values()]
        assert max(off) > 0.01
    assert all(torch.equal(method.net.get_parameter(n), weight) for n, weight in weights.items())
    assert torch.equal(method.net.get_parameter("9.bias"), biases)
    assert all(torch.equal(answers(method, i), logits) for i, logits in enumerate(then))
    assert min(right(method, i) for i in range(3)) > 0.7
    twin = replayed(method, "piggyback", norm=True, **QUICK)
    assert all(torch.equal(answers(twin, i), logits) for i, logits in enumerate(then))


def test_the_masks_do_the_work() -> None:
    """Frozen features with a new head (masks that cannot move) do worse than masks that are learned."""
    method = learned("piggyback", epochs=12, **QUICK)
    stuck = learned("piggyback", epochs=12, mask_lr=1e-9, lr=1e-2)
    assert isinstance(stuck, Piggyback)
    assert all(mask.all() for mask in stuck.masks.read(1).values())
    assert right(method, 2) > right(stuck, 2) + 0.05


def test_gradient_goes_straight_through_to_the_real_masks() -> None:
    method = Piggyback(nn.Linear(3, 4), torch.zeros(2, 3), pretrained=True)
    method.add_task(TaskSpec("a", 2))
    with torch.no_grad():
        method.real[0][0, 0] = 0.0
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    loss = method.loss(x, y, 0)
    loss.backward()
    weight = method.net.get_parameter("weight")
    masked = (weight * method.switches()["weight"]).detach().requires_grad_()
    hidden = torch.nn.functional.linear(x, masked, method.net.get_parameter("bias"))
    same = torch.nn.functional.cross_entropy(method.heads[0](hidden), y)
    same.backward()
    assert torch.equal(loss, same)
    assert masked.grad is not None
    assert not method.switches()["weight"][0, 0]
    torch.testing.assert_close(method.real[0].grad, masked.grad * weight)  # dL/dm = dL/dŴ · W
    assert weight.grad is None


def test_masks_move_by_their_own_learning_rate() -> None:
    method = Piggyback(nn.Linear(3, 4), torch.zeros(2, 3), pretrained=True, mask_lr=1e-4, lr=1e-2)
    method.add_task(TaskSpec("a", 2))
    optimizer = torch.optim.Adam(method.trainable(), lr=method.lr)
    before, head = method.real[0].detach().clone() * method.unit, method.heads[0].weight.detach().clone()
    method.loss(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]), 0).backward()
    optimizer.step()
    torch.testing.assert_close(
        (method.real[0] * method.unit - before).abs().max(), torch.tensor(1e-4), rtol=0.01, atol=0
    )
    torch.testing.assert_close((method.heads[0].weight - head).abs().max(), torch.tensor(1e-2), rtol=0.01, atol=0)


@pytest.mark.parametrize("pretrained", [False, True])
def test_overhead_is_a_bit_per_weight_and_masked_task(pretrained: bool) -> None:
    method = Piggyback(net(), example(), pretrained=pretrained)
    for name in "abc":
        method.add_task(TaskSpec(name, 2))
    weights = sum(p.numel() for p in method.net.parameters() if p.dim() > 1)
    masked = 3 if pretrained else 2
    assert method.overhead().inference == masked * -(-weights // 8) * 8
    assert method.overhead().training == method.overhead().inference + 32 * weights
    for _ in range(3):
        method.drop_task()
    assert method.overhead().training == 0


def test_every_task_starts_from_the_backbone_and_fresh_masks() -> None:
    method = Piggyback(net(norm=True), example())
    fit = Fit(regime(2))
    for each in tasks(2):
        method.learn(each, fit)
    backbone = method.norms.read(0)
    assert not torch.equal(method.net.get_buffer("1.running_mean"), backbone["1.running_mean"])
    method.add_task(TaskSpec("c", 2))
    own = method.net.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in backbone.items())
    assert all((real * method.unit == method.init).all() for real in method.real)


def test_masks_are_learned_by_adam_as_long_as_its_rate_is_as_far_above_its_bound() -> None:
    """The regime's bound belongs to the regime's rate; momentum is nothing that Adam knows."""
    heard: list[dict[str, object]] = []

    class Told(Fit):
        def __call__(self, *args: object, **changes: object) -> FitLog:
            heard.append(changes)
            return super().__call__(*args, **changes)  # type: ignore[arg-type]

    method = Piggyback(net(), example(), lr=0.02)
    fit = Told(regime(1, lr=0.1, min_lr=0.001, options={"momentum": 0.9}))
    for each in tasks(2):
        method.learn(each, fit)
    assert heard[0] == {}
    assert heard[1] == {"optimizer": "adam", "options": {}, "lr": 0.02, "min_lr": pytest.approx(0.0002)}


@pytest.mark.parametrize(("init", "threshold", "on"), [(0.03, 0.02, True), (0.02, 0.02, False), (0.01, 0.02, False)])
def test_a_weight_is_on_where_its_real_mask_is_above_the_threshold(init: float, threshold: float, on: bool) -> None:
    method = Piggyback(
        nn.Linear(3, 4), torch.zeros(2, 3), pretrained=True, init=init, threshold=threshold, mask_lr=0.01, lr=0.01
    )
    method.add_task(TaskSpec("a", 2))
    assert set(method.switches()["weight"].flatten().tolist()) == {on}


def test_a_network_as_given_may_be_the_backbone_of_the_first_task_too() -> None:
    method = Piggyback(net(norm=True), example(), pretrained=True, **QUICK)
    given = {n: p.detach().clone() for n, p in method.net.named_parameters() if p.dim() > 1}
    then = []
    for index, each in enumerate(tasks()):
        method.learn(each, Fit(regime(3)))
        then.append(answers(method, index))
        assert not all(mask.all() for mask in method.masks.read(index).values())
    assert all(torch.equal(method.net.get_parameter(n), weight) for n, weight in given.items())
    assert all(torch.equal(answers(method, i), logits) for i, logits in enumerate(then))
    twin = replayed(method, "piggyback", norm=True, pretrained=True, **QUICK)
    assert all(torch.equal(answers(twin, i), logits) for i, logits in enumerate(then))
