"""Quick operators against the library's."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.operators.kernel_twins import rectified
from zeroforget.nets import build
from zeroforget.operators import quick_layers as quick
from zeroforget.operators.quick_layers import Quick


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """As if every device had the kernels: on a CPU their twins run. Returns the inputs that came by."""
    seen: list[torch.Size] = []

    def fits(x: Tensor) -> bool:
        seen.append(x.shape)
        return x.dim() == 4

    monkeypatch.setattr(quick, "fits", fits)
    return seen


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_computes_what_autograd_computes(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 999)))
    groups = data.draw(st.sampled_from([1, 2]))
    into, out = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 3))
    x = torch.randn(2, into, 6, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    inputs = [x, torch.randn(out, into // groups, 3, 2, dtype=torch.float64), torch.randn(out, dtype=torch.float64)]
    inputs = inputs[: data.draw(st.integers(2, 3))]  # with a bias or without
    wanted = [data.draw(st.booleans()) for _ in inputs]
    wanted[data.draw(st.integers(0, len(inputs) - 1))] = True
    for tensor, want in zip(inputs, wanted, strict=True):
        tensor.requires_grad_(want)
    pair = st.one_of(st.integers(1, 2), st.tuples(st.integers(1, 2), st.integers(1, 2)))
    numbers = dict(stride=data.draw(pair), padding=data.draw(pair), dilation=data.draw(pair), groups=groups)
    y = F.conv2d(*inputs, **numbers)
    g = torch.randn_like(y)
    asked = [t for t, want in zip(inputs, wanted, strict=True) if want]
    expected = torch.autograd.grad(y, asked, g)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "fits", lambda x: True)
        with Quick():
            ours = F.conv2d(*inputs, **numbers)
    assert ours.grad_fn is not None
    assert "Convolved" in ours.grad_fn.name()
    torch.testing.assert_close(ours, y)
    torch.testing.assert_close(torch.autograd.grad(ours, asked, g), expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_batch_normalization_is_that_of_torch(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 999)))
    count, channels, height, width = (data.draw(st.integers(low, 4)) for low in (2, 1, 1, 1))
    relu, tracked = data.draw(st.booleans()), data.draw(st.booleans())
    layer = nn.BatchNorm2d(channels, momentum=data.draw(st.sampled_from([0.0, 0.1, 1.0])), track_running_stats=tracked)
    net = nn.Sequential(layer, nn.ReLU(data.draw(st.booleans()))) if relu else nn.Sequential(layer)
    net.double().train()
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    twin = copy.deepcopy(net)
    x = (7 + torch.randn(count, channels, height, width, dtype=torch.float64)).requires_grad_()
    asked = [t for t in (x, *net.parameters()) if data.draw(st.booleans())] or [x]
    for tensor in (x, *net.parameters()):
        tensor.requires_grad_(any(tensor is one for one in asked))
    y = net(x)
    g = torch.randn_like(y)
    expected = torch.autograd.grad(y, asked, g)
    own = [x if one is x else dict(twin.named_parameters())[name] for one in asked for name in _name_of(net, one)]
    for tensor in twin.parameters():
        tensor.requires_grad_(any(tensor is one for one in own))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "fits", lambda x: True)
        with Quick(rectified(twin, x.detach())):
            ours = twin(x)
    assert "Standardized" in ours.grad_fn.name()
    torch.testing.assert_close(ours, y)
    torch.testing.assert_close(torch.autograd.grad(ours, own, g), expected)
    torch.testing.assert_close(dict(twin.named_buffers()), dict(net.named_buffers()))


def _name_of(net: nn.Module, one: Tensor) -> list[str]:
    return [name for name, p in net.named_parameters() if p is one] or [""]


def test_other_batch_normalization_is_left_alone(everywhere: list[torch.Size]) -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    with Quick():
        others = [nn.BatchNorm2d(3).eval()(x), nn.BatchNorm2d(3, affine=False)(x), nn.BatchNorm2d(3)(x.bfloat16())]
        others += [nn.BatchNorm1d(3)(x[..., 0]), nn.InstanceNorm2d(3, affine=True)(x)]
        caught = [nn.BatchNorm2d(3)(x), nn.BatchNorm2d(3, momentum=None)(x)]
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            nn.BatchNorm2d(3)(x[:1, :, :1, :1])
        half, strided = x.half(), torch.ones(3, 2)[:, 0]
        others += [F.batch_norm(x, torch.zeros(3), torch.ones(3), strided, torch.zeros(3), True)]
        others += [F.batch_norm(half, None, None, torch.ones(3).half(), torch.zeros(3).half(), True)]
    left = [t for number, t in enumerate(others) if number != 2]
    assert not any("Standardized" in t.grad_fn.name() for t in left)
    assert all("Standardized" in t.grad_fn.name() for t in (*caught, others[2]))


@pytest.mark.parametrize(
    ("channels", "options", "error"),
    [
        (4, {}, RuntimeError),
        (2, {}, RuntimeError),
        (1, {}, RuntimeError),
        (3, {"eps": -1.0}, (ValueError, RuntimeError)),
    ],
)
def test_batch_normalization_that_does_not_fit_is_refused_as_always(
    channels: int, options: dict[str, Any], error: Any, everywhere: list[torch.Size]
) -> None:
    layer, x = nn.BatchNorm2d(channels, **options), torch.randn(2, 3, 4, 4)
    with Quick(), pytest.raises(error):
        layer(x)
    with Quick(), pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        nn.BatchNorm2d(3)(torch.ones(2, 3, 4, 4, dtype=torch.int64))


def test_statistics_are_tracked_as_exactly_as_by_torch(everywhere: list[torch.Size]) -> None:
    x = torch.randn(2, 3, 4, 4)
    for momentum, before in ((1.0, 1e9), (0.1, math.inf)):
        found = []
        for context in (nullcontext(), Quick()):
            mean, var = torch.full((3,), min(before, 1e9)), torch.full((3,), before)
            with context:
                F.batch_norm(x, mean, var, torch.ones(3), torch.zeros(3), True, momentum)
            found.append([mean, var])
        torch.testing.assert_close(found[1], found[0])


def test_a_bias_that_is_not_needed_on_the_way_back_may_be_changed(everywhere: list[torch.Size]) -> None:
    layer, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4, requires_grad=True)
    with Quick():
        y = layer(x)
    with torch.no_grad():
        layer.bias.add_(1)
    y.square().sum().backward()
    assert x.grad is not None


def test_batch_normalization_that_is_computed_again_is_left_alone(everywhere: list[torch.Size]) -> None:
    layer, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4, requires_grad=True)
    with Quick():
        y = checkpoint(layer, x, use_reentrant=False)
    assert not everywhere
    y.square().sum().backward()


def test_what_is_normalized_may_be_overwritten(everywhere: list[torch.Size]) -> None:
    x, layer = torch.randn(2, 3, 4, 4, requires_grad=True), nn.BatchNorm2d(3)
    wanted = torch.autograd.grad(layer(x).mul(2).relu().square().sum(), x)
    with Quick():
        y = layer(x)
        y.mul_(2).relu_()
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x), wanted)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 7), st.integers(2, 7), st.integers(0, 999))
def test_pooling_is_that_of_torch(count: int, channels: int, height: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randint(4, (count, channels, height, width)).double().requires_grad_()  # many that are equal
    y = F.max_pool2d(x, 2)
    g = torch.randn_like(y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "fits", lambda x: True)
        with Quick():
            ours = F.max_pool2d(x, kernel_size=2)
    assert "Pooled" in ours.grad_fn.name()
    assert torch.equal(ours, y)
    assert torch.equal(torch.autograd.grad(ours, x, g)[0], torch.autograd.grad(y, x, g)[0])


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, padding=1), nn.MaxPool2d((2, 1))]
)
def test_other_pooling_is_left_alone(pool: nn.Module, everywhere: list[torch.Size]) -> None:
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    with Quick():
        y = pool(x)
        indexed, _ = nn.MaxPool2d(2, return_indices=True)(x)
        ceiled = nn.MaxPool2d(2, ceil_mode=True)(x)
    assert not any("Pooled" in t.grad_fn.name() for t in (y, indexed, ceiled))
    assert not everywhere


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_hand_over_whole_gradients(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products as a GPU makes them, computed here from the same bf16 numbers."""
    monkeypatch.setattr(quick, "wide_products", lambda device: True)
    monkeypatch.setattr(quick, "wide_product", lambda a, b: a.float().mm(b.float()))
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 7, bias=bias), torch.randn(6, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), Quick():
        y = layer(x)
    assert "_Linear" in y.grad_fn.name()
    assert y.dtype == torch.bfloat16
    g = torch.randn(6, 7).bfloat16()
    y.backward(g)
    low = layer.weight.detach().bfloat16()
    torch.testing.assert_close(y, F.linear(x.bfloat16(), low, layer.bias.bfloat16() if bias else None))
    torch.testing.assert_close(x.grad, g.mm(low).float())
    torch.testing.assert_close(layer.weight.grad, g.t().float().mm(x.detach().bfloat16().float()))
    if bias:
        torch.testing.assert_close(layer.bias.grad, g.float().sum(0))


def test_linear_layers_of_one_precision_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "wide_products", lambda device: True)
    layer = nn.Linear(5, 7)
    with Quick():
        y = layer(torch.randn(6, 5))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            deep = layer(torch.randn(2, 3, 5))
    assert not any("_Linear" in t.grad_fn.name() for t in (y, deep))


def test_modules_are_caught_and_what_does_not_fit_is_left_alone(everywhere: list[torch.Size]) -> None:
    x = torch.randn(2, 3, 8, 8)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 2, 3, bias=False)
    )
    with Quick():
        y = net[0](x)
        same, bare = net[2](y), nn.Conv2d(4, 2, 3, padding="valid", bias=False)(y)
        row = nn.Conv1d(4, 2, 3)(torch.randn(2, 4, 9))
    assert "Convolved" in y.grad_fn.name()
    assert not any("Convolved" in t.grad_fn.name() for t in (same, bare, row))
    assert everywhere == [x.shape]
    torch.testing.assert_close(y, net[0](x))


def test_on_a_cpu_nothing_changes() -> None:
    net, x = build("vgg16-tiny", (3, 32, 32), width=0.05).eval(), torch.randn(2, 3, 32, 32)
    with Quick():
        inside = net(x)
    assert torch.equal(inside, net(x))


def test_mixed_precision(everywhere: list[torch.Size]) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 5, 3), torch.randn(2, 3, 8, 8, requires_grad=True)
    grads = []
    for mode in (Quick(), torch.autocast("cpu", enabled=False)):
        conv.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), mode:
            y = conv(x)
        assert y.dtype == (torch.bfloat16 if mode.__class__ is Quick else torch.float32)
        y.float().square().sum().backward()
        grads.append([x.grad, conv.weight.grad.clone(), conv.bias.grad.clone()])
    for ours, wide in zip(*grads, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wide, rtol=0.05, atol=0.2)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )


class Peeking(nn.Module):
    """Reads what comes before a rectifier."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, chain()
        if how == "script":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # there are such networks still
                self.script = torch.jit.trace(torch.square, torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        before = self.inner[0](x)
        after = self.inner[1](before)
        if self.how == "sum":
            after = after + before
        elif self.how == "list":
            after = torch.cat([before, after])
        elif self.how == "result":
            return before
        elif self.how == "twice":
            after = self.inner[1](before)
        elif self.how == "training" and self.training:
            after = after * before.mean()
        elif self.how == "keep":
            self.kept = before
        elif self.how == "script":
            after = self.script(before)
        return self.inner[2:](after)


def weights_of(net: nn.Module) -> list[Tensor]:
    return [weight for ref in rectified(net, torch.randn(2, 3, 8, 8)) if (weight := ref()) is not None]


def test_rectifiers_that_alone_read_a_convolution_are_found() -> None:
    net = chain().train()
    assert [w is v for w, v in zip(weights_of(net), (net[0].weight, net[2].weight), strict=True)] == [True, True]
    assert net.training
    plain = Peeking("no")
    assert len(weights_of(plain)) == 2
    for how in ("sum", "list", "result", "twice", "training", "keep", "script"):
        peeking = Peeking(how)
        assert not any(w is peeking.inner[0].weight for w in weights_of(peeking)), how
    hooked = chain()
    hooked[0].register_forward_hook(lambda *_: None)
    assert len(weights_of(hooked)) == 1
    normed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    assert [w is normed[1].weight for w in weights_of(normed)] == [True]
    assert not weights_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU()))


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {"dropout": 0.0}) for name in ("vgg16-tiny", "alexnet", "lenet")]
    + [("vgg16-tiny", {"dropout": 0.0, "norm": "batch"}), ("resnet18", {})],
)
def test_networks_compute_what_they_did(name: str, options: dict[str, Any], everywhere: list[torch.Size]) -> None:
    torch.manual_seed(0)
    shape = (3, 64, 64)
    net = build(name, shape, width=0.1, **options).double()
    x = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    found = rectified(net, x.detach())
    inputs = [x, *net.parameters()]
    y = net(x)
    g = torch.randn_like(y)
    wanted = torch.autograd.grad(y, inputs, g)
    with Quick(found):
        ours = net(x)
    torch.testing.assert_close(ours, y)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, g), wanted)
    assert everywhere


def test_a_weight_that_is_gone_rectifies_nothing() -> None:
    net = chain()
    refs = rectified(net, torch.randn(2, 3, 8, 8))
    assert Quick(refs).rectified == 2
    del net
    assert Quick(refs).rectified == 0


def test_rectifiers_may_come_late_and_in_any_order(everywhere: list[torch.Size]) -> None:
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = chain()[:2], nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.one[0](x), self.two[0](x)
            return self.one[1](a) - self.two[1](b)

    net, x = Crossing(), torch.randn(2, 3, 8, 8)
    found = rectified(net, x)
    assert len(found) == 2
    wanted = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    with Quick(found):
        y = net(x)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), list(net.parameters())), wanted)


def test_a_bias_that_is_a_slice(everywhere: list[torch.Size]) -> None:
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    bias = torch.randn(4, 5)[:, 2]
    with Quick():
        y = F.conv2d(x, weight, bias)
    torch.testing.assert_close(y, F.conv2d(x, weight, bias))
