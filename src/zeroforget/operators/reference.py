"""The passes over activations that a learning step makes beside its products, each as one kernel on a GPU.

The functions here are plain torch, and the tests hold the GPU's kernels (`triton_layers.py`, `triton_norms.py`) to
them. Activations are matrices: one row for each position of each image, one column for each feature.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroforget.operators.places import Affine, Moments, Norm, Places, Sums, Vectors

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
            gpu.finish(y, Vectors(), True)
    except Exception as error:  # a compiler's, a driver's or the system's
        warnings.warn(f"Triton does not work here, so learning goes the plain, slower way: {error}", stacklevel=2)
        return False
    return True


def side_by_side(x: Tensor) -> Tensor:
    """The same, the features of each position side by side."""
    return x.contiguous(memory_format=_layout(x))


def lies_side_by_side(x: Tensor) -> bool:
    """Whether they are."""
    return x.is_contiguous(memory_format=_layout(x))


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def like(rows: Tensor, x: Tensor) -> Tensor:
    """A matrix in the form of x, whatever its number of features."""
    if x.dim() != 4:
        return rows
    n, _, h, w = x.shape
    return rows.view(n, h, w, rows.shape[1]).permute(0, 3, 1, 2)


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


def finish(y: Tensor, given: Vectors, relu: bool) -> None:
    """y ← relu(scale · y + shift) in place, each part only where there is one."""
    if given.shift is None and not relu:
        return
    if on_gpu(y):
        from zeroforget.operators import triton_layers as gpu

        gpu.finish(y, given, relu)
        return
    wide = y.to(_wide(y))
    if given.scale is not None:
        wide = wide * given.scale
    if given.shift is not None:
        wide = wide + given.shift
    y.copy_(wide.clamp(min=0) if relu else wide)


def unfinish(g: Tensor, out: Tensor | None, given: Vectors, relu: bool) -> tuple[Tensor, Callable[[], Sums] | None]:
    """Back through `finish`: the gradient of y and, where there is a scale, what finds the sums, for which the next
    layer need not wait. `out` is what `finish` left.

    With m the gradient behind the rectifier: dβ = Σ m, db = γ Σ m, dγ = Σ m (y + b) = (Σ m · out − β Σ m) / γ.
    """
    if given.scale is None and not relu:
        return g, None
    assert out is not None
    if on_gpu(g):
        from zeroforget.operators import triton_layers as gpu

        return gpu.unfinish(g, out, given, relu)
    m = g.to(_wide(g))
    if relu:
        m = m * (out > 0)
    if given.scale is None or given.beta is None:
        return m.to(g.dtype), None
    total, moment = m.sum(0), (m * out).sum(0)
    by_scale = torch.where(given.scale == 0, 0.0, (moment - given.beta * total) / given.scale)
    sums = Sums(by_scale, total, given.scale * total)
    return (m * given.scale).to(g.dtype), lambda: sums


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


def standardize(x: Tensor, y: Tensor, given: Norm, relu: bool) -> Moments:
    """y ← batch normalization of at least two rows by their own moments, and then a rectifier, if asked for."""
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
    y.copy_(made.clamp(min=0) if relu else made)
    return moments


def unstandardize(
    g: Tensor, x: Tensor, moments: Moments, given: Norm, relu: bool, *, wants_x: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Back through `standardize`: the gradients of x (if wanted), of the weight and of the bias.

    With m the gradient behind the rectifier, z what was standardized, over n rows: db = Σ m, dw = Σ m z,
    dx = w · inverse · (m − db / n − z dw / n).
    """
    if on_gpu(x):
        from zeroforget.operators import triton_norms as gpu_norm

        return gpu_norm.unstandardize(g, x, moments, given, relu, wants_x)
    z = (x.to(_wide(x)) - moments.mean) * moments.inverse
    m = g.to(_wide(g))
    if relu:
        m = m * (z * given.weight + given.bias > 0)
    by_bias, by_weight = m.sum(0), (m * z).sum(0)
    if not wants_x:
        return None, by_weight, by_bias
    by_x = (m - by_bias / len(x) - z * by_weight / len(x)) * (moments.inverse * given.weight)
    return by_x.to(x.dtype), by_weight, by_bias


def pool(x: Tensor) -> Tensor:
    """The largest of each two by two positions of images whose channels are last."""
    if not on_gpu(x):
        return F.max_pool2d(x, 2)
    from zeroforget.operators import triton_layers as gpu

    n, channels, height, width = x.shape
    out = images(x, (n, channels, height // 2, width // 2))
    gpu.pool(x, out)
    return out


def unpool(g: Tensor, x: Tensor) -> Tensor:
    """Back through `pool`: the gradient goes to the largest, the first of several."""
    if not on_gpu(x):
        _, where = F.max_pool2d(x, 2, return_indices=True)
        back = torch.ops.aten.max_pool2d_with_indices_backward
        found: Tensor = back(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, where)
        return found
    from zeroforget.operators import triton_layers as gpu

    grad = images(x, tuple(x.shape))
    if x.shape[2] % 2 or x.shape[3] % 2:  # a last row or column that no window holds
        grad.zero_()
    gpu.unpool(g, x, grad)
    return grad


def images(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images yet to be computed, their channels last."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
