"""Gradients that come late: the same as autograd's, after the way back and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.core.streams import Main
from tests.core.test_fused import NETWORKS, learned
from zeroforget.core import beside, layers, quick
from zeroforget.core.beside import late
from zeroforget.core.quick import Quick

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As while a step is recorded on a GPU, but that one thing comes after the other."""
    monkeypatch.setattr(beside, "recorded", lambda device: True)
    monkeypatch.setattr(layers, "fits", lambda x, geometry: x.dim() == (2 if geometry is None else 4))
    monkeypatch.setattr(quick, "fits", lambda x: x.dim() == 4)
    yield
    assert not beside._OPEN


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
    net, seen = plain(), []
    watched = net.get_parameter("twice.weight")
    getattr(watched, hook)(seen.append)
    with late(CPU):
        with Quick():
            y = net(images())
        y.sin().sum().backward()
        assert len(seen) == 1
        assert net.get_parameter("first.weight").grad is None
    torch.testing.assert_close(watched.grad, found(plain, waits=False)["twice.weight"])


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
    assert bool(main.ways[1].todo) == (not name.endswith("-1"))  # there, most is newborn: one product for all
    expected = in_turn(net)
    assert all(g is not None for g in expected.values())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_memory_that_is_not_kept_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside.Beside, "reads", lambda *_: None)
    with pytest.raises(AssertionError, match="freed before it was read"):
        recorded_step(learned(*NETS["reused-1"]))


def test_gradients_that_nobody_waited_for_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside._Late, "end", lambda *_: None)
    _, found = recorded_step(learned(*NETS["reused-1"]))
    assert any(g is not None and g.isnan().any() for g in found.values())


def test_parameters_that_nobody_waited_for_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside.Done, "wait", lambda *_: None)
    net = learned(*NETS["reused-1"])
    _, found = recorded_step(net)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, in_turn(net), rtol=1e-6, atol=1e-7)
