"""Nothing learned earlier changes by one bit, whatever trains what comes after."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.growing.helpers import NETS, growing, optimizer, train
from zeroforget.growing.layers import GrowingLayer, GrowingNorm
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.tensors import GrowingTensor
from zeroforget.nets import build
from zeroforget.proving.grow import grow

REGIMES = {"sgd": ("sgd", False), "adamw": ("adamw", False), "bf16": ("sgd", True)}


def outputs(net: GrowingNetwork, x: Tensor, task: int, bf16: bool) -> Tensor:
    """A task's logits, seen to be the same through `forward` and `dense`."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        forward, dense = net(x, task), net.dense(task)(x)
    assert forward.isfinite().all()
    assert torch.equal(forward, dense)
    return forward


QUICK = {("alexnet", "adamw"), ("vgg16-tiny", "bf16"), ("resnet18", "sgd")}
"""Of each large network one regime; the others take long and are for the campaigns."""
EVERY = [
    pytest.param(name, regime, marks=() if name == "lenet" or (name, regime) in QUICK else pytest.mark.soak)
    for name in ("lenet", "alexnet", "vgg16-tiny", "resnet18")
    for regime in REGIMES
]


@pytest.mark.parametrize(("name", "regime"), EVERY)
def test_logits_stay_bit_equal_through_five_more_tasks(name: str, regime: str) -> None:
    kind, bf16 = REGIMES[regime]
    net, x = growing(name)
    net.add_task("0", 3)
    train(net, x, kind=kind, bf16=bf16)
    seen = [outputs(net, x, 0, bf16)]
    for task in range(1, 6):
        net.add_task(str(task), 2 + task, growth=0.1 if task != 3 else 0.0)
        assert torch.equal(outputs(net, x, task - 1, bf16), seen[-1])  # growing alone changes nothing
        train(net, x, kind=kind, bf16=bf16)
        seen.append(outputs(net, x, task, bf16))
        for k, before in enumerate(seen):
            assert torch.equal(outputs(net, x, k, bf16), before), f"task {k} changed while {task} was learned"
    assert len({tuple(s.shape) for s in seen}) > 1

    fresh, _ = growing(name)
    for record in net.history:
        fresh.add_task(record.name, record.classes, record.growth)
    fresh.load_state_dict(net.state_dict())
    fresh.eval()
    for k, before in enumerate(seen):
        assert torch.equal(outputs(fresh, x, k, bf16), before), f"task {k} changed by saving and loading"


def frozen_tensors(net: GrowingNetwork) -> dict[str, Tensor]:
    """Every value that belongs to a task before the newest, by name."""
    newest = len(net.history) - 1
    found: dict[str, Tensor] = {}
    for path, module in net.named_modules():
        if isinstance(module, GrowingTensor):
            found[path] = module.at(newest - 1)
        elif isinstance(module, GrowingLayer):
            for k in range(newest):
                found |= {f"{path}.norms.{k}.{n}": b.clone() for n, b in module.norms[k].named_buffers()}
        elif isinstance(module, GrowingNorm):
            for k in range(newest):
                found |= {f"{path}.tasks.{k}.{n}": b.clone() for n, b in module.tasks[k].named_buffers()}
    for k in range(newest):
        found |= {f"heads.{k}.{n}": b.clone() for n, b in net.heads[k].named_buffers()}
    return found


@pytest.mark.parametrize("name", ["lenet", "resnet18"])
def test_no_tensor_born_earlier_moves_under_hard_training(name: str) -> None:
    net, x = growing(name)
    for task in range(3):
        net.add_task(str(task), 3, growth=None if task == 0 else 0.2)
        if task:
            before = frozen_tensors(net)
            moving = {n: p.detach().clone() for n, p in net.named_parameters()}
            steps = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
            net.train()
            for _ in range(5):
                steps.zero_grad()
                torch.nn.functional.cross_entropy(net(x, task), torch.randint(3, (6,))).backward()
                steps.step()
            after = frozen_tensors(net)
            assert all(p.isfinite().all() for p in net.parameters())
            assert before.keys() == after.keys()
            assert len(before) >= 10
            for key, value in before.items():
                assert torch.equal(value, after[key]), key
            for key, parameter in net.named_parameters():
                assert not torch.equal(parameter, moving[key]), f"{key} is newborn but never moved"


def test_an_optimizer_that_is_kept_reaches_nothing_once_its_task_is_over() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 2, 5, 5)
    plain = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 8))
    net = grow(plain, x, start=0.5, fn="all")
    seen: list[Tensor] = []
    kept: list[torch.optim.Optimizer] = []
    for task in range(3):
        net.add_task(str(task), 3, growth=0.1 if task else None)
        kept.append(optimizer("adamw", net))
        net.train()(x, task).square().sum().backward()
        kept[-1].step()
        seen.append(net.eval()(x, task))
        for old in kept[:-1]:
            old.step()
        assert all(torch.equal(net.dense(k)(x), before) for k, before in enumerate(seen))
    net.drop_task()
    for old in kept:
        old.step()
    assert all(torch.equal(net.dense(k)(x), before) for k, before in enumerate(seen[:-1]))


def test_gradients_and_optimizer_hold_less_than_an_eighth_of_the_network() -> None:
    """From 95 % to 100 % of the features, plain SGD: under 12 % as many elements as the network has."""
    shape = (3, 32, 32)
    plain = build("vgg16-tiny", shape, width=0.25)
    x = torch.randn(2, *shape)
    net = grow(plain, x, start=0.95)
    net.add_task("0", 10)
    net.add_task("1", 10, growth=0.05)
    whole = sum(p.numel() for p in plain.parameters())
    assert net.widths() == dict(net.axes.sizes)
    steps = torch.optim.SGD(net.parameters(), lr=0.05)
    net.train()
    net(x, "1").sum().backward()
    steps.step()
    gradients = sum(p.grad.numel() for p in net.parameters() if p.grad is not None)
    state = sum(v.numel() for s in steps.state.values() for v in s.values() if isinstance(v, Tensor))
    assert gradients > 0
    assert all(p.grad is not None for p in net.parameters())
    assert gradients + state < 0.12 * whole
    assert all(b.grad is None for b in net.buffers())


@pytest.mark.parametrize("name", NETS)
def test_growing_starts_as_the_network_before(name: str) -> None:
    """With the zero bridge the old features of the wider network compute what they did (in float64, to rounding)."""
    net, x = growing(name)
    net, x = net.double(), x.double()
    net.add_task("0", 3)
    net.eval()
    old = net.dense("0").get_submodule("features")(x)
    net.add_task("1", 3, growth=0.25)
    new = net.dense("1").get_submodule("features")(x)
    width = old.shape[1]
    assert new.shape[1] > width
    torch.testing.assert_close(new[:, :width], old, rtol=1e-9, atol=1e-12)
    assert new[:, width:].abs().sum() > 0

    random, _ = growing(name, bridge="random")
    random = random.double()
    random.add_task("0", 3)
    random.add_task("1", 3, growth=0.25)
    other = random.dense("1").get_submodule("features")(x)
    assert not torch.allclose(other[:, :width], old, rtol=1e-3)


def test_dropping_a_task_takes_back_everything() -> None:
    net, x = growing("resnet18")
    for task in range(3):
        net.add_task(str(task), 2 + task, growth=None if task == 0 else 0.1)
        train(net, x)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    seen = [net(x, k) for k in range(3)]
    net.add_task("3", 4, growth=0.2)
    train(net, x)
    net.drop_task()
    after = net.state_dict()
    assert state.keys() == after.keys()
    for key, value in state.items():
        assert torch.equal(value, after[key]), key
    assert all(torch.equal(net(x, k), s) for k, s in enumerate(seen))
    net.add_task("again", 2, growth=0.1)
    train(net, x)
    assert all(torch.equal(net(x, k), s) for k, s in enumerate(seen))


def test_a_copy_learns_on_its_own() -> None:
    net, x = growing("lenet")
    net.add_task("0", 3)
    train(net, x)
    seen = net(x, 0)
    other = copy.deepcopy(net)
    train(other, x)
    assert torch.equal(net(x, 0), seen)
    assert not torch.equal(other(x, 0), seen)


def test_dense_networks_are_plain_and_stand_alone() -> None:
    net, x = growing("lenet")
    net.add_task("0", 3)
    net.add_task("1", 3, growth=0.1)
    train(net, x)
    dense = net.dense("1")
    ours = [m for m in dense.modules() if type(m).__module__.startswith(("zeroforget.growing", "zeroforget.operators"))]
    assert not ours
    assert not dense.training
    assert not any(p.requires_grad for p in dense.parameters())
    assert all(p.is_contiguous() for p in dense.parameters())
    before = dense(x)
    train(net, x)
    assert torch.equal(dense(x), before)
    assert not torch.equal(net.dense("1")(x), before)
    for module in dense.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        if isinstance(module, torch.nn.Conv2d):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels)
