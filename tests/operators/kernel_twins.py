"""The GPU's kernels against their twins, and whole networks by them against networks without: on a GPU (`test_gpu.py`),
or on a CPU under Triton's interpreter (`test_interpreted.py`)."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.growing.network import GrowingNetwork
from zeroforget.operators import reference as kernels
from zeroforget.operators.places import Affine, Moments, Norm, Places, Vectors, positions
from zeroforget.operators.quick_layers import Quick, Readers
from zeroforget.operators.side_streams import late
from zeroforget.proving.grow import grow


def rectified(net: nn.Module, *given: Any) -> list[weakref.ref[Tensor]]:
    """Where the network's rectifiers can run inside of the layers before them, as it is called with these; its
    statistics stay as they are."""
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with Readers(net.modules()) as readers:
        result = net(*given)
    found = readers.rectified()
    assert result is not None  # it is still there, as where a loss is made of it
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            buffer.copy_(before[name])
    return found


def compare(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """The GPU's kernels against their twins; on the CPU under Triton's interpreter."""
    from zeroforget.operators import triton_layers as gpu

    torch.manual_seed(rows + columns)
    bound = 1e-5 * rows + 1e-5
    for run, relu, biased, scaled in product((True, False), repeat=4):
        new = torch.zeros(columns, dtype=torch.bool)
        new[torch.arange(columns - 3, columns) if run else torch.randperm(columns)[:3]] = True
        born, covered = Places.where(new), Places.where(~new)
        affine = Affine(
            torch.randn(columns) if biased else None,
            torch.randn(3) if biased else None,
            torch.cat([torch.zeros(1), torch.rand(columns - 4) + 0.5]) if scaled else None,
            torch.randn(columns - 3) if scaled else None,
            positions(born, columns),
            positions(covered, columns),
        )
        there = Affine(*(None if t is None else t.to(device) for t in vars(affine).values()))  # type: ignore[arg-type]
        vectors = kernels.vectors(affine)
        if biased or scaled:
            assert_alike(gpu.vectors(there), vectors)
        vectors_there = Vectors(*(None if t is None else t.to(device) for t in vars(vectors).values()))
        y, g = torch.randn(rows, columns).to(dtype), torch.randn(rows, columns).to(dtype)
        out = y.clone()
        kernels.finish(out, vectors, relu)
        there_y = y.to(device, copy=True)
        gpu.finish(there_y, vectors_there, relu)
        torch.testing.assert_close(there_y.cpu(), out)
        broken = torch.full((rows, columns), torch.nan, dtype=dtype, device=device)
        gpu.finish(broken, vectors_there, relu)
        assert broken.isnan().all()  # as torch's own: training that diverged must show it
        if relu or scaled:
            mine, sums = gpu.unfinish(g.to(device), out.to(device), vectors_there, relu)
            twin, expected = kernels.unfinish(g, out, vectors, relu)
            torch.testing.assert_close(mine.cpu(), twin)
            assert (sums is None) == (expected is None)
            if sums is not None:
                assert_alike(sums(), expected(), bound)
        for start in (0, 8):  # read several at a time, where so many lie there
            some = Places.where((torch.arange(columns) >= start) & (torch.arange(columns) < start + 3))
            assert torch.equal(gpu.gather(g.to(device), some, 8, False)[0].cpu(), kernels.gather(g, some, 8, False)[0])
        mine, total = gpu.gather(g.to(device), born, 8, True)
        twin, wanted = kernels.gather(g, born, 8, True)
        assert torch.equal(mine.cpu(), twin)
        assert total is not None
        torch.testing.assert_close(total.cpu(), wanted, rtol=1e-4, atol=bound)
        torch.testing.assert_close(gpu.totals(g.to(device)).cpu(), kernels.totals(g), rtol=1e-4, atol=bound)


def compare_pooling(columns: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Pooling there and back, of images of many sizes: down to a single position, where strides say nothing."""
    from zeroforget.operators import triton_layers as gpu

    torch.manual_seed(columns)
    for high, across in ((2, 2), (3, 3), (7, 3), (2, 5), (9, 5)):
        images = torch.randint(4, (3, columns, high, across)).to(dtype)  # many that are equal
        if dtype == torch.float32 or device != "cpu":  # the interpreter takes negative bfloat16 for large
            images -= 2
        images[0, 0, :2, :2] = torch.tensor([[1.0, torch.nan], [2.0, 0.0]])
        images = images.contiguous(memory_format=torch.channels_last)
        g = torch.randn_like(F.max_pool2d(images, 2).float()).to(dtype).contiguous(memory_format=torch.channels_last)
        there, given_g = images.to(device), g.to(device)
        out = torch.full_like(given_g, torch.nan)
        gpu.pool(there, out)
        torch.testing.assert_close(out.cpu(), kernels.pool(images), rtol=0, atol=0, equal_nan=True)
        flat = given_g.contiguous().view(3, -1).view(g.shape)  # as flattening hands it back
        for given in (given_g, kernels.side_by_side(flat)):
            back = torch.zeros_like(there)
            gpu.unpool(given, there, back)
            assert torch.equal(back.cpu(), kernels.unpool(g, images))


def compare_norms(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Batch normalization there and back; features far from zero among them, and one that is always the same."""
    from zeroforget.operators import triton_norms as gpu_norm

    torch.manual_seed(rows + columns)
    x = (torch.randn(rows, columns) * torch.logspace(-1, 1, columns) + torch.linspace(-30, 30, columns)).to(dtype)
    x[:, 0], g = 3.0, torch.randn(rows, columns).to(dtype)
    for relu, tracked in product((True, False), (True, False)):
        weight, bias = torch.randn(columns), torch.randn(columns)
        before = [torch.randn(columns), torch.rand(columns)] if tracked else None
        given_x, given_g = x.to(device), g.to(device)
        y = torch.empty(rows, columns, dtype=dtype)
        mine = torch.full((rows, columns), torch.nan, dtype=dtype, device=device)
        here, there = (_norm_of(weight, bias, before, where) for where in ("cpu", device))
        moments, found = kernels.standardize(x, y, here, relu), gpu_norm.standardize(given_x, mine, there, relu)
        torch.testing.assert_close(found.mean.cpu(), moments.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.inverse.cpu()[1:], moments.inverse[1:], rtol=1e-4, atol=0)
        near = 1e-4 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(mine.cpu()[:, 1:], y[:, 1:], rtol=near, atol=near)
        for tensor, twin in ((there.mean, here.mean), (there.var, here.var)):
            assert (tensor is None) == (twin is None) == (not tracked)
            if tensor is not None:
                torch.testing.assert_close(tensor.cpu(), twin, rtol=1e-4, atol=1e-5)
        # Back from the twin's moments: in a feature that is always the same all would be rounding.
        same = Moments(moments.mean.to(device), moments.inverse.to(device))
        for asked in (True, False):
            wanted = kernels.unstandardize(g, x, moments, here, relu, wants_x=asked)
            got = gpu_norm.unstandardize(given_g, given_x, same, there, relu, asked)
            assert (got[0] is None) == (wanted[0] is None) == (not asked)
            for one, other in zip(got[1:], wanted[1:], strict=True):
                torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-5 * rows)
            if got[0] is not None:
                torch.testing.assert_close(got[0].cpu(), wanted[0], rtol=10 * near, atol=near)
        broken = given_x.clone()
        broken[-1, -1] = torch.nan
        gpu_norm.standardize(broken, mine, there, relu)
        assert mine[:, columns - 1].isnan().all()  # as torch's own: training that diverged must show it
        assert not mine[:, : columns - 1].isnan().any()


def drift(device: str = "cpu") -> None:
    """Of many values that are the same and far from zero, nothing is left but what rounding leaves of one."""
    from zeroforget.operators import triton_norms as gpu_norm

    x = torch.full((8192, 8), 1000.1, device=device)
    y = torch.empty_like(x)
    gpu_norm.standardize(x, y, _norm_of(torch.ones(8), torch.zeros(8), None, device), False)
    assert y.abs().max() < 0.03


def _norm_of(weight: Tensor, bias: Tensor, tracked: list[Tensor] | None, device: str) -> Norm:
    mean, var = (None, None) if tracked is None else (t.to(device, copy=True) for t in tracked)
    return Norm(weight.to(device), bias.to(device), mean, var, 0.3, 1e-5)


def assert_alike(one: object, other: object, bound: float = 1e-6) -> None:
    for name, value in vars(other).items():
        found = getattr(one, name)
        assert (found is None) == (value is None)
        if value is not None:
            torch.testing.assert_close(found.cpu(), value, rtol=1e-4, atol=bound)


class ToOnePosition(nn.Module):
    """Pools images down to one position, as a VGG does with small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 27, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(27, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(24, 21), nn.ReLU(), nn.Linear(21, 13),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stack(x)
        return out


class FeaturesApart(nn.Module):
    """Its linear layer reads one position of an image whose channels come first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 19, 3, padding=1), nn.Linear(19, 13), nn.Linear(13, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu().contiguous()
        out: Tensor = self.last(F.relu(self.second(x[:, :, 1, 1])))
        return out


class Normalized(nn.Module):
    """Batch normalization with and without a rectifier behind it, as a VGG has it and as a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 21, 3, padding=1), nn.BatchNorm2d(21, momentum=0.3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(21, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, track_running_stats=False),
        )  # fmt: skip
        self.last = nn.Linear(16, 13)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stack(x)
        out: Tensor = self.last((y + y.mul(0.5).relu_()).relu_().mean((2, 3)))
        return out


class Mixture(nn.Module):
    """Batch normalization, a residual sum, what overwrites in place, concatenation, an odd pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 19, 2), nn.BatchNorm2d(19), nn.Conv2d(19, 19, 3, padding=1)
        self.beside, self.third, self.last = nn.Conv2d(3, 11, 2), nn.Conv2d(30, 17, 1), nn.Linear(17, 13)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)), inplace=True)
        z = self.second(y)
        z += y
        z = torch.cat([F.relu_(z), self.beside(x).add_(0.3)], 1)
        z = F.max_pool2d(z, 2).mul_(1.5)
        out: Tensor = self.last(self.third(z).clamp_(-1, 1).mean((2, 3)))
        return out


class Wide(nn.Module):
    """More than 64 features, in odd numbers and in multiples of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 96, 3, padding=1), nn.BatchNorm2d(96), nn.Conv2d(96, 96, 1)
        self.third, self.last = nn.Conv2d(96, 90, 1), nn.Linear(90, 13)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        out: Tensor = self.last(F.relu(self.third(F.relu(self.second(y)) + y)).mean((2, 3)))
        return out


NETWORKS: list[type[nn.Module]] = [ToOnePosition, FeaturesApart, Normalized, Mixture, Wide]


def compare_networks(device: str = "cpu", networks: Iterable[type[nn.Module]] = NETWORKS) -> None:
    """A step of whole networks by the kernels against one without them, in float32."""
    for make, fn, (growth, start) in product(networks, ("reused", "none"), ((0.2, 0.7), (0.5, 0.4), (None, 1.0))):
        net = grown(make, fn, growth, start).to(device)
        task = "a" if growth is None else "b"
        for batch in (4, 1) if make in (ToOnePosition, FeaturesApart) else (4,):
            x = torch.randn(batch, 3, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
            slow = step(copy.deepcopy(net), x, task, by_kernels=False)
            fast = step(copy.deepcopy(net), x, task, by_kernels=True)
            for name, wanted in slow.items():
                told = f"{make.__name__}, {fn}, {growth}, {batch} images: {name}: "
                torch.testing.assert_close(fast[name], wanted, rtol=1e-3, atol=2e-4, msg=lambda m, told=told: told + m)


def grown(make: type[nn.Module], fn: str, growth: float | None, start: float) -> GrowingNetwork:
    torch.manual_seed(0)
    net = grow(make(), torch.randn(2, 3, 8, 8), fn=fn, start=start, bridge="random")
    net.add_task("a", 3)
    if growth is not None:
        net.add_task("b", 4, growth=growth)
    for p in net.parameters():
        p.data += 0.1 * torch.rand_like(p)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net.train()


def step(net: GrowingNetwork, x: Tensor, task: str, *, by_kernels: bool) -> dict[str, Tensor | None]:
    """The gradients of a step, that of its input too."""
    inside = rectified(net, x, task)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with pytest.MonkeyPatch.context() as patch, Quick(inside) if by_kernels else nullcontext():
        patch.setattr(kernels, "on_gpu", lambda t: by_kernels and t.dtype != torch.float64)
        out = net(x, task)
        with late(x.device):
            out.sin().sum().backward()
    moved = {name: buffer for name, buffer in net.named_buffers() if "running" in name}
    return {"input": x.grad, "output": out.detach()} | moved | {name: p.grad for name, p in net.named_parameters()}


def compare_plain(device: str = "cpu") -> None:
    """A step of a plain network, with rectifiers in the same pass, against one without our kernels."""
    torch.manual_seed(0)
    net = Normalized().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    for p in net.parameters():
        p.data += 0.1 * torch.rand_like(p)
    x = torch.randn(4, 3, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
    assert len(rectified(net, x)) == 2
    slow, fast = (_plain_step(copy.deepcopy(net), x, by_kernels) for by_kernels in (False, True))
    for name, wanted in slow.items():
        torch.testing.assert_close(fast[name], wanted, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


def _plain_step(net: nn.Module, x: Tensor, by_kernels: bool) -> dict[str, Tensor | None]:
    inside = rectified(net, x)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with pytest.MonkeyPatch.context() as patch, Quick(inside) if by_kernels else nullcontext():
        patch.setattr(kernels, "on_gpu", lambda t: by_kernels and t.dtype != torch.float64)
        net(x).sin().sum().backward()
    return {"input": x.grad} | dict(net.named_buffers()) | {name: p.grad for name, p in net.named_parameters()}
