"""The fused operator: its plain twin against autograd, the GPU's kernels against the twin, and whole networks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget import operators
from zeroforget.growing import layers
from zeroforget.growing.network import GrowingNetwork
from zeroforget.operators import quick_layers as quick
from zeroforget.operators import reference as kernels
from zeroforget.operators.fused import FusedPlan, fused
from zeroforget.operators.places import Affine, Places, positions
from zeroforget.operators.plain import Block, Geometry
from zeroforget.proving.grow import grow


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.one_of(st.integers(1, 5), st.integers(9, 17))
    out, into = draw(sizes), draw(sizes)
    new_out = torch.tensor(draw(st.lists(st.booleans(), min_size=out, max_size=out)))
    new_in = torch.tensor(draw(st.lists(st.booleans(), min_size=into, max_size=into)))
    covers = {"reused": ~new_out, "all": new_out | True, "none": new_out & False}[
        draw(st.sampled_from(["reused", "all", "none"]))
    ]
    block = Block(Places.where(new_out), Places.where(~new_out), Places.where(new_in))
    geometry = Geometry((draw(st.integers(1, 2)),) * 2, (draw(st.integers(0, 1)),) * 2, (1, 1), 1)
    return dict(
        seed=draw(st.integers(0, 999)),
        plan=FusedPlan(block, Places.where(covers), draw(st.sampled_from([None, geometry])), draw(st.booleans())),
        shape=(out, into),
        bias=draw(st.booleans()),
    )


@settings(max_examples=80, deadline=None)
@given(cases())
def test_it_computes_what_autograd_computes(case: dict[str, Any]) -> None:
    torch.manual_seed(case["seed"])
    plan: FusedPlan = case["plan"]
    (out, into), block, geometry = case["shape"], plan.block, plan.geometry
    x = leaf(3, into) if geometry is None else leaf(2, into, 5, 4)
    weight = leaf(out, into) if geometry is None else leaf(out, into, 3, 2)
    bias = leaf(out) if case["bias"] else None
    covered = len(plan.covered)
    gamma = (0.5 + torch.rand(covered, dtype=torch.float64)).requires_grad_() if covered else None
    beta = leaf(covered) if covered else None

    y = F.linear(x, weight, bias) if geometry is None else F.conv2d(x, weight, bias, geometry.stride, geometry.padding)
    if gamma is not None and beta is not None:
        shape = (-1,) if geometry is None else (-1, 1, 1)
        scale = torch.ones(out, dtype=torch.float64).index_copy(0, plan.covered.index, gamma)
        shift = torch.zeros(out, dtype=torch.float64).index_copy(0, plan.covered.index, beta)
        y = y * scale.view(shape) + shift.view(shape)
    slow = F.relu(y) if plan.relu else y
    g = torch.randn_like(slow)
    inputs = [t for t in (x, weight, bias, gamma, beta) if t is not None]
    expected = dict(zip(map(id, inputs), torch.autograd.grad(slow, inputs, g), strict=True))

    rows = block.new_out.take(weight, 0).detach().clone().requires_grad_() if len(block.new_out) else None
    corner = block.new_in.take(block.old_out.take(weight, 0), 1).detach().clone().requires_grad_()
    cols = corner if corner.numel() else None
    born = None
    stale = None if bias is None else bias.detach().clone()
    if stale is not None and bias is not None and len(block.new_out):
        born = block.new_out.take(bias, 0).detach().clone().requires_grad_()
        stale[block.new_out.index] = torch.nan  # nobody may read these
    affine = Affine(stale, born, gamma, beta, positions(block.new_out, out), positions(plan.covered, out))
    given_x = x.detach().clone()
    if geometry is not None:
        given_x = given_x.contiguous(memory_format=torch.channels_last)
    given_x.requires_grad_()
    fast = fused(given_x, rows, cols, weight.detach(), affine, plan)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    parts = [t for t in (given_x, rows, cols, born, gamma, beta) if t is not None]
    if not fast.requires_grad:
        return
    found = dict(zip(map(id, parts), torch.autograd.grad(fast, parts, g), strict=True))
    whole = expected[id(weight)]
    wanted: list[tuple[Tensor | None, Tensor | None]] = [
        (given_x, expected[id(x)]),
        (rows, block.new_out.take(whole, 0)),
        (cols, block.new_in.take(block.old_out.take(whole, 0), 1)),
        (born, None if born is None else block.new_out.take(expected[id(bias)], 0)),
        (gamma, None if gamma is None else expected[id(gamma)]),
        (beta, None if beta is None else expected[id(beta)]),
    ]
    for part, target in wanted:
        if part is not None:
            torch.testing.assert_close(found[id(part)], target, rtol=1e-11, atol=1e-11)


def network(a: int = 6, b: int = 8, c: int = 5, d: int = 7) -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, a, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(a, b, 3, bias=False), nn.ReLU()),
        nn.Conv2d(b, c, 1),
        nn.Flatten(),
        nn.Linear(c * 4, d),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(d, 6),
    ).double()


NETWORKS = [network, functools.partial(network, 23, 14, 29, 37)]
"""Few features, and odd numbers of them."""


class InPlace(nn.Module):
    """It overwrites what its layers and its pooling give it."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, wide, 3), nn.Conv2d(wide, wide + 2, 3), nn.Linear(wide + 2, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x).add_(0.1), 2)
        x = self.second(x.mul_(0.5))
        x += 1
        out: Tensor = self.last(x.relu_().mean((2, 3))).mul_(2)
        return out


def learned(fn: str, make: Callable[[], nn.Module] = network, rank: int = 0) -> GrowingNetwork:
    torch.manual_seed(0)
    net = grow(make(), torch.randn(2, 3, 8, 8, dtype=torch.float64), fn=fn, start=0.5, bridge="random")
    net.add_task("a", 3)
    net.add_task("b", 3, growth=0.3, rank=rank)
    for p in net.parameters():
        p.data += 0.1 * torch.rand_like(p)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net.train()


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("make", NETWORKS, ids=["few", "odd"])
@pytest.mark.parametrize("fn", ["reused", "all", "none"])
def test_a_network_learns_alike_with_and_without_it(
    fn: str, make: Callable[[], nn.Module], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    y = torch.tensor([0, 1, 2, 0])
    used: list[int] = []

    def always(given: Tensor, geometry: Geometry | None) -> bool:
        used.append(given.shape[1])
        return geometry is not None or given.dim() == 2

    gradients = []
    for fuse in (False, True):
        net = learned(fn, make, rank)
        with monkeypatch.context() as patch:
            if fuse:
                patch.setattr(layers, "fits", always)
                patch.setattr(quick, "fits", lambda x: x.dim() == 4)
            with quick.Quick():
                F.cross_entropy(net(x, "b"), y).backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
        out = net.eval()(x, "b")
        torch.testing.assert_close(net.dense("b")(x), out, rtol=0, atol=0)
    assert len(used) == 5
    assert all(g is not None for g in gradients[0].values())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("wide", [6, 16, 23])
@pytest.mark.parametrize("fn", ["reused", "none"])
def test_its_output_may_be_overwritten(fn: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    gradients = []
    for fuse in (False, True):
        net = learned(fn, lambda: InPlace(wide))
        with monkeypatch.context() as patch, quick.Quick():
            if fuse:
                patch.setattr(layers, "fits", lambda given, geometry: True)
                patch.setattr(quick, "fits", lambda given: given.dim() == 4)
            net(x, "b").sin().sum().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-11, atol=1e-12)


def test_a_weight_in_a_lower_precision_follows_its_newborn_parts_and_stays_where_it_is() -> None:
    net = learned("reused", NETWORKS[1]).float()
    for grown in (m.grown for m in net.modules() if isinstance(m, layers.GrowingLayer)):
        recorded = grown.synced(torch.bfloat16)
        for part in (grown.rows, grown.cols):
            if part is not None:
                part.data += 1.0
        grown.synced()  # for another step, in full precision
        assert grown.synced(torch.bfloat16) is recorded
        assert torch.equal(recorded, grown.whole().bfloat16())
        assert torch.equal(grown.synced(), grown.whole())


@pytest.mark.parametrize("channels", [2, 4, 5])
def test_inputs_of_another_size_are_refused_and_not_filled_up(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = learned("reused", NETWORKS[1])
    monkeypatch.setattr(layers, "fits", lambda given, geometry: True)
    with pytest.raises((ValueError, RuntimeError), match=f"{channels} channels|does not fit"):
        net(torch.randn(2, channels, 8, 8, dtype=torch.float64), "b")
    layer = next(m for m in net.modules() if isinstance(m, layers.GrowingLayer) and m.grown.value.dim() == 2)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
        layer(torch.randn(2, layer.in_features + 1, dtype=torch.float64))


def test_a_rectifier_runs_inside_its_layer_only_where_nothing_else_reads_it() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
            self.shared = nn.ReLU()
            self.last = nn.Sequential(nn.Conv2d(4, 4, 1), self.shared, nn.Conv2d(4, 4, 1), self.shared)
            self.whole = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for layer in self.stack:  # the loop's code may do anything in between when it trains
                x = layer(x) - 0.5 if self.training else layer(x)
                kept.append(x)
            features: Tensor = self.whole(self.last(x) + kept[2])
            return features.mean((2, 3))

    torch.manual_seed(0)
    net = grow(Reads(), torch.randn(2, 3, 4, 4))
    assert dict(net.axes.rectified) == {"whole.0": "whole.1"}
    inplace = grow(network(), torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert dict(inplace.axes.rectified) == {"0.0": "0.1", "1.0": "1.1", "4": "5"}
    assert not inplace.axes.overwritten


@pytest.mark.parametrize("geometry", [None, Geometry((1, 1), (0, 0), (1, 1), 1)])
def test_an_empty_batch_has_gradients_of_zeros(geometry: Geometry | None) -> None:
    new = torch.tensor([False, True])
    block = Block(Places.where(new), Places.where(~new), Places.where(new))
    x = leaf(0, 2) if geometry is None else leaf(0, 2, 3, 3)
    weight = torch.randn(2, 2, dtype=torch.float64) if geometry is None else torch.randn(2, 2, 1, 1).double()
    rows = block.new_out.take(weight, 0).clone().requires_grad_()
    scale, shift = leaf(1), leaf(1)
    affine = Affine(None, None, scale, shift, positions(block.new_out, 2), positions(block.old_out, 2))
    out = fused(x, rows, None, weight, affine, FusedPlan(block, block.old_out, geometry, True))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for part in (rows, scale, shift):
        assert part.grad is not None
        assert not part.grad.any()


def test_where_kernels_cannot_be_built_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "zeroforget.operators.triton_layers", raising=False)
    monkeypatch.delattr(operators, "triton_layers", raising=False)
    with pytest.warns(UserWarning, match="the plain, slower way"):
        assert not kernels.works.__wrapped__(torch.device("cpu"))
