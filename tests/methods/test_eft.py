"""EFT: the backbone is equal bit for bit, and transformations begin as the identity and do all the learning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.methods.small_tasks import answers, example, learned, net, regime, right, tasks
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.eft import Convolved, Eft
from zeroforget.methods.per_task import task_tensors
from zeroforget.training import Fit

MOVING = {"momentum": 0.9, "weight_decay": 0.1}


@pytest.mark.parametrize("pretrained", [False, True])
def test_the_frozen_part_is_bit_equal(pretrained: bool) -> None:
    method = Eft(net(norm=True), example(), pretrained=pretrained)
    backbone: dict[str, torch.Tensor] = {}
    then = []
    for index, task in enumerate(tasks()):
        if index or pretrained:
            own = task_tensors(method.net)
            backbone = {n: p.detach().clone() for n, p in method.net.named_parameters() if n not in own}
        method.learn(task, Fit(regime(2, options=MOVING)))
        for name, was in backbone.items():
            assert torch.equal(method.net.get_parameter(name), was), name
        then.append(answers(method, index))
    assert len(backbone) == 6  # weights and biases of three layers
    assert all(torch.equal(answers(method, index), was) for index, was in enumerate(then))


def test_a_task_begins_as_the_backbone() -> None:
    method = learned("eft", 1, norm=True)
    x = torch.randn(5, 1, 8, 8)
    before = method.net.eval()(x)
    method.add_task(TaskSpec("next", 2))
    method.eval()
    assert torch.equal(method(x, 1), method.heads[1](before))
    assert torch.equal(method.predictor(1)(x), method(x, 1))


def test_transformations_learn_what_a_frozen_network_cannot() -> None:
    """A backbone of a single feature that is always there: without transformations nothing but the head could learn."""
    eft, frozen = learned("eft", 3, epochs=6, norm=True), learned("freezing", 3, epochs=6, norm=True)
    assert isinstance(eft, Eft)
    for task in (1, 2):
        assert any(not torch.equal(p, torch.ones_like(p)) for p in eft._of(task).parameters())
    assert right(eft, 2) > right(frozen, 2)


def test_what_it_adds_to_a_layer_is_counted() -> None:
    """Groups of 8 channels at 3×3 and of 16 at 1×1: K · (8 · 9 + 16) numbers for K channels; a factor for a feature."""
    method = Eft(nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10)), example())
    for name in ("a", "b", "c"):
        method.add_task(TaskSpec(name, 2))
    assert method.overhead().inference == 2 * 32 * (32 * (8 * 9 + 16) + 10)


def test_groups_fit_any_number_of_channels() -> None:
    made = Convolved(12, 8, 16)
    assert (made.wide.groups, made.deep.groups) == (3, 3)
    x = torch.randn(2, 12, 5, 5)
    assert torch.equal(made(x), x)
    with pytest.raises(ValueError, match="1 channel or more"):
        Eft(net(), example(), spatial=0)


def test_a_task_that_is_taken_back_leaves_the_one_before_learning() -> None:
    method = Eft(net(norm=True), example())
    for name in ("a", "b", "c"):
        method.add_task(TaskSpec(name, 2))
    method.drop_task()
    assert all(p.requires_grad for p in method.trainable())
    method.drop_task()
    assert all(p.requires_grad for p in method.net.parameters())
