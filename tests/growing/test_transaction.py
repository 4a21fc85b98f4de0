"""What is interrupted while a network grows or gives back leaves it as it was, to the bit, and able to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroforget.growing.layers import GrowingLayer, GrowingNorm
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import adopt


class Own(nn.Module):
    """A parameter and a buffer of its own, both of which grow."""

    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width))
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean((0, 2, 3))
        return x * self.gain[:, None, None] + self.seen[:, None, None]


X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def network() -> GrowingNetwork:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), Own(5), nn.Conv2d(5, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip
    return adopt(plain.eval(), X, task="first")


def learn(net: GrowingNetwork, task: str) -> None:
    torch.manual_seed(1)
    net.add_task(task, 2, growth=0.4)
    net.train()
    optimizer = torch.optim.SGD(net.newborn(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        net(X, task).square().sum().backward()
        optimizer.step()
    net.eval()


class Interrupted(TorchDispatchMode):
    """Ctrl-C before the n-th operator."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return func(*args, **(kwargs or {}))


def interrupted(net: GrowingNetwork, change: Callable[[GrowingNetwork], None], at: int) -> bool:
    """Whether the change has more operators than that."""
    torch.manual_seed(2)
    try:
        with Interrupted(at):
            change(net)
    except KeyboardInterrupt:
        return True
    return False


def state(net: GrowingNetwork) -> dict[str, Any]:
    live = {n: t.detach().clone() for n, t in net.state_dict().items()}
    return {
        "fingerprints": [net.fingerprint(task) for task in net.tasks],
        "parameters": [(n, p.requires_grad) for n, p in net.named_parameters()],
        "live": {n: t.tolist() for n, t in live.items()},
        "widths": net.widths(),
        "shares": net.shares,
        "tasks": net.tasks,
    }


@pytest.mark.parametrize(
    "change",
    [lambda net: net.add_task("third", 2, growth=0.3), lambda net: net.drop_task()],
    ids=["add", "drop"],
)
def test_interrupted_at_any_operator_nothing_has_happened(change: Callable[[GrowingNetwork], None]) -> None:
    net = network()
    learn(net, "second")
    before = state(net)
    at = 0
    while interrupted(net, change, at):
        assert state(net) == before, f"operator {at}"
        at += 3
    assert at > 20
    undisturbed = network()
    learn(undisturbed, "second")
    torch.manual_seed(2)
    change(undisturbed)
    assert state(net) == state(undisturbed)
    learn(net, "again")
    learn(undisturbed, "again")
    assert state(net) == state(undisturbed)


def test_a_task_for_which_memory_is_wanting_leaves_the_others_and_can_be_added_smaller() -> None:
    net = network()
    before = net.fingerprint("first")
    with pytest.raises(RuntimeError):
        net.add_task("second", 3, growth=20_000.0)
    assert net.tasks == ("first",)
    assert net.fingerprint("first") == before
    learn(net, "second")
    assert net.fingerprint("first") == before


def test_the_hooks_of_a_user_can_be_removed_after_a_task_that_failed() -> None:
    net, ran = network(), []
    layer = [m for m in net.body.modules() if isinstance(m, GrowingLayer)][-1]
    handles = [
        layer.register_forward_hook(lambda *_: ran.append("forward")),
        layer.register_forward_pre_hook(lambda *_: ran.append("before")),
        layer.register_full_backward_hook(lambda *_: ran.append("backward")),
        net.register_state_dict_post_hook(lambda *_: ran.append("state")),
    ]
    assert interrupted(net, lambda net: net.add_task("second", 2, growth=0.3), 9)
    net.train()(X, "first").sum().backward()
    net.state_dict()
    assert sorted(ran) == ["backward", "before", "forward", "state"]
    for handle in handles:
        handle.remove()
    ran.clear()
    net(X, "first").sum().backward()
    net.state_dict()
    assert ran == []


def test_a_fingerprint_sees_every_bit_and_only_those_of_its_task() -> None:
    net = network()
    first = net.fingerprint("first")
    assert len(first) == 64
    learn(net, "second")
    second = net.fingerprint("second")
    assert net.fingerprint("first") == first != second
    learn(net, "third")
    assert [net.fingerprint(task) for task in ("first", "second")] == [first, second]
    reached = [m for m in net.modules() if isinstance(m, (nn.BatchNorm2d, nn.Linear))]
    with torch.no_grad():
        layer = next(m for m in net.modules() if isinstance(m, GrowingNorm))
        norm = layer.tasks[0]
        assert norm not in reached, "net.apply(init) reaches the newest task alone"
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        norm.running_mean[0] = torch.nextafter(norm.running_mean[0], torch.tensor(9.0))
    assert net.fingerprint("first") != first
    assert net.fingerprint("second") == second
    net.half().float()
    assert net.fingerprint("second") != second
