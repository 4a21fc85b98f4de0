"""What must hold on a GPU too: kernels as their twins, gradients as in double precision, old tasks to the bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.operators.kernel_twins import (
    NETWORKS,
    compare,
    compare_networks,
    compare_norms,
    compare_plain,
    compare_pooling,
    drift,
    rectified,
)
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import build
from zeroforget.operators import reference as kernels
from zeroforget.operators.quick_layers import Quick, wide_products
from zeroforget.operators.recorded import leading
from zeroforget.operators.side_streams import late
from zeroforget.proving.grow import grow

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NETS = [("vgg16-tiny", (3, 64, 64)), ("alexnet", (3, 224, 224)), ("resnet18", (3, 64, 64))]


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [5, 64, 130])
def test_kernels_compute_what_their_twins_do(columns: int, dtype: torch.dtype) -> None:
    for rows in (1, 64, 70_000):
        compare(rows, columns, dtype, "cuda")


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [5, 16, 27, 64, 130])
def test_pooling_and_normalization_compute_what_their_twins_do(columns: int, dtype: torch.dtype) -> None:
    compare_pooling(columns, dtype, "cuda")
    for rows in (2, 70, 70_000):
        compare_norms(rows, columns, dtype, "cuda")


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("make", NETWORKS)
def test_networks_learn_by_the_kernels_what_they_learn_without(make: type[torch.nn.Module]) -> None:
    with tf32(False):
        compare_networks("cuda", [make])


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
def test_plain_networks_learn_by_the_kernels_what_they_learn_without() -> None:
    with tf32(False):
        compare_plain("cuda")
    drift("cuda")


def growing(name: str, shape: tuple[int, int, int], align: int = 1) -> GrowingNetwork:
    return copy.deepcopy(_growing(name, shape, align)).to("cuda")


@functools.cache
def _growing(name: str, shape: tuple[int, int, int], align: int) -> GrowingNetwork:
    """Found once: to follow a network's axes takes longer than most of these tests."""
    torch.manual_seed(0)
    net = grow(build(name, shape, width=0.5), torch.randn(2, *shape), start=0.8, align=align)
    net.add_task("a", 5)
    net.add_task("b", 5, growth=0.2)
    for p in net.parameters():
        p.data += 0.02 * torch.rand_like(p)
    return net


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """In convolutions and products alike, whatever the machine's own settings are."""
    conv, product = torch.backends.cudnn, torch.backends.cuda.matmul
    before = conv.allow_tf32, product.allow_tf32
    conv.allow_tf32 = product.allow_tf32 = allowed
    yield
    conv.allow_tf32, product.allow_tf32 = before


def laid_out(net: GrowingNetwork) -> GrowingNetwork:
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def step(net: GrowingNetwork, x: Tensor, y: Tensor, bf16: bool) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
        loss = F.cross_entropy(net(x, "b"), y)
    loss.backward()


@pytest.mark.parametrize(("name", "shape"), NETS[:2])
@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("tf32", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("pooled", [Quick, nullcontext])
def test_gradients_are_those_of_double_precision(
    name: str,
    shape: tuple[int, int, int],
    precision: str,
    bound: float,
    align: int,
    pooled: Callable[[], AbstractContextManager[object]],
) -> None:
    net = growing(name, shape, align)
    for module in net.modules():  # its draws differ between precisions
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    exact = copy.deepcopy(net).double().train()
    x, y = torch.randn(16, *shape, device="cuda"), torch.randint(5, (16,), device="cuda")
    step(exact, x.double(), y, False)
    with tf32(precision == "tf32"), pooled():
        step(laid_out(net).train(), x.contiguous(memory_format=torch.channels_last), y, precision == "bf16")
    wanted = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    found = torch.cat([p.grad.contiguous().flatten() for p in net.parameters() if p.grad is not None])
    assert len(wanted) == len(found) > 0
    assert float((found - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize(("name", "shape"), NETS)
@pytest.mark.parametrize("bf16", [False, True])
def test_old_tasks_keep_their_bits(name: str, shape: tuple[int, int, int], bf16: bool, tmp_path: Path) -> None:
    x, y = torch.randn(8, *shape, device="cuda"), torch.randint(5, (8,), device="cuda")
    net = growing(name, shape).eval()
    torch.backends.cudnn.deterministic = True
    with torch.no_grad():
        before = net(x, "a")
    optimizer = torch.optim.AdamW(net.newborn(), lr=1e-3, weight_decay=0.5)
    laid_out(net).train()
    for _ in range(5):
        optimizer.zero_grad()
        step(net, x.contiguous(memory_format=torch.channels_last), y, bf16)
        optimizer.step()
    with torch.no_grad():
        assert torch.equal(net.eval()(x, "a"), before)
        torch.save(net.state_dict(), tmp_path / "net.pt")
        again = growing(name, shape).eval()
        again.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
        assert torch.equal(again(x, "a"), before)
        assert torch.equal(again(x, "b"), net(x, "b"))
    torch.backends.cudnn.deterministic = False


def test_quick_linear_layers_agree_with_double_precision() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(300, 200).cuda(), torch.randn(64, 300, device="cuda", requires_grad=True)
    assert wide_products(x.device)
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False), Quick():
        y = layer(x)
    assert "_Linear" in y.grad_fn.name()
    found = torch.autograd.grad(y.double().sin().sum(), [x, *layer.parameters()])
    exact, given = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(exact(given).sin().sum(), [given, *exact.parameters()])
    for ours, double in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - double).norm() / double.norm()) < 1e-2


@pytest.mark.parametrize("groups", [1, 3])
def test_quick_convolutions_agree_with_double_precision(groups: int) -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(48, 96, 3, padding=1, groups=groups).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(16, 48, 20, 20, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    found = []
    for precise in (False, True):
        net, given = (copy.deepcopy(conv).double(), x.double()) if precise else (conv, x)
        inputs = [given, *net.parameters()]
        with Quick(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=not precise):
            y = net(given)
        found.append(torch.autograd.grad(y.double().sin().sum(), inputs))
    for ours, exact in zip(*found, strict=True):
        assert float((ours - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_quick_networks_agree_with_double_precision(norm: str) -> None:
    torch.manual_seed(0)
    shape = (3, 64, 64)
    net = build("vgg16-tiny", shape, width=0.5, dropout=0.0, norm=norm).cuda()
    exact = copy.deepcopy(net).double()
    found = rectified(net, torch.randn(16, *shape, device="cuda"))
    assert len(found) == 10
    net.to(memory_format=torch.channels_last)
    errors = []
    for _ in range(5):
        x = torch.randn(16, *shape, device="cuda")
        wanted = torch.autograd.grad(exact(x.double()).sin().sum(), list(exact.parameters()))
        with tf32(False), Quick(found):
            y = net(x.contiguous(memory_format=torch.channels_last))
            ours = torch.autograd.grad(y.sin().sum(), list(net.parameters()))
        error = torch.cat([(a - b).flatten() for a, b in zip(ours, wanted, strict=True)])
        errors.append(float(error.norm() / torch.cat([b.flatten() for b in wanted]).norm()))
    # One activation of millions that rounding moves past zero, or past its neighbour, is seen in the whole gradient.
    assert max(errors) < 1e-2
    assert min(errors) < 1e-5


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_gradients_found_beside_each_other_are_those_found_in_turn(waits: bool, quick: bool, align: int) -> None:
    """While a step is recorded, a layer's gradients are found at the same time, and within `late` those of several
    layers; otherwise one after the other."""
    shape = (3, 64, 64)
    net = growing("vgg16-tiny", shape, align)
    model: torch.nn.Module = build("vgg16-tiny", shape, width=0.5, dropout=0.0).cuda() if quick else net
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    draw = [torch.randn(16, *shape, device="cuda").contiguous(memory_format=torch.channels_last) for _ in range(2)]
    x, parameters = draw[0].clone(memory_format=torch.preserve_format), list(model.parameters())

    def gradients() -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            with Quick() if quick else nullcontext():
                y = model(x) if quick else net(x, "b")
            loss = y.float().sin().sum()
        with late(x.device) if waits else nullcontext():
            loss.backward()
        return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]

    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        wanted, stream = list[list[Tensor]](), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for images in draw:
                x.copy_(images)
                wanted.append(gradients())
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=leading(x.device)):
            found = gradients()
    assert len(found) == len(parameters)
    for number in range(20):
        x.copy_(draw[number % 2])
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, wanted[number % 2], strict=True))
