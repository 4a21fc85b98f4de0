"""Steps of methods by the GPU's passes over weights against steps without: under Triton's interpreter, see
`tests/operators/test_interpreted.py`, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeroforget.methods import Method
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.ewc import Ewc
from zeroforget.methods.hat import Hat
from zeroforget.operators import passes
from zeroforget.operators import reference as kernels


def compare_methods(device: str = "cpu") -> None:
    """HAT's restraint and EWC's pull in a second task: every gradient, all large weights by the kernels."""
    for make in (_hat, _ewc):
        slow, fast = (_gradients(make(device), device, by_kernels) for by_kernels in (False, True))
        for name, wanted in slow.items():
            torch.testing.assert_close(fast[name], wanted, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 40), nn.ReLU(),
    )  # fmt: skip


def _second(method: Method, device: str) -> None:
    for name in "ab":
        method.add_task(TaskSpec(name, 3))
    method.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def _hat(device: str) -> Method:
    method = Hat(_net(), torch.randn(2, 3, 8, 8), clip=0.5)
    _second(method, device)
    with torch.no_grad():
        method.embeddings[0] *= 0.003  # gates between 0.1 and 0.9
    method.hold()
    method.before_step(0.5)
    method._decay = 0.1
    return method


def _ewc(device: str) -> Method:
    method = Ewc(_net(), torch.randn(2, 3, 8, 8), strength=2.0)
    _second(method, device)
    for name, weight in method.weights().items():
        method.importance[name].copy_(torch.rand_like(weight))
        method.anchor[name].add_(0.1)
    return method


def _gradients(method: Method, device: str, by_kernels: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    x = torch.randn(6, 3, 8, 8).to(device).contiguous(memory_format=torch.channels_last)
    quick, plain = list[bool](), passes.on_gpu

    def on_gpu(*tensors: Tensor) -> bool:
        quick.append(plain(*tensors))
        return quick[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on_gpu", lambda t: by_kernels)
        patch.setattr(passes, "on_gpu", on_gpu)
        patch.setattr(passes, "LARGE", 300)
        method.train().loss(x, torch.tensor([0, 1, 2, 0, 1, 2], device=device), 1).backward()
        method.after_backward()
    assert quick
    assert all(quick) == any(quick) == by_kernels
    return {name: p.grad for name, p in method.named_parameters()}
