"""What layers keep from step to step in a lower precision never stands in for values that are gone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.growing.helpers import train
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import grow

IMAGES = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(0))


def learned(*, bf16: bool = True) -> GrowingNetwork:
    """Two tasks, a convolution that folds its normalization in and linear layers that do not."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(54, 8), nn.ReLU(), nn.Linear(8, 6))
    net = grow(plain, IMAGES, start=0.5)
    net.add_task("a", 3)
    train(net, IMAGES, bf16=bf16)
    net.add_task("b", 3, 0.25)
    train(net, IMAGES, bf16=bf16)
    return net


def low(net: GrowingNetwork, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The newest task as it learns, in a lower precision."""
    with torch.autocast("cpu", dtype=dtype):
        return net.train()(IMAGES, len(net.history) - 1)


def load_twice_as_large(net: GrowingNetwork) -> None:
    net.load_state_dict({k: v if k.endswith(".fresh") else v * 2 for k, v in net.state_dict().items()})


def step(net: GrowingNetwork) -> None:
    """One that no forward has seen."""
    with torch.no_grad():
        for parameter in net.newborn():
            parameter += 0.1


def try_a_task(net: GrowingNetwork) -> None:
    """One of the same width, learned and taken back."""
    net.add_task("c", 3)
    step(net)
    low(net)
    net.drop_task()


CHANGES: dict[str, Callable[[GrowingNetwork], object]] = {
    "a step": step,
    "a state": load_twice_as_large,
    "values rounded in between": lambda net: net.bfloat16().float(),
    "a task": lambda net: net.add_task("c", 3, 0.25),
    "a task without growth": lambda net: net.add_task("c", 3),
    "a task tried": try_a_task,
    "a task less": lambda net: net.drop_task(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_a_step_computes_what_a_copy_does(change: str, dtype: torch.dtype) -> None:
    net = learned()
    before = low(net, dtype)
    step(net)
    CHANGES[change](net)
    other = copy.deepcopy(net)  # which keeps nothing of earlier steps
    after = low(net, dtype)
    assert not torch.equal(after, before)
    assert torch.equal(after, low(other, dtype))


def test_each_precision_has_weights_of_its_own() -> None:
    net = learned()
    other = copy.deepcopy(net)
    rough = low(net)
    fine = low(net, torch.float16)
    assert fine.dtype == torch.float16
    assert torch.equal(fine, low(other, torch.float16))
    assert torch.equal(low(net), rough)


def test_a_lower_precision_seen_first_in_inference_mode_still_learns() -> None:
    net = learned(bf16=False)
    with torch.inference_mode():
        expected = low(net).clone()
    out = low(net)
    assert torch.equal(out, expected)
    out.float().square().sum().backward()
    assert all(p.grad is not None for p in net.newborn())
    train(net, IMAGES, bf16=True)


def test_a_saved_network_holds_its_weights_once() -> None:
    net = learned(bf16=False).train()
    sizes = []
    for _ in range(2):
        file = io.BytesIO()
        torch.save(net, file)
        sizes.append(len(file.getvalue()))
        low(net)
        net.eval()(IMAGES, "a")
        net.train()
    assert sizes[0] == sizes[1]


def test_double_precision_stays() -> None:
    net = learned().double().train()
    exact = net(IMAGES.double(), "b")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(net(IMAGES.double(), "b"), exact)
