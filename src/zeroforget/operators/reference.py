"""The passes over activations that a learning step makes beside its products, each as one kernel on a GPU.

The functions here are plain torch, and the tests hold the GPU's kernels (`gpu.py`) to them. Activations are matrices:
one row for each position of each image, one column for each feature.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroforget.operators.places import Places

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""It comes with torch where torch has CUDA."""


def on_gpu(x: Tensor) -> bool:
    """Whether this tensor is the kernels' to work on."""
    return HAS_TRITON and x.is_cuda and x.dtype != torch.float64 and works(x.device)


@functools.cache
def works(device: torch.device) -> bool:
    """Whether kernels can be built and run: that takes a C compiler, Python's headers and a GPU that is not too old."""
    try:
        from zeroforget.operators import triton_layers as gpu

        y = torch.zeros(1, 1, device=device)
        with torch.cuda.device_of(y):
            gpu.finish(y, Vectors(), True, 1)
    except Exception as error:  # a compiler's, a driver's or the system's
        warnings.warn(f"Triton does not work here, so learning goes the plain, slower way: {error}", stacklevel=2)
        return False
    return True


LANES = 8
"""Features of a position are read so many at a time, where they begin at a multiple of it."""


_WIDE = 64
"""Above so many features, a product of an odd multiple of `LANES` takes longer than one of the next even one."""


def roomy(features: int) -> int:
    """In room for how many features so many are computed: a few stay as few, and a multiple of `LANES` as it is, since
    what other operators make of it comes without zeros behind it."""
    if features <= LANES or features % LANES == 0:
        return features
    multiple = LANES if features <= _WIDE else 2 * LANES
    return -(-features // multiple) * multiple


_ROOM = "_zeroforget_room"


def room(x: Tensor) -> int:
    """How many features there are with the zeros that lie behind those of x, if x is known to have such."""
    wide: int = getattr(x, _ROOM, x.shape[1])
    return wide if x.stride(-1 if x.dim() == 4 else 0) == wide else x.shape[1]


def with_room(x: Tensor, wide: int) -> Tensor:
    """x, known from now on to have zeros behind its features (what is computed from it is not)."""
    if wide != x.shape[1]:
        setattr(x, _ROOM, wide)
    return x


def widened(x: Tensor, wide: int) -> Tensor:
    """x together with the zeros that lie behind its features."""
    return x if wide == x.shape[1] else x.as_strided((x.shape[0], wide, *x.shape[2:]), x.stride())


def narrowed(x: Tensor, features: int) -> Tensor:
    """The first features of x, in its memory, but no view to autograd: whoever gets it may overwrite it in place."""
    if features == x.shape[1]:
        return x
    shape = (x.shape[0], features, *x.shape[2:])
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), shape, x.stride())


def side_by_side(x: Tensor) -> Tensor:
    """The same, the features of each position side by side; there may be gaps between positions."""
    return x if lies_side_by_side(x) else x.contiguous(memory_format=_layout(x))


def lies_side_by_side(x: Tensor) -> bool:
    """Whether they are."""
    if x.is_contiguous(memory_format=_layout(x)):
        return True
    if x.dim() == 2:
        return x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    _, features, height, width = x.shape
    apart = x.stride(3)
    return apart >= features and x.stride() == (height * width * apart, 1, width * apart, apart)


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def matrix(x: Tensor) -> Tensor:
    """Of images, one row for each position and one column for each channel: a view. Anything else is a matrix."""
    return x.permute(0, 2, 3, 1).view(-1, x.shape[1]) if x.dim() == 4 else x


def like(rows: Tensor, x: Tensor) -> Tensor:
    """A matrix in the form of x, whatever its number of features."""
    if x.dim() != 4:
        return rows
    n, _, h, w = x.shape
    return rows.view(n, h, w, rows.shape[1]).permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class Affine:
    """Scale and shift of a layer's outputs, from its biases and its feature normalization (equation 7)."""

    bias: Tensor | None
    """All biases; those of new outputs are not up to date here."""
    born: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    born_at: Tensor
    """For each output its place in `born`, or -1."""
    covered_at: Tensor
    """For each output its place in `gamma` and `beta`, or -1."""

    @property
    def present(self) -> bool:
        """Whether there is anything to add or to scale by."""
        return self.bias is not None or self.gamma is not None


def positions(places: Places, size: int) -> Tensor:
    """For each of `size` positions its number among the places, or -1."""
    at = torch.full((size,), -1, dtype=torch.int32)
    at[places.index] = torch.arange(len(places), dtype=torch.int32)
    return at


@dataclass(frozen=True, eq=False)
class Vectors:
    """γ (y + b) + β, written as scale · y + shift."""

    scale: Tensor | None = None
    """γ, and 1 where nothing is covered."""
    beta: Tensor | None = None
    """β, and 0 where nothing is covered."""
    shift: Tensor | None = None
    """γ b + β."""


def vectors(given: Affine) -> Vectors:
    """Scale and shift of all outputs."""
    source = given.bias if given.bias is not None else given.gamma
    if source is None:
        return Vectors()
    if on_gpu(source):
        from zeroforget.operators import triton_layers as gpu

        return gpu.vectors(given)
    bias = None if given.bias is None else given.bias.clone()
    if bias is not None and given.born is not None:
        bias[given.born_at >= 0] = given.born
    if given.gamma is None or given.beta is None:
        return Vectors(shift=bias)
    covered = given.covered_at >= 0
    scale, beta = source.new_ones(len(covered)), source.new_zeros(len(covered))
    scale[covered], beta[covered] = given.gamma, given.beta
    return Vectors(scale, beta, beta if bias is None else beta + scale * bias)


def finish(y: Tensor, given: Vectors, relu: bool, features: int | None = None) -> None:
    """y ← relu(scale · y + shift) in place, each part only where there is one, in the first features (None: in all);
    what lies behind them becomes zeros."""
    features = y.shape[1] if features is None else features
    if given.shift is None and not relu:  # zeros lie there already, by zeros in the weight (of finite inputs)
        return
    if on_gpu(y):
        from zeroforget.operators import triton_layers as gpu

        gpu.finish(y, given, relu, features)
        return
    wide = y[:, :features].to(_wide(y))
    if given.scale is not None:
        wide = wide * given.scale
    if given.shift is not None:
        wide = wide + given.shift
    y[:, :features] = wide.clamp(min=0) if relu else wide
    y[:, features:] = 0


@dataclass(frozen=True)
class Sums:
    """Gradients that are sums over rows: of γ, of β, and of the bias."""

    gamma: Tensor
    beta: Tensor
    bias: Tensor


def unfinish(
    g: Tensor, out: Tensor | None, given: Vectors, relu: bool, wide: int | None = None
) -> tuple[Tensor, Callable[[], Sums] | None]:
    """Back through `finish`: the gradient of y and, where there is a scale, what finds the sums, for which the next
    layer need not wait. `out` is what `finish` left, and y was so `wide` (None: as g); what lay behind the features
    gets zeros. Rows of g and `out` may lie apart.

    With m the gradient behind the rectifier: dβ = Σ m, db = γ Σ m, dγ = Σ m (y + b) = (Σ m · out − β Σ m) / γ.
    """
    wide = g.shape[1] if wide is None else wide
    if given.scale is None and not relu:
        same = g.shape[1] == wide and g.is_contiguous()
        return (g if same else gather(g, every(g.shape[1]), wide, False)[0]), None
    if on_gpu(g):
        from zeroforget.operators import triton_layers as gpu

        assert out is not None
        return gpu.unfinish(g, out, given, relu, wide)
    behind = (0, wide - g.shape[1])
    m = g.to(_wide(g))
    if relu:
        assert out is not None
        m = m * (out > 0)
    if given.scale is None or given.beta is None:
        return F.pad(m.to(g.dtype), behind), None
    assert out is not None
    total, moment = m.sum(0), (m * out).sum(0)
    by_scale = torch.where(given.scale == 0, 0.0, (moment - given.beta * total) / given.scale)
    sums = Sums(by_scale, total, given.scale * total)
    return F.pad((m * given.scale).to(g.dtype), behind), lambda: sums


def every(columns: int) -> Places:
    """The first so many places."""
    return Places(torch.arange(columns), 0)


def gather(x: Tensor, places: Places, columns: int, sums: bool) -> tuple[Tensor, Tensor | None]:
    """These columns, then zeros up to `columns`; and their sums, if asked for."""
    if on_gpu(x):
        from zeroforget.operators import triton_layers as gpu

        return gpu.gather(x, places, columns, sums)
    out = x.new_zeros((x.shape[0], columns))
    out[:, : len(places)] = places.take(x, 1)
    return out, out[:, : len(places)].sum(0, dtype=_wide(x)) if sums else None


def totals(x: Tensor) -> Tensor:
    """The sum of each column."""
    if on_gpu(x):
        from zeroforget.operators import triton_layers as gpu

        return gpu.totals(x)
    return x.sum(0, dtype=_wide(x))


@dataclass(frozen=True, eq=False)
class Norm:
    """Batch normalization: what is learned, what is tracked (in place), and its numbers."""

    weight: Tensor
    bias: Tensor
    mean: Tensor | None
    var: Tensor | None
    momentum: float
    eps: float


@dataclass(frozen=True, eq=False)
class Moments:
    """Of each feature of a batch: its mean, and 1 / sqrt(variance + eps)."""

    mean: Tensor
    inverse: Tensor


def standardize(x: Tensor, y: Tensor, given: Norm, relu: bool) -> Moments:
    """y ← batch normalization of at least two rows by their own moments, and then a rectifier, if asked for; what lies
    behind the features of y becomes zeros. The rows of x may lie apart, those of y do not."""
    if on_gpu(x):
        from zeroforget.operators import triton_norms as gpu_norm

        return gpu_norm.standardize(x, y, given, relu)
    wide = x.to(_wide(x))
    var, mean = torch.var_mean(wide, 0, correction=0)
    if given.mean is not None and given.var is not None:
        for tracked, now in ((given.mean, mean), (given.var, var * len(x) / (len(x) - 1))):
            tracked.mul_(1 - given.momentum).add_(now, alpha=given.momentum)
    moments = Moments(mean, (var + given.eps).rsqrt())
    made = (wide - mean) * (moments.inverse * given.weight) + given.bias
    y[:, : x.shape[1]], y[:, x.shape[1] :] = made.clamp(min=0) if relu else made, 0
    return moments


def unstandardize(
    g: Tensor, x: Tensor, moments: Moments, given: Norm, relu: bool, wide: int | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Back through `standardize`: the gradients of x, so `wide` with zeros behind its features (None: not at all), of
    the weight and of the bias.

    With m the gradient behind the rectifier, z what was standardized, over n rows: db = Σ m, dw = Σ m z,
    dx = w · inverse · (m − db / n − z dw / n).
    """
    if on_gpu(x):
        from zeroforget.operators import triton_norms as gpu_norm

        return gpu_norm.unstandardize(g, x, moments, given, relu, wide)
    z = (x.to(_wide(x)) - moments.mean) * moments.inverse
    m = g.to(_wide(g))
    if relu:
        m = m * (z * given.weight + given.bias > 0)
    by_bias, by_weight = m.sum(0), (m * z).sum(0)
    if wide is None:
        return None, by_weight, by_bias
    by_x = (m - by_bias / len(x) - z * by_weight / len(x)) * (moments.inverse * given.weight)
    return F.pad(by_x.to(x.dtype), (0, wide - x.shape[1])), by_weight, by_bias


def pool(x: Tensor, wide: int) -> Tensor:
    """The largest of each two by two positions of images whose channels are last; zeros behind them up to `wide`."""
    n, channels, height, width = x.shape
    out = images(x, (n, wide, height // 2, width // 2))
    if on_gpu(x):
        from zeroforget.operators import triton_layers as gpu

        gpu.pool(x, out)
    else:
        out[:, :channels], out[:, channels:] = F.max_pool2d(x, 2), 0
    return narrowed(out, channels)


def unpool(g: Tensor, x: Tensor, wide: int) -> Tensor:
    """Back through `pool`: the gradient goes to the largest, the first of several."""
    n, channels, height, width = x.shape
    grad = images(x, (n, wide, height, width))
    if height % 2 or width % 2:  # a last row or column that no window holds
        grad.zero_()
    if on_gpu(x):
        from zeroforget.operators import triton_layers as gpu

        gpu.unpool(g, x, grad)
    else:
        _, where = F.max_pool2d(x, 2, return_indices=True)
        back = torch.ops.aten.max_pool2d_with_indices_backward
        grad[:, :channels] = back(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, where)
        grad[:, channels:] = 0
    return narrowed(grad, channels)


def images(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Room for images whose channels are last."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
