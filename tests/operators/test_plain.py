"""Block-wise gradients against autograd over the whole weight, for every geometry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroforget.growing.layers import GrowingLayer
from zeroforget.operators import plain as ops
from zeroforget.operators.places import Places
from zeroforget.operators.plain import (
    Block,
    Geometry,
    Scaling,
    _scale_gradients,
    grown,
    weight_gradient,
)
from zeroforget.proving.grow import grow


def places(draw: st.DrawFn, size: int) -> tuple[Tensor, Tensor]:
    new = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    return new, ~new


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    out, into = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    new_out, old_out = places(draw, out)
    new_in, _ = places(draw, into // groups)
    one = st.integers(1, 2)
    geometry = Geometry(
        tuple(draw(one) for _ in range(dims)),
        tuple(draw(st.integers(0, 2)) for _ in range(dims)),
        tuple(draw(one) for _ in range(dims)),
        groups,
    )
    kernel = [draw(st.integers(1, 3)) for _ in range(dims)]
    return dict(
        seed=draw(st.integers(0, 999)),
        x=(2, into, *[6 + draw(one) for _ in range(dims)]),
        weight=(out, into // groups, *kernel),
        bias=draw(st.booleans()),
        block=Block(Places.where(new_out), Places.where(old_out), Places.where(new_in)),
        geometry=geometry,
    )


def check(case: dict[str, Any], linear: bool) -> None:
    torch.manual_seed(case["seed"])
    shape = case["weight"][:2] if linear else case["weight"]
    weight = torch.randn(shape, dtype=torch.float64)
    bias = torch.randn(shape[0], dtype=torch.float64) if case["bias"] else None
    x_shape = (2, 3, shape[1]) if linear else case["x"]
    x = torch.randn(x_shape, dtype=torch.float64)
    block: Block = case["block"]
    rows = block.new_out.take(weight, 0).clone().requires_grad_() if len(block.new_out) else None
    cols = block.new_in.take(block.old_out.take(weight, 0), 1).clone().requires_grad_()
    cols = cols if cols.numel() else None
    shift = block.new_out.take(bias, 0).clone().requires_grad_() if bias is not None and len(block.new_out) else None

    fast_x = x.clone().requires_grad_()
    out = grown(fast_x, (rows, cols, shift), weight, bias, block, None if linear else case["geometry"])
    g = torch.randn_like(out)
    out.backward(g)

    slow_x, slow_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    slow_b = None if bias is None else bias.clone().requires_grad_()
    if linear:
        slow = nn.functional.linear(slow_x, slow_w, slow_b)
    else:
        n = case["geometry"]
        zero = [0] * len(n.stride)
        slow = torch.convolution(slow_x, slow_w, slow_b, n.stride, n.padding, n.dilation, False, zero, n.groups)
    slow.backward(g)

    close = dict(rtol=1e-12, atol=1e-12)
    assert slow_w.grad is not None
    torch.testing.assert_close(out, slow, **close)
    torch.testing.assert_close(fast_x.grad, slow_x.grad, **close)
    if rows is not None:
        torch.testing.assert_close(rows.grad, slow_w.grad[block.new_out.index], **close)
    if cols is not None:
        expected = slow_w.grad[block.old_out.index][:, block.new_in.index]
        torch.testing.assert_close(cols.grad, expected, **close)
    if shift is not None:
        assert slow_b is not None
        assert slow_b.grad is not None
        torch.testing.assert_close(shift.grad, slow_b.grad[block.new_out.index], **close)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_convolution_gradients_are_those_of_the_whole(case: dict[str, Any]) -> None:
    check(case, linear=False)


@pytest.mark.parametrize(
    ("new_out", "new_in"),
    [([0, 0, 0, 1], [0, 0]), ([0, 0, 1, 0], [0, 0]), ([0, 0, 1, 1], [0, 0]), ([0, 0, 0, 0], [0, 1])],
    ids=["half a group", "half a group inside", "a group", "inputs alone"],
)
def test_newborn_parts_of_groups(new_out: list[int], new_in: list[int]) -> None:
    out, into = torch.tensor(new_out) > 0, torch.tensor(new_in) > 0
    block = Block(Places.where(out), Places.where(~out), Places.where(into))
    geometry = Geometry((1,), (0,), (1,), 2)
    check(dict(seed=0, x=(2, 4, 6), weight=(4, 2, 3), bias=True, block=block, geometry=geometry), linear=False)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_linear_gradients_are_those_of_the_whole(case: dict[str, Any]) -> None:
    if case["geometry"].groups == 1:
        check(case, linear=True)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(2, 6, 3, padding="same"),
        lambda: nn.Conv2d(2, 6, (2, 3), padding="same", dilation=2),
        lambda: nn.Conv2d(2, 6, 3, padding="valid"),
        lambda: nn.Conv2d(2, 6, 3, padding=1, padding_mode="reflect"),
        lambda: nn.Conv2d(2, 6, 3, padding=(2, 1), padding_mode="circular"),
        lambda: nn.Conv2d(2, 6, 3, groups=2),
    ],
)
def test_every_padding_runs_as_the_plain_layer(layer: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(layer(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    keep = ["0"] if plain[0].groups > 1 else []
    net = grow(plain, x, keep=keep)
    net.add_task("0", 2)
    net.train()
    torch.testing.assert_close(net.body(x), plain(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.dense(0).get_submodule("features")(x), plain(x), rtol=1e-12, atol=1e-12)


class Shapes(TorchDispatchMode):
    """Notes the shape of everything that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.seen.append(tuple(tensor.shape))
        return out


@pytest.mark.parametrize("first", [lambda: nn.Conv2d(3, 23, 5), lambda: nn.Conv2d(3, 23, 5, bias=False)])
def test_backward_never_makes_a_gradient_for_frozen_weights(first: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(first(), nn.ReLU(), nn.Conv2d(23, 29, 3), nn.ReLU(), nn.Flatten(), nn.Linear(116, 31))
    x = torch.randn(2, 3, 8, 8)
    net = grow(plain, x)
    net.add_task("0", 2)
    net.add_task("1", 2, growth=dict.fromkeys(net.widths(), 2))
    net.train()
    loss = net(x, "1").sum()
    with Shapes() as shapes:
        loss.backward()
    layers = [m for m in net.body.modules() if isinstance(m, GrowingLayer)]
    whole = {tuple(layer.grown.value.shape) for layer in layers}
    frozen = {(23, 3, 5, 5), (29, 23, 3, 3), (31, 116)}
    assert shapes.seen
    assert not (whole | frozen) & set(shapes.seen)
    assert {tuple(p.shape) for layer in layers for p in layer.grown.parameters()} <= set(shapes.seen)


def test_a_step_between_forward_and_backward_is_noticed() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
    net = grow(plain, torch.randn(2, 3))
    net.add_task("0", 2)
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(2, 3), 0).sum().backward()
    loss = net(torch.randn(2, 3), 0).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_forwards_before_a_backward_add_up() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    net = grow(plain, x)
    net.add_task("0", 2)
    net.add_task("1", 2, growth={"0": 2, "2": 1})
    net.train()
    net(x, 1).sum().backward()
    once = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    (net(x[:2], 1).sum() + net(x[2:], 1).sum()).backward()
    twice = [p.grad for p in net.parameters() if p.grad is not None]
    assert len(once) == len(twice) == len(list(net.parameters()))
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plain", [nn.Linear(40, 32), nn.Conv2d(3, 16, 3)], ids=["linear", "convolution"])
def test_bf16_gradients_are_within_a_hundredth_of_float64(plain: nn.Module) -> None:
    torch.manual_seed(0)
    tail = [] if isinstance(plain, nn.Linear) else [nn.Flatten()]
    x = torch.randn(64, 40) if isinstance(plain, nn.Linear) else torch.randn(64, 3, 8, 8)
    net = grow(nn.Sequential(plain, *tail), x)
    net.add_task("0", 4)
    net.add_task("1", 4, growth=dict.fromkeys(net.widths(), 8))
    net.train()
    weigh = torch.randn_like(net.body(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net.body(x)
    (out * weigh).sum().backward()
    rough = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    exact = net.double()
    exact.zero_grad()
    (exact.body(x.double()) * weigh.double()).sum().backward()
    compared = 0
    for name, parameter in exact.named_parameters():
        if parameter.grad is not None:
            assert float((parameter.grad - rough[name]).norm()) <= 1e-2 * float(parameter.grad.norm())
            compared += 1
    assert compared >= 4


def test_on_a_cpu_without_bf16_images_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "cpu_has_bf16", lambda: False)
    torch.manual_seed(0)
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)
    given = torch.randn(64, 16, 8, 8), torch.randn(64, 3, 8, 8), torch.randn(16, 3, 3, 3)
    g, x, weight = (tensor.bfloat16() for tensor in given)
    exact = weight_gradient(g.double(), x.double(), weight.double(), geometry)
    found = weight_gradient(g, x, weight, geometry)
    assert found.dtype == torch.float32
    assert float((found - exact).norm()) < 1e-5 * float(exact.norm())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_gradients_of_shortcuts_are_right_channels_last_too(data: st.DataObject) -> None:
    """With few inputs the library's are wrong then, and it writes beside its memory: the program hangs or ends."""
    dims, one = data.draw(st.sampled_from([1, 2, 2, 2, 3])), st.integers(1, 3)
    stride = (data.draw(st.integers(2, 3)), *[data.draw(one) for _ in range(dims - 1)])
    padding = tuple(data.draw(st.integers(0, 2)) for _ in range(dims))
    geometry = Geometry(stride, padding, (1,) * dims, 1)
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    weight = torch.randn(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5)), *[1] * dims, generator=draws)
    x = torch.randn(2, weight.shape[1], *[data.draw(st.integers(1, 7)) for _ in range(dims)], generator=draws)
    exact = weight.double().requires_grad_()
    out = ops.apply(x.double(), exact, None, geometry)
    g = torch.randn(out.shape, generator=draws)
    out.backward(g.double())
    layout = torch.channels_last if dims == 2 and data.draw(st.booleans()) else torch.preserve_format
    found = weight_gradient(*(t.clone(memory_format=layout) for t in (g, x, weight)), geometry)  # type: ignore[call-arg]
    torch.testing.assert_close(found.double(), exact.grad, rtol=1e-4, atol=1e-4)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_gradients_of_scale_and_shift_are_the_sums_they_should_be(data: st.DataObject) -> None:
    """Of any shape, layout and precision, and of no images at all."""
    dims = data.draw(st.integers(0, 3))
    shape = (data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4)), *[data.draw(st.integers(1, 3))] * dims)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    y, g = (torch.randn(shape, generator=draws).to(dtype) for _ in range(2))
    if data.draw(st.booleans()):
        g = g.transpose(0, -1).contiguous().transpose(0, -1)
    kept = torch.promote_types(dtype, torch.float32)
    scale = 0.5 + torch.rand(shape[1], generator=draws).to(kept)
    shift = torch.randn(shape[1], generator=draws).to(kept)
    channels = [1, -1, *[1] * dims]
    out = (y.to(kept) * scale.view(channels) + shift.view(channels)).to(dtype)
    scaling = Scaling(scale, shift, Places(torch.arange(shape[1]), 0), torch.empty(0))
    by_scale, total = _scale_gradients(g, out, scaling, 1)
    rest = [d for d in range(len(shape)) if d != 1]
    near = dict(atol=0.3, rtol=0.1) if dtype == torch.bfloat16 else dict(atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(by_scale.double(), (g.double() * y.double()).sum(rest), **near)
    torch.testing.assert_close(total.double(), g.double().sum(rest), **near)


@pytest.mark.parametrize(("kernel", "height", "channels"), [(31, 16, 1), (33, 17, 2), (65, 16, 3)])
def test_gradients_of_kernels_that_reach_across_a_whole_image_are_right(
    kernel: int, height: int, channels: int
) -> None:
    """The library's own ends the process, or is wrong (torch 2.13)."""
    torch.manual_seed(0)
    geometry = Geometry((1, 1), (kernel // 2, 0), (1, 1), 1)
    x, g = torch.randn(2, channels, height, 8), torch.randn(2, channels, height, 8)
    like = torch.randn(channels, channels, kernel, 1)
    rows = torch.zeros(2, channels, height + 2 * (kernel // 2), 8, dtype=torch.float64)
    rows[:, :, kernel // 2 : kernel // 2 + height] = x
    wanted = torch.einsum("bchwk,bohw->ock", rows.unfold(2, kernel, 1), g.double())
    torch.testing.assert_close(weight_gradient(g, x, like, geometry).squeeze(3).double(), wanted, rtol=1e-4, atol=1e-4)
