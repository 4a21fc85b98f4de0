"""Linear and convolution whose backward computes the newborn blocks of the weight gradient and nothing else.

Forward uses the whole weight at once. Of the weight W[out, in] the newborn part is an L: the rows of new outputs and,
for old outputs, the columns of new inputs (equation 6). The frozen block never gets a gradient, not even for a moment.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zeroforget.operators.places import Places


@dataclass(frozen=True, eq=False)
class Block:
    """Where the newborn part of a weight lies: new and old outputs (dimension 0), new and old inputs (dimension 1).

    `old_in` is None where inputs do not grow: then all are old.
    """

    new_out: Places
    old_out: Places
    new_in: Places
    old_in: Places | None = None


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


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in this type; double precision stays."""
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


@dataclass(frozen=True, eq=False)
class LowRank:
    """A step of low rank that a weight's old block takes: `up` (old outputs × rank) times `down` (rank × old inputs).

    `folded`: the weight that comes with it holds the step already. Else what goes through it is added to the output.
    """

    up: Tensor
    down: Tensor
    folded: bool


@dataclass(frozen=True, eq=False)
class Scaling:
    """Feature normalization for a layer to fold in: scale and shift of all its outputs, and which of them are learned.

    `scale` must be away from zero: the gradient of a scale is found from the layer's scaled output by dividing.
    """

    scale: Tensor
    shift: Tensor
    covered: Places
    weight: Tensor
    """Room for the scaled weight, in the precision that the layer computes in."""


class _Grown(torch.autograd.Function):
    """A layer's output. `rows`, `cols`, `born`, `gamma` and `beta` are there to receive gradients: their values are
    already in `weight`, `bias` and `scaling`. So are `up` and `down` where the low rank is folded in."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor | None,
        cols: Tensor | None,
        born: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        up: Tensor | None,
        down: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        block: Block,
        geometry: Geometry | None,
        scaling: Scaling | None,
        folded: bool,
    ) -> Tensor:
        ctx.block, ctx.geometry, ctx.scaling, ctx.folded = block, geometry, scaling, folded
        ctx.input_dtype, ctx.shape = x.dtype, x.shape
        ctx.parameter_dtypes = [None if p is None else p.dtype for p in (rows, cols, born, gamma, beta, up, down)]
        if scaling is not None:  # eq. (7), folded: (γ W) x + (γ b + β)
            column = scaling.scale.view(-1, *[1] * (weight.dim() - 1))
            weight = torch.mul(weight, column, out=scaling.weight.data)
            bias = scaling.shift if bias is None else torch.addcmul(scaling.shift, scaling.scale, bias)
        dtype = autocast_dtype(x)
        x, weight = cast(x, dtype), cast(weight, dtype)
        bias = None if bias is None else cast(bias, dtype)
        grouped = geometry is not None and geometry.groups > 1
        # The inputs that a gradient needs: all of them for new rows or a low rank, else only the new ones.
        ctx.whole = rows is not None or grouped or up is not None
        kept = x if ctx.whole else None
        if cols is not None and not ctx.whole:
            kept = block.new_in.take(x, _channel_dim(x, geometry)).contiguous()
        out = apply(x, weight, bias, geometry)
        thin = None
        if up is not None and down is not None:
            thin = thin_layers(up, down, weight, block)
            if not folded:
                out += apply(apply(x, thin[1], None, geometry), thin[0], None, pointwise(geometry))
        # The newborn tensors are saved so that autograd notices a step taken between forward and backward.
        newborn = (rows, cols, born, gamma, beta, up, down)
        ctx.save_for_backward(kept, weight, None if scaling is None else out, *(thin or (None, None)), *newborn)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out, up, down, *_ = ctx.saved_tensors
        block, geometry, scaling = ctx.block, ctx.geometry, ctx.scaling
        need_x, need_rows, need_cols, need_born = ctx.needs_input_grad[:4]
        grad_x = grad_rows = grad_cols = grad_born = grad_gamma = grad_beta = grad_up = grad_down = None
        channel = _channel_dim(g, geometry)
        if need_x:
            grad_x = input_gradient(g, weight, ctx.shape, geometry)
            if up is not None and not ctx.folded:
                grad_x += input_gradient(apply(g, up.t(), None, None), down, ctx.shape, geometry)
            grad_x = grad_x.to(ctx.input_dtype)
        if up is not None:
            scale = None if scaling is None else scaling.scale
            grad_up, grad_down = low_rank_gradients(g, x, up, down, block, geometry, scale)
        if geometry is not None and geometry.groups > 1:
            grad_rows, grad_cols = _grouped_gradients(g, x, weight, block, geometry, need_rows, need_cols)
        else:
            if need_rows:
                like = block.new_out.take(weight, 0)
                grad_rows = weight_gradient(block.new_out.take(g, channel), x, like, geometry)
            if need_cols:
                new_x = block.new_in.take(x, _channel_dim(x, geometry)) if ctx.whole else x
                like = block.new_in.take(block.old_out.take(weight, 0), 1)
                grad_cols = weight_gradient(block.old_out.take(g, channel), new_x, like, geometry)
        if scaling is not None:
            by_scale, total = _scale_gradients(g, out, scaling, channel)
            grad_gamma, grad_beta = scaling.covered.take(by_scale, 0), scaling.covered.take(total, 0)
            grad_born = block.new_out.take(total, 0) if need_born else None
            grad_rows, grad_cols, grad_born = _scaled(scaling.scale, block, grad_rows, grad_cols, grad_born)
        elif need_born:
            grad_born = block.new_out.take(g, channel).sum([d for d in range(g.dim()) if d != channel])
        grads = [grad_rows, grad_cols, grad_born, grad_gamma, grad_beta, grad_up, grad_down]
        cast = [t if t is None else t.to(d) for t, d in zip(grads, ctx.parameter_dtypes, strict=True)]
        return (grad_x, *cast, *[None] * 6)


def pointwise(geometry: Geometry | None) -> Geometry | None:
    """The numbers of a convolution that mixes channels alone, in as many dimensions."""
    if geometry is None:
        return None
    n = len(geometry.stride)
    return Geometry((1,) * n, (0,) * n, (1,) * n, 1)


def thin_layers(up: Tensor, down: Tensor, weight: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """A low rank as the weights of two layers, x → down → up, for all inputs and outputs of a weight: zeros where these
    are new. Of a convolution the second one mixes channels alone."""
    rank, flat = down.shape[0], weight.dim() - 2
    wide = weight.new_zeros(weight.shape[0], rank)
    block.old_out.put(wide, 0, up)
    if block.old_in is None:
        return wide.view(*wide.shape, *[1] * flat), down.to(weight.dtype).view(rank, *weight.shape[1:])
    deep = weight.new_zeros(rank, *weight.shape[1:])
    block.old_in.put(deep, 1, down.view(rank, -1, *weight.shape[2:]).to(weight.dtype))
    return wide.view(*wide.shape, *[1] * flat), deep


def low_rank_gradients(
    g: Tensor,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    block: Block,
    geometry: Geometry | None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of a low rank as two thin layers; `scale` is what the outputs were multiplied by. The old block gets none itself,
    but in a convolution with groups, whose weights are few."""
    rank = down.shape[0]
    if scale is not None:
        up = up * scale.to(up.dtype).view(-1, *[1] * (up.dim() - 1))
    if geometry is not None and geometry.groups > 1:
        whole = weight_gradient(g, x, down.new_empty(up.shape[0], *down.shape[1:]), geometry)
        old = block.old_out.take(whole, 0).flatten(1)
        thin = block.old_out.take(up, 0).flatten(1)
        by_up = old.mm(down.flatten(1).t())
        if scale is not None:
            by_up = by_up * block.old_out.take(scale, 0)[:, None].to(by_up.dtype)
        by_down = thin.t().mm(old).view_as(down)
    else:
        spread = pointwise(geometry)
        back = apply(g, up.transpose(0, 1), None, spread)
        by_down = weight_gradient(back, x, down, geometry)
        by_up = block.old_out.take(weight_gradient(g, apply(x, down, None, geometry), up, spread), 0).flatten(1)
        if scale is not None:
            by_up = by_up * block.old_out.take(scale, 0)[:, None].to(by_up.dtype)
    if block.old_in is not None:
        by_down = block.old_in.take(by_down, 1)
    return by_up, by_down.reshape(rank, -1)


def _scaled(scale: Tensor, block: Block, *grads: Tensor | None) -> list[Tensor | None]:
    """Gradients with respect to unscaled rows, columns and biases, from those with respect to scaled ones."""
    rows, cols, born = grads
    new, old = block.new_out.take(scale, 0), block.old_out.take(scale, 0)
    return [
        None if rows is None else rows * new.view(-1, *[1] * (rows.dim() - 1)),
        None if cols is None else cols * old.view(-1, *[1] * (cols.dim() - 1)),
        None if born is None else born * new,
    ]


def _scale_gradients(g: Tensor, out: Tensor, scaling: Scaling, channel: int) -> tuple[Tensor, Tensor]:
    """dγ = Σ g · y and dβ = Σ g, where y = (out − β) / γ is the layer's output before it was scaled.

    Where γ is 0 nothing is left of y, and dγ is said to be 0.
    """
    inverse = torch.where(scaling.scale == 0, 0.0, scaling.scale.reciprocal())
    if g.is_cuda and channel == 1 and g.dtype != torch.float64:
        # The reduction of a batch norm's backward is just this, in one pass over both tensors.
        _, _, by_scale, total = torch.batch_norm_backward_reduce(
            g, out, scaling.shift.float(), inverse.float(), scaling.scale.float(), False, True, True
        )
        return by_scale, total
    wide = scaling.scale.dtype
    if g.device.type == "cpu" and channel == 1 and g.dtype == out.dtype == wide and g.numel():
        # On a CPU so is that of one with given statistics, mean β and variance 1; of nothing it would divide by 0.
        _, by_scale, total = torch.ops.aten.native_batch_norm_backward(
            g, out, None, scaling.shift, torch.ones_like(scaling.shift), None, None, False, 0.0, [False, True, True]
        )
        return by_scale * inverse, total
    rest = [d for d in range(g.dim()) if d != channel]
    total = g.sum(rest, dtype=wide)
    return ((g * out).sum(rest, dtype=wide) - scaling.shift * total) * inverse, total


def grown(
    x: Tensor,
    parts: tuple[Tensor | None, Tensor | None, Tensor | None],
    weight: Tensor,
    bias: Tensor | None,
    block: Block,
    geometry: Geometry | None = None,
    scaling: tuple[Scaling, Tensor, Tensor] | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """A linear layer over the last dimension, or with a geometry a convolution in one, two or three dimensions.

    Gradients go to x and to the newborn `parts` (rows, columns, biases), whose values `weight` and `bias` already hold;
    with a scaling also to its learned scale and shift, with a low rank also to that.
    """
    folding, gamma, beta = scaling or (None, None, None)
    up, down, folded = (None, None, False) if low_rank is None else (low_rank.up, low_rank.down, low_rank.folded)
    args = (x, *parts, gamma, beta, up, down, weight, bias, block, geometry, folding, folded)
    out: Tensor = _Grown.apply(*args)  # type: ignore[no-untyped-call]
    return out


def _channel_dim(x: Tensor, geometry: Geometry | None) -> int:
    return x.dim() - 1 if geometry is None else x.dim() - 1 - len(geometry.stride)


def apply(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry | None) -> Tensor:
    """The plain layer."""
    if geometry is None:
        return F.linear(x, weight, bias)
    g = geometry
    zero = [0] * len(g.stride)
    return torch.convolution(x, weight, bias, g.stride, g.padding, g.dilation, False, zero, g.groups)


def input_gradient(g: Tensor, weight: Tensor, shape: torch.Size, geometry: Geometry | None) -> Tensor:
    """The gradient with respect to an input of this shape."""
    if geometry is None:
        return g.matmul(weight)
    # Only its shape and layout are read; a real tensor, since layouts are told from strides.
    layout = torch.channels_last if _channels_last(g) else torch.contiguous_format
    x = torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=layout)
    grad, _, _ = convolution_backward(g, x, weight, geometry, [True, False, False])
    return grad


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def weight_gradient(g: Tensor, x: Tensor, like: Tensor, geometry: Geometry | None) -> Tensor:
    """The gradient of a weight like this one, from x's channels to g's."""
    if geometry is None:
        return g.flatten(0, -2).t().mm(x.flatten(0, -2))
    if g.dtype == torch.bfloat16 and g.device.type == "cpu" and not cpu_has_bf16():
        # The library's stand-in adds up images in bfloat16, a hundredth off, and takes several times as long.
        g, x, like = g.float(), x.float(), like.float()
    if g.device.type == "cpu" and geometry.groups == 1 and max(like.shape[2:]) == 1 and max(geometry.stride) > 1:
        return _shortcut_gradient(g, x, geometry).view(like.shape)
    if g.device.type == "cpu" and any(
        p >= _TALL and 2 * p >= n for p, n in zip(geometry.padding, x.shape[2:], strict=True)
    ):
        # With kernels that reach across a whole image the library writes beside its memory (torch 2.13), unless it is
        # given the zeros around it.
        x = F.pad(x, [width for width in reversed(geometry.padding) for _ in range(2)])
        geometry = replace(geometry, padding=(0,) * len(geometry.stride))
    _, grad, _ = convolution_backward(g, x, like, geometry, [False, True, False])
    return grad


_TALL = 8
"""Padding from which kernels are that large."""


def _shortcut_gradient(g: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    """That of a convolution which reads single positions, some apart: a product of those. With channels last and few
    inputs, as newborn ones are, the library gets it wrong and writes beside its memory (torch 2.13)."""
    if any(geometry.padding):
        x = F.pad(x, [width for width in reversed(geometry.padding) for _ in range(2)])
    read = [slice(0, step * (size - 1) + 1, step) for step, size in zip(geometry.stride, g.shape[2:], strict=True)]
    x = x[(slice(None), slice(None), *read)]
    return g.transpose(0, 1).flatten(1).mm(x.transpose(0, 1).flatten(1).t())


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether convolutions of bfloat16 have kernels of their own on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) if torch.backends.mkldnn.is_available() else False


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
        return weight_gradient(block.new_out.take(g, 1), inputs, block.new_out.take(weight, 0), part), None
    whole = weight_gradient(g, x, weight, geometry)
    rows = block.new_out.take(whole, 0).clone() if need_rows else None
    cols = block.new_in.take(block.old_out.take(whole, 0), 1).clone() if need_cols else None
    return rows, cols


def convolution_backward(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The library's: gradients of the input, the weight and the bias, each if the mask asks for it."""
    zero = [0] * len(geometry.stride)
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        g, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, zero, geometry.groups, mask
    )
    return out
