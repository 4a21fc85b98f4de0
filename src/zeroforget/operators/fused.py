"""A layer's product, bias, feature normalization and rectifier as one operator, for GPUs.

The product is the library's; everything else of a step is one pass over the outputs there and one back
(`reference.py`). The gradient of the newborn blocks reads copies of a few channels, padded to what matrix units like;
the gradient with respect to all outputs is read whole, since a slice of its channels would be a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroforget.operators import reference as kernels
from zeroforget.operators.places import LANES, Affine, Places, matrix
from zeroforget.operators.plain import (
    Block,
    Geometry,
    LowRank,
    apply,
    autocast_dtype,
    cast,
    input_gradient,
    low_rank_gradients,
    thin_layers,
    weight_gradient,
)
from zeroforget.operators.side_streams import Beside, Origin

_FROZEN = 0.5
"""Where a smaller share of a weight than this is frozen, its gradient is found in one product, not in two."""


@dataclass(frozen=True, eq=False)
class FusedPlan:
    """What a layer computes, apart from its inputs: all that stays from step to step."""

    block: Block
    covered: Places
    geometry: Geometry | None
    relu: bool


def fits(x: Tensor, geometry: Geometry | None) -> bool:
    """Whether this is a case for the fused operator."""
    if not kernels.on_gpu(x):
        return False
    if geometry is None:
        return x.dim() == 2
    return x.dim() == 4 and geometry.groups == 1 and kernels.lies_side_by_side(x)


def fused(
    x: Tensor,
    rows: Tensor | None,
    cols: Tensor | None,
    weight: Tensor,
    affine: Affine,
    plan: FusedPlan,
    low_rank: LowRank | None = None,
) -> Tensor:
    """relu(γ (W x + b) + β), each part where there is one. `weight` holds the values of `rows` and `cols` already, and
    of a low rank that is folded in."""
    up, down, folded = (None, None, False) if low_rank is None else (low_rank.up, low_rank.down, low_rank.folded)
    args = (x, rows, cols, affine.born, affine.gamma, affine.beta, up, down, weight, affine, plan, folded)
    with torch.cuda.device_of(x):  # kernels are launched on the current device, be it x's or not
        out: Tensor = _Fused.apply(*args)  # type: ignore[no-untyped-call]
    return out


class _Fused(torch.autograd.Function):
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
        affine: Affine,
        plan: FusedPlan,
        folded: bool,
    ) -> Tensor:
        ctx.plan, ctx.input_dtype, ctx.shape, ctx.folded = plan, x.dtype, x.shape, folded
        ctx.given = [Origin.of(part) for part in (rows, cols, born, gamma, beta, up, down)]
        dtype = autocast_dtype(x)
        x, weight = cast(x, dtype), cast(weight, dtype)
        out, thin = apply(x, weight, None, plan.geometry), None
        if up is not None and down is not None:
            thin = thin_layers(up, down, weight, plan.block)
            if not folded:
                out = out.addmm_(apply(x, thin[1], None, None), thin[0].t())
        if plan.geometry is not None:
            out = out.contiguous(memory_format=torch.channels_last)
        ctx.vectors = kernels.vectors(affine)
        kernels.finish(matrix(out), ctx.vectors, plan.relu)
        # The inputs that a gradient needs: all of them for new rows or a low rank, else only the new ones.
        kept: Tensor | None = x
        ctx.whole = rows is not None or up is not None
        if not ctx.whole:
            kept = None if cols is None else _channels(x, plan.block.new_in, plan)[0]
        read = plan.relu or gamma is not None
        # The newborn tensors are saved so that autograd notices a step taken between forward and backward.
        newborn = (rows, cols, born, gamma, beta, up, down)
        ctx.save_for_backward(kept, weight, out if read else None, *(thin or (None, None)), *newborn)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out, up, down, *_ = ctx.saved_tensors
        wanted = zip(ctx.given, ctx.needs_input_grad[1:8], strict=True)
        rows, cols, born, gamma, beta, *leaning = (part if needed else None for part, needed in wanted)
        plan: FusedPlan = ctx.plan
        block, geometry = plan.block, plan.geometry
        g = kernels.side_by_side(g)
        left = None if out is None else matrix(out)
        flat, sums = kernels.unfinish(matrix(g), left, ctx.vectors, plan.relu)
        gy = kernels.like(flat, g)
        whole = by_gamma = by_beta = by_cols = grad_x = None
        at_once = rows is not None and cols is not None and _at_once(block, ctx.shape[1])
        with Beside(g) as beside:
            beside.reads(gy, x, sums, up, down)
            with beside.aside():
                want = rows is not None and not at_once, born is not None and sums is None
                by_rows, by_born = _by_new_outputs(gy, x, weight, plan, *want)
                if at_once:
                    whole = _weight_part(gy, x, weight, geometry)
                    by_rows = block.new_out.take(whole, 0)
                if sums is not None:
                    by = sums()
                    by_gamma, by_beta = plan.covered.take(by.gamma, 0), plan.covered.take(by.beta, 0)
                    by_born = block.new_out.take(by.bias, 0)
                found = (rows, by_rows), (born, by_born), (gamma, by_gamma), (beta, by_beta)
                grad_rows, *others = [beside.give(given, by) for given, by in found]
            with beside.aside(0 if at_once else 1):
                if whole is not None:
                    by_cols = block.new_in.take(block.old_out.take(whole, 0), 1)
                elif cols is not None:
                    new_x = _channels(x, block.new_in, plan)[0] if ctx.whole else x
                    by_cols = block.old_out.take(_weight_part(gy, new_x, weight, geometry), 0)
                    by_cols = by_cols[:, : len(block.new_in)]
                grad_cols = beside.give(cols, by_cols)
            with beside.aside():
                steps: tuple[Tensor | None, Tensor | None] = (None, None)
                if up is not None:
                    steps = low_rank_gradients(gy, x, up, down, block, geometry)
                grad_steps = [beside.give(given, by) for given, by in zip(leaning, steps, strict=True)]
            if ctx.needs_input_grad[0]:
                grad_x = input_gradient(gy, weight, ctx.shape, geometry)
                if up is not None and not ctx.folded:
                    grad_x = grad_x.addmm_(gy.mm(up), down)
                grad_x = grad_x.to(ctx.input_dtype)
        return (grad_x, grad_rows, grad_cols, *others, *grad_steps, None, None, None, None)


def _by_new_outputs(
    gy: Tensor, x: Tensor | None, weight: Tensor, plan: FusedPlan, rows: bool, born: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of new outputs' weights, from all that x has, and of their biases, each if asked for."""
    if not rows and not born:
        return None, None
    new, total = _channels(gy, plan.block.new_out, plan, sums=born)
    if not rows:
        return None, total
    assert x is not None
    return _weight_part(new, x, weight, plan.geometry)[: len(plan.block.new_out)], total


def _at_once(block: Block, inputs: int) -> bool:
    """Whether the gradient of the whole weight takes less time than those of its two newborn blocks."""
    outputs = len(block.new_out) + len(block.old_out)
    return len(block.old_out) * (inputs - len(block.new_in)) < _FROZEN * outputs * inputs


def _channels(x: Tensor, places: Places, plan: FusedPlan, *, sums: bool = False) -> tuple[Tensor, Tensor | None]:
    """These channels of x, and for a convolution some of zeros behind them; their sums if asked for."""
    if plan.geometry is None:
        part = places.take(x, 1)
        return part, part.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)) if sums else None
    columns = -(-len(places) // LANES) * LANES
    rows, total = kernels.gather(matrix(x), places, columns, sums)
    return kernels.like(rows, x), total


def _weight_part(g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry | None) -> Tensor:
    """The gradient of the weight from x's channels to g's."""
    shape = (g.shape[1], x.shape[1], *weight.shape[2:])
    layout = torch.contiguous_format if geometry is None else torch.channels_last
    return weight_gradient(g, x, torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=layout), geometry)
