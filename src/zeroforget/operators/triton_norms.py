# mypy: ignore-errors
"""Triton kernels for batch normalization while training, a rectifier in the same pass; `reference.py` says what
each computes.

Forward takes two passes over the data and back two more. Sums over positions are made in parts first, then of the
parts, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeroforget.operators.places import Moments, Norm
from zeroforget.operators.triton_layers import Grid, added, unit_of


def standardize(x: Tensor, y: Tensor, given: Norm, relu: bool) -> Moments:
    """As `reference.standardize`."""
    rows, columns = x.shape
    shape, unit = Grid(rows, columns), unit_of(columns, x, y)
    partial = x.new_empty((2, shape.parts, columns), dtype=torch.float32)
    _parts[(shape.parts, shape.across)](
        x, partial, rows, columns // unit, shape.each, shape.parts, UNIT=unit, TILE=shape.tile, WIDTH=shape.width
    )
    made = x.new_empty((2, columns), dtype=torch.float32)
    tracked = given.mean is not None
    _moments[(triton.cdiv(columns, 16),)](
        partial, made, given.mean if tracked else made, given.var if tracked else made,
        rows, columns, shape.each, shape.parts, given.eps, given.momentum,
        TRACKED=tracked, TILE=128, WIDTH=16,
    )  # fmt: skip
    _standardize[(triton.cdiv(rows, shape.tile), shape.across)](
        x, y, made, given.weight, given.bias, rows, columns // unit,
        RELU=relu, UNIT=unit, TILE=shape.tile, WIDTH=shape.width,
    )  # fmt: skip
    return Moments(made[0], made[1])


def unstandardize(
    g: Tensor, x: Tensor, moments: Moments, given: Norm, relu: bool, wants_x: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """As `reference.unstandardize`."""
    rows, columns = x.shape
    shape, unit = Grid(rows, columns), unit_of(columns, x, g)
    partial = x.new_empty((shape.parts, 2 * columns), dtype=torch.float32)
    _parts_back[(shape.parts, shape.across)](
        g, x, moments.mean, moments.inverse, given.weight, given.bias, partial,
        rows, columns // unit, shape.each, RELU=relu, UNIT=unit, TILE=shape.tile, WIDTH=shape.width,
    )  # fmt: skip
    total = added(partial)
    if not wants_x:
        return None, total[columns:], total[:columns]
    gx = x.new_empty((rows, columns))
    _unstandardize[(triton.cdiv(rows, shape.tile), shape.across)](
        g, x, moments.mean, moments.inverse, given.weight, given.bias, total, gx,
        rows, columns // unit, RELU=relu, UNIT=unit, TILE=shape.tile, WIDTH=shape.width,
    )  # fmt: skip
    return gx, total[columns:], total[:columns]


@triton.jit
def _parts(
    x, partial, rows, columns, each, parts,
    UNIT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The mean of each part and the sum of squares around it. Values are counted from the part's first one: in sums of
    what is far from zero its differences would be lost."""
    columns = columns * UNIT
    part = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    begin = (part * each).to(tl.int64)
    pivot = tl.load(x + begin * columns + column, mask=exists, other=0.0).to(tl.float32)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    square = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(0, each, TILE):
        row = begin + step + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & exists[None, :]
        value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - pivot[None, :], 0.0)
        total += value
        square += value * value
    count = tl.minimum(each, rows - part * each).to(tl.float32)
    moved = tl.sum(total, 0)
    around = tl.sum(square, 0) - moved * moved / count
    tl.store(partial + part * columns + column, pivot + moved / count, mask=exists)
    tl.store(partial + (parts + part) * columns + column, tl.where(around < 0.0, 0.0, around), mask=exists)


@triton.jit
def _moments(
    partial, made, mean, var, rows, columns, each, parts, eps, momentum,
    TRACKED: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    first = tl.load(partial + column, mask=exists, other=0.0)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(0, parts, TILE):
        row = step + tl.arange(0, TILE)
        inside = (row < parts)[:, None] & exists[None, :]
        count = tl.minimum(each, rows - row * each).to(tl.float32)
        off = tl.load(partial + row[:, None] * columns + column[None, :], mask=inside, other=0.0) - first[None, :]
        total += tl.where(inside, count[:, None] * off, 0.0)
    middle = first + tl.sum(total, 0) / rows
    square = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(0, parts, TILE):
        row = step + tl.arange(0, TILE)
        inside = (row < parts)[:, None] & exists[None, :]
        count = tl.minimum(each, rows - row * each).to(tl.float32)
        at = row[:, None] * columns + column[None, :]
        off = tl.load(partial + at, mask=inside, other=0.0) - middle[None, :]
        own = tl.load(partial + parts * columns + at, mask=inside, other=0.0)
        square += tl.where(inside, own + count[:, None] * off * off, 0.0)
    around = tl.sum(square, 0)
    tl.store(made + column, middle, mask=exists)
    tl.store(made + columns + column, 1.0 / tl.sqrt(around / rows + eps), mask=exists)
    if TRACKED:
        before = tl.load(mean + column, mask=exists, other=0.0)
        tl.store(mean + column, (1.0 - momentum) * before + momentum * middle, mask=exists)
        before = tl.load(var + column, mask=exists, other=0.0)
        tl.store(var + column, (1.0 - momentum) * before + momentum * (around / (rows - 1)), mask=exists)


@triton.jit
def _standardize(
    x, y, made, weight, bias, rows, columns,
    RELU: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = columns * UNIT
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    middle = tl.load(made + column, mask=exists, other=0.0)
    scale = tl.load(made + columns + column, mask=exists, other=0.0)
    scale = scale * tl.load(weight + column, mask=exists, other=0.0)
    shift = tl.load(bias + column, mask=exists, other=0.0)
    inside = (row < rows)[:, None] & exists[None, :]
    at = row[:, None] * columns + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = (value - middle[None, :]) * scale[None, :] + shift[None, :]
    if RELU:
        value = tl.where(value < 0.0, 0.0, value)  # tl.maximum would hide NaN
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _parts_back(
    g, x, mean, inverse, weight, bias, partial, rows, columns, each,
    RELU: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of each part the sums of the gradient, and of the gradient times what was standardized."""
    columns = columns * UNIT
    part = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    middle = tl.load(mean + column, mask=exists, other=0.0)
    spread = tl.load(inverse + column, mask=exists, other=0.0)
    scale = spread * tl.load(weight + column, mask=exists, other=0.0)
    shift = tl.load(bias + column, mask=exists, other=0.0)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    moment = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(0, each, TILE):
        row = (part * each + step + tl.arange(0, TILE)).to(tl.int64)
        inside = (row < rows)[:, None] & exists[None, :]
        at = row[:, None] * columns + column[None, :]
        m = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        off = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        off = tl.where(inside, off - middle[None, :], 0.0)
        if RELU:
            m = tl.where(off * scale[None, :] + shift[None, :] > 0.0, m, 0.0)
        total += m
        moment += m * off
    sums = partial + part * 2 * columns + column
    tl.store(sums, tl.sum(total, 0), mask=exists)
    tl.store(sums + columns, tl.sum(moment, 0) * spread, mask=exists)


@triton.jit
def _unstandardize(
    g, x, mean, inverse, weight, bias, total, gx, rows, columns,
    RELU: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = columns * UNIT
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    middle = tl.load(mean + column, mask=exists, other=0.0)
    spread = tl.load(inverse + column, mask=exists, other=0.0)
    scale = spread * tl.load(weight + column, mask=exists, other=0.0)
    shift = tl.load(bias + column, mask=exists, other=0.0)
    level = tl.load(total + column, mask=exists, other=0.0) / rows
    slope = tl.load(total + columns + column, mask=exists, other=0.0) * spread / rows
    inside = (row < rows)[:, None] & exists[None, :]
    at = row[:, None] * columns + column[None, :]
    m = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    off = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - middle[None, :]
    if RELU:
        m = tl.where(off * scale[None, :] + shift[None, :] > 0.0, m, 0.0)
    m = (m - level[None, :] - off * slope[None, :]) * scale[None, :]
    tl.store(gx + at, m.to(gx.dtype.element_ty), mask=inside)
