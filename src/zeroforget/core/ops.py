"""Linear and convolution whose backward computes the newborn blocks of the weight gradient and nothing else.

Forward uses the whole weight at once. Of the weight W[out, in] the newborn part is an L: the rows of new outputs and,
for old outputs, the columns of new inputs (equation 6). The frozen block never gets a gradient, not even for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zeroforget.core.births import Places


@dataclass(frozen=True, eq=False)
class Block:
    """Where the newborn part of a weight lies: new and old outputs (dimension 0), new inputs (dimension 1)."""

    new_out: Places
    old_out: Places
    new_in: Places


@dataclass(frozen=True)
class Geometry:
    """A convolution's numbers."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that mixed precision asks for, if it is on. Backward runs outside of it, so we cast by hand."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


class _Grown(torch.autograd.Function):
    """A layer's output; `rows`, `cols` and `shift` are there to receive gradients, their values already in `weight`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor | None,
        cols: Tensor | None,
        shift: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        block: Block,
        geometry: Geometry | None,
    ) -> Tensor:
        ctx.input_dtype = x.dtype
        ctx.block, ctx.geometry = block, geometry
        ctx.parameter_dtypes = [None if p is None else p.dtype for p in (rows, cols, shift)]
        dtype = autocast_dtype(x)
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
        grouped = geometry is not None and geometry.groups > 1
        # The inputs that a gradient needs: all of them for new rows, else only the new ones.
        ctx.whole = rows is not None or grouped
        kept = x if ctx.whole else None
        if cols is not None and not ctx.whole:
            kept = block.new_in.take(x, _channel_dim(x, geometry)).contiguous()
        ctx.shape = x.shape
        # The newborn tensors are saved so that autograd notices a step taken between forward and backward.
        ctx.save_for_backward(kept, weight, rows, cols, shift)
        return _apply(x, weight, bias, geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *_ = ctx.saved_tensors
        block, geometry = ctx.block, ctx.geometry
        need_x, need_rows, need_cols, need_shift = ctx.needs_input_grad[:4]
        grad_x = grad_rows = grad_cols = grad_shift = None
        channel = _channel_dim(g, geometry)
        if need_x:
            grad_x = _input_gradient(g, weight, ctx.shape, geometry).to(ctx.input_dtype)
        if geometry is not None and geometry.groups > 1:
            grad_rows, grad_cols = _grouped_gradients(g, x, weight, block, geometry, need_rows, need_cols)
        else:
            if need_rows:
                grad_rows = _weight_gradient(block.new_out.take(g, channel), x, weight, geometry)
            if need_cols:
                new_x = block.new_in.take(x, _channel_dim(x, geometry)) if ctx.whole else x
                grad_cols = _weight_gradient(block.old_out.take(g, channel), new_x, weight, geometry)
        if need_shift:
            grad_shift = block.new_out.take(g, channel).sum([d for d in range(g.dim()) if d != channel])
        grads = [grad_rows, grad_cols, grad_shift]
        cast = [t if t is None else t.to(d) for t, d in zip(grads, ctx.parameter_dtypes, strict=True)]
        return (grad_x, *cast, None, None, None, None)


def grown_linear(
    x: Tensor,
    rows: Tensor | None,
    cols: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    block: Block,
) -> Tensor:
    """x W^T + b over the last dimension; gradients go to x and the newborn parts."""
    out: Tensor = _Grown.apply(x, rows, cols, shift, weight, bias, block, None)  # type: ignore[no-untyped-call]
    return out


def grown_convolution(
    x: Tensor,
    rows: Tensor | None,
    cols: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    block: Block,
    geometry: Geometry,
) -> Tensor:
    """Convolution in one, two or three dimensions; gradients go to x and the newborn parts."""
    out: Tensor = _Grown.apply(x, rows, cols, shift, weight, bias, block, geometry)  # type: ignore[no-untyped-call]
    return out


def _channel_dim(x: Tensor, geometry: Geometry | None) -> int:
    return x.dim() - 1 if geometry is None else x.dim() - 1 - len(geometry.stride)


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry | None) -> Tensor:
    if geometry is None:
        return F.linear(x, weight, bias)
    g = geometry
    zero = [0] * len(g.stride)
    return torch.convolution(x, weight, bias, g.stride, g.padding, g.dilation, False, zero, g.groups)


def _input_gradient(g: Tensor, weight: Tensor, shape: torch.Size, geometry: Geometry | None) -> Tensor:
    if geometry is None:
        return g.matmul(weight)
    grad, _, _ = _convolution_backward(g, g.new_empty(1).expand(shape), weight, geometry, [True, False, False])
    return grad


def _weight_gradient(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry | None) -> Tensor:
    """The gradient of a weight from x's channels to g's."""
    if geometry is None:
        return g.flatten(0, -2).t().mm(x.flatten(0, -2))
    shape = (g.shape[1], x.shape[1] // geometry.groups, *weight.shape[2:])
    _, grad, _ = _convolution_backward(g, x, weight.new_empty(1).expand(shape), geometry, [False, True, False])
    return grad


def _grouped_gradients(
    g: Tensor, x: Tensor | None, weight: Tensor, block: Block, geometry: Geometry, need_rows: bool, need_cols: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Where whole groups are newborn at the end, only theirs is computed; any other mixture goes through the whole."""
    if x is None or not (need_rows or need_cols):
        return None, None
    out_each, in_each = weight.shape[0] // geometry.groups, weight.shape[1]
    first = block.new_out.start
    tail = first is not None and first + len(block.new_out) == weight.shape[0]
    if not need_cols and tail and first is not None and first % out_each == 0:
        groups = len(block.new_out) // out_each
        inputs = x.narrow(1, (geometry.groups - groups) * in_each, groups * in_each)
        part = Geometry(geometry.stride, geometry.padding, geometry.dilation, groups)
        return _weight_gradient(block.new_out.take(g, 1), inputs, weight, part), None
    whole = _weight_gradient(g, x, weight, geometry)
    rows = block.new_out.take(whole, 0).clone() if need_rows else None
    cols = block.new_in.take(block.old_out.take(whole, 0), 1).clone() if need_cols else None
    return rows, cols


def _convolution_backward(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    zero = [0] * len(geometry.stride)
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        g, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, zero, geometry.groups, mask
    )
    return out
