"""What a network costs that has many tasks: old ones lie outside the tree of modules, and take turns in one network."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch import nn

from tests.growing.helpers import growing, train
from zeroforget.growing.dense import DenseInTurn
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.per_task import PerTask

TASKS = 6


def learned(name: str, **options: object) -> GrowingNetwork:
    net, x = growing(name, **options)
    for task in range(TASKS):
        net.add_task(
            f"task{task}", 2 + task % 3, growth=(0.5, 0.2, 0.0, 0.0, 0.1, 0.0)[task], rank=2 if task == 3 else 0
        )
        train(net, x, steps=1)
    return net


def test_the_tree_of_modules_does_not_grow_with_the_tasks() -> None:
    net, _ = growing("resnet18")
    counts = []
    for task in range(4):
        net.add_task(f"task{task}", 2)
        parts = [*net.modules(), *net.parameters(), *net.buffers()]
        counts.append(len(parts))
    assert counts[1:] == [counts[1]] * 3


@pytest.mark.parametrize("name", ["lenet", "resnet18", "alexnet"])
def test_one_network_is_each_task_in_turn_bit_for_bit(name: str) -> None:
    net = learned(name)
    x, one, order = torch.randn(3, *net.shape), DenseInTurn(net), list(range(TASKS)) * 3
    random.Random(0).shuffle(order)
    forms = set()
    for task in order:
        dense, turned = net.dense(task), one.turn(task)
        forms.add(id(turned))
        assert torch.equal(dense(x), turned(x))
        own, other = dense.state_dict(), turned.state_dict()
        assert list(own) == list(other)
        assert all(torch.equal(own[key], other[key]) for key in own)
        assert str(dense) == str(turned)
        assert not any(p.requires_grad for p in turned.parameters())
        assert not turned.training
    two, one_form = DenseInTurn(net), net.widths(2) == net.widths(3)
    assert (two.turn(2) is two.turn(3)) is one_form is True, "tasks of one form share a network"


def test_state_dicts_name_old_tasks_as_ever_and_find_them() -> None:
    net, again = learned("resnet18"), learned("resnet18")
    state = {name: value.clone() for name, value in net.state_dict().items()}
    assert {f"heads.{task}.weight" for task in range(TASKS)} <= state.keys()
    for value in again.state_dict().values():
        value.zero_()
    again.load_state_dict(state)
    assert [again.fingerprint(k) for k in range(TASKS)] == [net.fingerprint(k) for k in range(TASKS)]
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"heads\.2\.odd"'):
        again.load_state_dict(state | {"heads.2.odd": torch.zeros(1)})
    del state["heads.1.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"heads\.1\.bias"'):
        again.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch"):
        again.load_state_dict(state | {"heads.1.bias": torch.zeros(9)})


def test_types_and_copies_reach_old_tasks_and_hooks_of_others_do_not() -> None:
    net = learned("resnet18")
    before = [net.fingerprint(task) for task in range(TASKS)]
    again = pickle.loads(pickle.dumps(net))
    assert [again.fingerprint(task) for task in range(TASKS)] == before
    net.apply(lambda module: nn.init.constant_(module.weight, 3.0) if isinstance(module, nn.Linear) else None)
    assert [net.fingerprint(task) for task in range(TASKS - 1)] == before[:-1], "apply reaches the newest task alone"
    assert net.fingerprint(TASKS - 1) != before[-1]
    assert {value.dtype for value in again.double().dense(1).state_dict().values()} == {torch.float64, torch.int64}


def test_what_was_pickled_with_lists_of_modules_is_read() -> None:
    """Networks that were pickled before old tasks left the tree."""
    net = learned("resnet18")
    before = [net.fingerprint(task) for task in range(TASKS)]
    for module in [*net.modules()]:
        for name, part in list(module._modules.items()):
            if isinstance(part, PerTask):
                module._modules[name] = nn.ModuleList(part)
    again = pickle.loads(pickle.dumps(net))
    assert [again.fingerprint(task) for task in range(TASKS)] == before
    again.add_task("more", 2)
    again.drop_task()
    assert [again.fingerprint(task) for task in range(TASKS)] == before


def test_a_list_per_task_says_which_it_lacks() -> None:
    parts = PerTask([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert (len(parts), len(list(parts)), len(list(parts.children()))) == (2, 2, 1)
    assert parts[-1] is parts[1]
    with pytest.raises(IndexError, match="no task 2 of 2"):
        parts[2]
