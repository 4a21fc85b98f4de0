"""Gradients that come late: the same as autograd's, after the way back and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.methods import helpers
from tests.operators.streams import Main
from tests.operators.test_fused import NETWORKS, learned
from zeroforget.growing import layers
from zeroforget.methods import TaskSpec
from zeroforget.operators import quick_layers as quick
from zeroforget.operators import side_streams as beside
from zeroforget.operators.quick_layers import Quick
from zeroforget.operators.recorded import backward
from zeroforget.operators.side_streams import late
from zeroforget.proving.grow import grow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As while a step is recorded on a GPU, but that one thing comes after the other."""
    monkeypatch.setattr(beside, "recorded", lambda device: True)
    monkeypatch.setattr(layers, "fits", lambda x, geometry: x.dim() == (2 if geometry is None else 4))
    monkeypatch.setattr(quick, "fits", lambda x: x.dim() == 4)
    yield
    assert not beside.OPEN


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 8, 8, dtype=dtype, generator=draws)
    return x.contiguous(memory_format=torch.channels_last)


class Plain(nn.Module):
    """Layers as they come: one of them twice, one whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1), nn.Linear(6, 4)
        self.masked, self.mask = nn.Conv2d(6, 6, 1, bias=False), torch.arange(36).view(6, 6, 1, 1) % 2
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(F.relu(self.twice(F.relu(self.first(x)))))
        x = F.conv2d(x, self.masked.weight * self.mask)
        out: Tensor = self.last(x.mean((2, 3)))
        return out


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Plain().double()


def found(make: Callable[[], nn.Module], *, waits: bool, steps: int = 1) -> dict[str, Tensor | None]:
    net = make()
    for _ in range(steps):
        with Quick():
            y = net(images(), "b") if hasattr(net, "history") else net(images())
        if waits:
            with late(CPU):
                y.sin().sum().backward()
        else:
            y.sin().sum().backward()
    return {name: p.grad for name, p in net.named_parameters()}


NETS = {f"{fn}-{number}": (fn, make) for fn in ("reused", "none") for number, make in enumerate(NETWORKS)}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["plain", *NETS])
def test_they_are_those_of_autograd(name: str, steps: int) -> None:
    def make() -> nn.Module:
        return plain() if name == "plain" else learned(*NETS[name])

    expected, given = (found(make, waits=waits, steps=steps) for waits in (False, True))
    assert all(g is not None for g in expected.values())
    # Sums of several uses of one weight may be added in another order.
    torch.testing.assert_close(given, expected, rtol=1e-13, atol=1e-14)
    if name != "plain" and steps == 1:
        assert all(torch.equal(given[n], expected[n]) for n in expected)  # type: ignore[arg-type]


def test_they_are_there_after_the_block_and_lie_as_their_parameters_do() -> None:
    net = learned("reused", NETWORKS[1])
    layer = [p for n, p in net.named_parameters() if n.endswith(("grown.rows", "grown.cols"))]
    assert len(layer) > 4
    with late(CPU):
        net(images(), "b").sin().sum().backward()
        assert all(p.grad is None for p in layer)
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in layer)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_whoever_wants_to_see_a_gradient_sees_it_in_its_turn(hook: str) -> None:
    net, seen = plain(), list[Tensor | None]()
    watched = net.get_parameter("twice.weight")
    getattr(watched, hook)(lambda told: seen.append(told.grad if told is watched else told))
    with late(CPU):
        with Quick():
            y = net(images())
        y.sin().sum().backward()
        assert net.get_parameter("first.weight").grad is None
    expected = found(plain, waits=False)["twice.weight"]
    torch.testing.assert_close(seen, [expected])
    torch.testing.assert_close(watched.grad, expected)


class Blocks(nn.Module):
    """Of two blocks the second is run in a way of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.Sequential(nn.Conv2d(8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.way == "checkpoint" and self.training:
            x = checkpoint(self.second, x, use_reentrant=False, preserve_rng_state=False)
        elif self.way == "inner" and self.training and x.requires_grad:
            x = _Inner.apply(self.second, x, *self.second.parameters())  # type: ignore[no-untyped-call]
        else:
            x = self.second(x)
        return x.mean((2, 3))


class _Inner(torch.autograd.Function):
    """Keeps only its input, and asks for its gradients by name, as reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = block(x)
            return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), g)


@pytest.mark.parametrize("way", ["checkpoint", "inner", "hooks"])
def test_blocks_that_are_computed_again_get_their_gradients(way: str) -> None:
    x, gradients = images(torch.float32), []
    for waits in (False, True):
        torch.manual_seed(0)
        net = grow(Blocks(way), x, start=0.5)
        net.add_task("a", 2)
        net.add_task("b", 2, 0.25)
        net.train()
        keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with keep if way == "hooks" else nullcontext():
            y = net(x, "b")
        with late(CPU) if waits else nullcontext():
            y.sin().sum().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    assert all(g is not None for g in gradients[0].values())
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_gradient_that_was_there_stays_where_it_is() -> None:
    """Who replays a step adds to that memory again."""
    net = plain()
    weight = net.get_parameter("first.weight")
    weight.grad = torch.ones_like(weight)
    before = weight.grad
    with late(CPU):
        with Quick():
            y = net(images())
        y.sin().sum().backward()
    assert weight.grad is before
    expected = found(plain, waits=False)["first.weight"]
    assert expected is not None
    torch.testing.assert_close(weight.grad, expected + 1)


def test_linear_layers_of_lower_precision_give_theirs_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "wide_products", lambda device: True)
    monkeypatch.setattr(quick, "wide_product", lambda a, b: torch.mm(a.float(), b.float()))
    gradients = []
    for waits in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        x = torch.randn(5, 6)
        with Quick(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = net(x)
        assert "_Linear" in y.grad_fn.name()
        with late(CPU) if waits else nullcontext():
            y.float().sin().sum().backward()
            assert all((p.grad is None) == waits for p in net.parameters())
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_way_back_of_a_step_lets_them_come_late() -> None:
    method, seen = helpers.make("finetuning"), list[bool]()
    method.add_task(TaskSpec("a", 2))
    x = method.get_buffer("example")
    with Quick():
        y = method(x, 0)
    y.register_hook(lambda g: seen.append(bool(beside.OPEN)))
    backward(y.sin().sum())
    assert seen == [True]


def test_what_needs_no_gradient_gets_none() -> None:
    net = learned("reused", NETWORKS[1])
    still = next(p for n, p in net.named_parameters() if n.endswith("grown.rows"))
    still.requires_grad_(False)
    with late(CPU):
        net(images(), "b").sin().sum().backward()
    assert still.grad is None
    assert all(p.grad is not None for p in net.parameters() if p is not still)


def test_an_error_on_the_way_back_gives_nothing() -> None:
    net = plain()
    with Quick():
        y = net(images())
    net.get_parameter("first.weight").register_hook(_fail)  # the last on the way
    with pytest.raises(RuntimeError, match="out of memory"), late(CPU):
        y.sum().backward()
    assert net.get_parameter("twice.weight").grad is None


def _fail(gradient: Tensor) -> None:
    raise RuntimeError("out of memory")


def test_outside_of_a_recording_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "recorded", lambda device: False)
    net = plain()
    with late(CPU):
        with Quick():
            y = net(images())
        y.sum().backward()
        assert all(p.grad is not None for p in net.parameters())


def recorded_step(net: nn.Module) -> tuple[Main, dict[str, Tensor | None]]:
    """A step's gradients, where all that may come late does."""

    def step() -> None:
        with Quick():
            y = net(images(), "b") if hasattr(net, "history") else net(images())
        loss = y.sin().sum()
        del y
        with late(CPU):
            loss.backward()

    step()  # as before a recording: layers have had a turn
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = None
        parameter.data += 0.01 * number  # stale values would be seen
    main = Main()
    with main.recording():
        step()
    return main, {name: p.grad for name, p in net.named_parameters()}


def in_turn(net: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of the same step, one after the other."""
    for parameter in net.parameters():
        parameter.grad = None
    with Quick():
        y = net(images(), "b") if hasattr(net, "history") else net(images())
    y.sin().sum().backward()
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("name", ["plain", *NETS])
def test_nothing_is_read_before_it_is_there_or_after_it_is_gone(name: str) -> None:
    net = plain() if name == "plain" else learned(*NETS[name])
    main, found = recorded_step(net)
    assert all(way.done == len(way.todo) for way in main.ways.values())
    assert main.ways[0].todo
    # Where most is newborn it is one product for all.
    assert bool(main.ways[1].todo) == (name == "plain" or name.endswith("-0"))
    expected = in_turn(net)
    assert all(g is not None for g in expected.values())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_memory_that_is_not_kept_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside.Beside, "reads", lambda *_: None)
    with pytest.raises(AssertionError, match="freed before it was read"):
        recorded_step(learned(*NETS["reused-1"]))


def test_gradients_that_nobody_waited_for_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside.Late, "end", lambda *_: None)
    _, found = recorded_step(learned(*NETS["reused-1"]))
    assert any(g is not None and g.isnan().any() for g in found.values())
