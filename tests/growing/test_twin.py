"""Growing networks against their slow twin: values and every gradient, on random networks, births and growths."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.reference.twin import TwinLayer, backward
from zeroforget.growing.layers import FeatureNorm, GrowingLayer
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import grow

SIDE = 5


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Sequential, list[int], int, int]:
    """A random plain network, its widths, where it flattens, and how often a channel is repeated there."""
    channels = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
    hidden = draw(st.lists(st.integers(1, 4), min_size=0 if channels else 1, max_size=2))
    modules: list[nn.Module] = []
    side, width = SIDE, 2
    for out in channels:
        kernel = draw(st.sampled_from([1, 2, 3]))
        stride, padding, dilation = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 0, 1)]))
        if side + 2 * padding - dilation * (kernel - 1) < 1:
            kernel = 1
        bias = draw(st.booleans())
        modules += [nn.Conv2d(width, out, kernel, stride, padding, dilation, bias=bias), nn.ReLU()]
        side = (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        width = out
    modules.append(nn.Flatten())
    repeat = side * side
    width *= repeat
    for out in hidden:
        modules += [nn.Linear(width, out, bias=draw(st.booleans())), nn.ReLU()]
        width = out
    return nn.Sequential(*modules).double(), [*channels, *hidden], len(channels), repeat


def stir(net: GrowingNetwork) -> None:
    """Stand in for training: move everything newborn somewhere else."""
    with torch.no_grad():
        for parameter in net.newborn():
            parameter += torch.randn_like(parameter)


def layers_of(net: GrowingNetwork) -> list[GrowingLayer]:
    return [m for m in net.body.modules() if isinstance(m, GrowingLayer)]


def steps_of(layer: GrowingLayer, tasks: int, as_learned: bool) -> dict[int, tuple[Tensor, Tensor]]:
    """Rank births at full width, with zeros where features are not old; the newest one as it is learned, or as it is
    written down."""
    weight, found = layer.grown.value, {}
    outputs, inputs = layer.grown.row_births, layer.grown.col_births
    for task in range(1, tasks):
        if (birth := layer.grown.rank_birth(task)) is not None:
            learned = as_learned and birth.open
            up = birth.up.detach() if learned else birth.numbers("up")
            down = birth.down.detach() if learned else birth.numbers("down")
            wide = torch.zeros(weight.shape[0], birth.rank, dtype=torch.float64)
            wide[outputs < task] = up
            deep = torch.zeros(birth.rank, *weight.shape[1:], dtype=torch.float64)
            old = inputs < task if layer.grown.col == 1 else torch.ones(weight.shape[1], dtype=torch.bool)
            deep[:, old] = down.view(birth.rank, -1, *weight.shape[2:])
            found[task] = (wide, deep)
    return found


def twin_of(
    net: GrowingNetwork, growths: list[list[int]], flatten_at: int, repeat: int, as_learned: bool
) -> list[TwinLayer]:
    twins: list[TwinLayer] = []
    for i, layer in enumerate(layers_of(net)):
        layer.grown.sync()
        bias = None
        if layer.grown_bias is not None:
            layer.grown_bias.sync()
            bias = layer.grown_bias.value.clone()
        numbers = layer.convolution
        keys = ("stride", "padding", "dilation")
        convolution = None if numbers is None else {k: numbers[k] for k in keys}
        twin = TwinLayer(layer.grown.value.clone(), bias, convolution)
        twin.steps = steps_of(layer, len(growths), as_learned)
        if twins:
            times = repeat if i == flatten_at else 1
            twin.below = [mask.repeat_interleave(times) for mask in twins[-1].ternary]
        for task, grown in enumerate(growths):
            twin.add_task(grown[i])
            norm = layer.norms[task]
            assert isinstance(norm, FeatureNorm)
            n = layer.grown.value.shape[0]
            twin.scale[task], twin.shift[task] = torch.ones(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
            if norm.scale is not None and norm.shift is not None:
                twin.scale[task][norm.covered.index] = norm.scale.detach()
                twin.shift[task][norm.covered.index] = norm.shift.detach()
        twins.append(twin)
    return twins


def whole_gradient(layer: GrowingLayer) -> Tensor:
    """The newborn gradients at their places in the whole weight; zero elsewhere."""
    grown = layer.grown
    out = torch.zeros_like(grown.value)
    if grown.rows is not None:
        assert grown.rows.grad is not None
        out[grown.block.new_out.index] = grown.rows.grad
    if grown.cols is not None:
        assert grown.cols.grad is not None
        rows, cols = grown.block.old_out.index, grown.block.new_in.index
        out[rows[:, None], cols[None, :]] = grown.cols.grad
    return out


@settings(max_examples=60, deadline=None)
@given(st.data(), networks(), st.sampled_from(["reused", "all", "none"]), st.sampled_from(["zero", "random"]))
def test_values_and_gradients_agree_with_the_equations(
    data: st.DataObject, made: tuple[nn.Sequential, list[int], int, int], fn: str, bridge: str
) -> None:
    plain, widths, flatten_at, repeat = made
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    x = torch.randn(3, 2, SIDE, SIDE, dtype=torch.float64)
    net = grow(plain, x, fn=fn, bridge=bridge)
    names = list(net.widths())
    growths = [widths]
    net.add_task("0", 2)
    for task in range(1, data.draw(st.integers(1, 4))):
        stir(net)
        grown = [data.draw(st.integers(0, 2)) for _ in widths]
        net.add_task(str(task), 2, growth=dict(zip(names, grown, strict=True)), rank=data.draw(st.integers(0, 3)))
        growths.append(grown)
    stir(net)
    newest = len(growths) - 1

    twins = twin_of(net, growths, flatten_at, repeat, as_learned=True)
    net.train()
    fast_x, slow_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = net.body(fast_x)
    weigh = torch.randn_like(out)
    (out * weigh).sum().backward()
    expected = backward(twins, flatten_at, repeat, slow_x, newest, weigh)

    torch.testing.assert_close(out.detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fast_x.grad, slow_x.grad, rtol=1e-12, atol=1e-12)
    for layer, twin in zip(layers_of(net), twins, strict=True):
        torch.testing.assert_close(whole_gradient(layer), twin.weight.grad, rtol=1e-12, atol=1e-12)
        norm = layer.norms[-1]
        assert isinstance(norm, FeatureNorm)
        if norm.scale is not None and norm.shift is not None:
            gamma, beta = (v[newest].grad[norm.covered.index] for v in (twin.scale, twin.shift))
            torch.testing.assert_close(norm.scale.grad, gamma, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(norm.shift.grad, beta, rtol=1e-12, atol=1e-12)
        if layer.grown_bias is not None and layer.grown_bias.rows is not None:
            assert twin.bias is not None
            assert twin.bias.grad is not None
            born = twin.bias.grad[layer.grown_bias.block.new_out.index]
            torch.testing.assert_close(layer.grown_bias.rows.grad, born, rtol=1e-12, atol=1e-12)
        if (birth := layer.grown.newest_rank()) is not None:
            outputs, inputs = layer.grown.row_births, layer.grown.col_births
            by_up, by_down = (part.grad for part in twin.steps[newest])
            assert by_up is not None
            assert by_down is not None
            torch.testing.assert_close(birth.up.grad, by_up[outputs < newest], rtol=1e-12, atol=1e-12)
            old = inputs < newest if layer.grown.col == 1 else torch.ones(by_down.shape[1], dtype=torch.bool)
            torch.testing.assert_close(birth.down.grad, by_down[:, old].flatten(1), rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.data(), networks())
def test_old_tasks_compute_what_the_masked_network_does(
    data: st.DataObject, made: tuple[nn.Sequential, list[int], int, int]
) -> None:
    """dense(k) is the full-width network under the masks of task k, features that k lacks cut away."""
    plain, widths, flatten_at, repeat = made
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    x = torch.randn(2, 2, SIDE, SIDE, dtype=torch.float64)
    net = grow(plain, x)
    names = list(net.widths())
    net.add_task("0", 2)
    growths = [widths]
    for task in range(1, 4):
        stir(net)
        growths.append([data.draw(st.integers(0, 2)) for _ in widths])
        growth, rank = dict(zip(names, growths[-1], strict=True)), data.draw(st.integers(0, 3))
        net.add_task(str(task), 2, growth=growth, rank=rank)
    stir(net)
    twins = twin_of(net, growths, flatten_at, repeat, as_learned=False)
    for task in range(4):
        h = x
        for i, twin in enumerate(twins):
            if i == flatten_at:
                h = h.flatten(1)
            h = torch.relu(twin.forward(h, task))
        if flatten_at == len(twins):
            h = h.flatten(1)
            used = twins[-1].n(task).repeat_interleave(repeat).bool()
        else:
            used = twins[-1].n(task).bool()
        got = net.dense(task).get_submodule("features")(x)
        torch.testing.assert_close(got, h[:, used], rtol=1e-12, atol=1e-12)
        assert not h[:, ~used].any()
