# mypy: ignore-errors
"""Triton kernels for passes over all weights; `passes.py` says what each computes.

Sums are made in parts first, then of the parts, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeroforget.operators.passes import Gradient, Held
from zeroforget.operators.triton_layers import Shape, unit_of

_BLOCK = 2048
"""Weights that a program of `_spring` holds at a time."""
_PROGRAMS = 1056
"""How many programs share one tensor at the most: enough to fill a large GPU several times over."""


def spring(given: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[Tensor], Tensor]:
    """As `passes.spring`, of large tensors."""
    each = [_BLOCK * triton.cdiv(theta.numel(), _BLOCK * _PROGRAMS) for theta, _, _ in given]
    parts = [triton.cdiv(theta.numel(), n) for (theta, _, _), n in zip(given, each, strict=True)]
    partial = given[0][0].new_empty(sum(parts))
    forces = []
    for (theta, anchor, firm), n, part in zip(given, each, partial.split(parts), strict=True):
        forces.append(torch.empty_like(theta))
        with torch.cuda.device_of(theta):  # kernels are launched on the current device
            _spring[(len(part),)](theta, anchor, firm, forces[-1], part, theta.numel(), n, BLOCK=_BLOCK)
    return forces, partial.sum()


def free_squares(gradients: Sequence[Gradient]) -> Tensor:
    """As `passes.free_squares`."""
    matrices = [_rows(g) for g, _, _ in gradients]
    shapes = [Shape(*m.shape) for m in matrices]
    partial = matrices[0].new_empty(sum(s.parts * s.across for s in shapes))
    places = partial.split([s.parts * s.across for s in shapes])
    for (g, _, held), m, shape, part in zip(gradients, matrices, shapes, places, strict=True):
        first, along = _vectors(held, g)
        unit = unit_of(m.shape[1], m)
        with torch.cuda.device_of(g):
            _free_squares[(shape.parts, shape.across)](
                m, first, along, part, m.shape[0], m.shape[1] // unit, shape.each, shape.across,
                UNIT=unit, TILE=shape.tile, WIDTH=shape.width,
            )  # fmt: skip
    return partial.sum()


def restrain(g: Tensor, weight: Tensor, held: Held, scale: Tensor, decay: float) -> None:
    """As `passes.restrain`, of one gradient."""
    m, w = _rows(g), _rows(weight)
    first, along = _vectors(held, g)
    shape, unit = Shape(*m.shape), unit_of(m.shape[1], m, w)
    with torch.cuda.device_of(g):
        _restrain[(triton.cdiv(m.shape[0], shape.tile), shape.across)](
            m, w, first, along, scale, m.shape[0], m.shape[1] // unit, decay,
            DECAYS=decay != 0, UNIT=unit, TILE=shape.tile, WIDTH=shape.width,
        )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """As a matrix, in the order of memory: a row for each place along the first dimension. A vector is one row."""
    if x.dim() < 2:
        return x.view(1, -1)
    return x.view(len(x), -1) if x.is_contiguous() else x.permute(0, 2, 3, 1).view(len(x), -1)


def _vectors(held: Held, g: Tensor) -> tuple[Tensor, Tensor]:
    """What a weight's row says, and its column; a vector is one row."""
    return (held.rest, held.first) if g.dim() < 2 else (held.first, held.along(g))


@triton.jit
def _spring(theta, anchor, firm, force, partial, count, each, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, each, BLOCK):
        at = part.to(tl.int64) * each + step + tl.arange(0, BLOCK)
        inside = at < count
        away = tl.load(theta + at, mask=inside, other=0.0) - tl.load(anchor + at, mask=inside, other=0.0)
        pull = tl.load(firm + at, mask=inside, other=0.0) * away
        tl.store(force + at, pull, mask=inside)
        total += pull * away
    tl.store(partial + part, tl.sum(total, 0))


@triton.jit
def _free_squares(
    g, first, along, partial, rows, columns, each, across,
    UNIT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = columns * UNIT
    part = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    mine = tl.load(along + column, mask=exists, other=0.0)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(0, each, TILE):
        row = (part * each + step + tl.arange(0, TILE)).to(tl.int64)
        inside = (row < rows)[:, None] & exists[None, :]
        share = tl.minimum(tl.load(first + row, mask=row < rows, other=0.0)[:, None], mine[None, :])
        value = tl.load(g + row[:, None] * columns + column[None, :], mask=inside, other=0.0) * (1 - share)
        total += value * value
    tl.store(partial + part * across + tl.program_id(1), tl.sum(tl.sum(total, 1), 0))


@triton.jit
def _restrain(
    g, weight, first, along, scale, rows, columns, decay,
    DECAYS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = columns * UNIT
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    inside = (row < rows)[:, None] & exists[None, :]
    at = row[:, None] * columns + column[None, :]
    mine = tl.load(along + column, mask=exists, other=0.0)
    share = tl.minimum(tl.load(first + row, mask=row < rows, other=0.0)[:, None], mine[None, :])
    value = tl.load(g + at, mask=inside, other=0.0) * (1 - share) * tl.load(scale)
    if DECAYS:
        value -= decay * share * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(g + at, value, mask=inside)
