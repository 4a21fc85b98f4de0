# mypy: ignore-errors
"""Triton kernels for the passes over activations of a learning step; `reference.py` says what each computes.

A pass takes as long as its memory traffic, if a thread reads several features at once. So widths and distances that are
multiples of `LANES` are handed over in that unit: the compiler sees the multiplication, and knows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeroforget.operators.places import LANES, Affine, Places, Sums, Vectors, every, matrix

PROGRAMS = 528
"""How many programs share a pass with a sum: enough to fill a large GPU several times over."""
_TILE = 2048
"""Elements that a program holds at a time."""


def vectors(given: Affine) -> Vectors:
    """As `reference.vectors`."""
    bias, born, gamma, beta = given.bias, given.born, given.gamma, given.beta
    features = len(given.born_at)
    source = next(t for t in (bias, gamma) if t is not None)
    made = source.new_empty((3 if gamma is not None else 1, features), dtype=torch.float32)
    spare = source  # a pointer that is not read
    _vectors[(triton.cdiv(features, 256),)](
        spare if bias is None else bias,
        spare if born is None else born,
        spare if gamma is None else gamma,
        spare if beta is None else beta,
        given.born_at,
        given.covered_at,
        made,
        features,
        BIAS=bias is not None,
        BORN=born is not None,
        SCALED=gamma is not None,
        BLOCK=256,
    )
    return Vectors(made[1], made[2], made[0]) if gamma is not None else Vectors(shift=made[0])


def finish(y: Tensor, given: Vectors, relu: bool) -> None:
    """As `reference.finish`."""
    rows, columns = y.shape
    spare = y if given.shift is None else given.shift
    shape, unit = Grid(rows, columns), unit_of(columns, y)
    _finish[(triton.cdiv(rows, shape.tile), shape.across)](
        y,
        spare if given.scale is None else given.scale,
        spare,
        rows,
        columns // unit,
        SCALED=given.scale is not None,
        SHIFTED=given.shift is not None,
        RELU=relu,
        UNIT=unit,
        TILE=shape.tile,
        WIDTH=shape.width,
    )


def unfinish(g: Tensor, out: Tensor, given: Vectors, relu: bool) -> tuple[Tensor, Callable[[], Sums] | None]:
    """As `reference.unfinish`, where there is something to do."""
    rows, columns = g.shape
    scaled = given.scale is not None
    gy = g.new_empty((rows, columns))
    shape, unit = Grid(rows, columns), unit_of(columns, g, out)
    partial = g.new_empty((2, shape.parts, columns) if scaled else (1,), dtype=torch.float32)
    _unfinish[(shape.parts, shape.across)](
        g,
        out,
        g if given.scale is None else given.scale,
        gy,
        partial,
        rows,
        columns // unit,
        shape.each,
        shape.parts,
        SCALED=scaled,
        RELU=relu,
        UNIT=unit,
        TILE=shape.tile,
        WIDTH=shape.width,
    )
    scale, beta = given.scale, given.beta
    return gy, None if scale is None or beta is None else lambda: _summed(partial, scale, beta)


def _summed(partial: Tensor, scale: Tensor, beta: Tensor) -> Sums:
    """The gradients that are sums over rows, from the sums of parts of them."""
    _, parts, columns = partial.shape
    total = partial.new_empty((3, columns))
    _sums[(triton.cdiv(columns, 16),)](partial, scale, beta, total, parts, columns, SCALED=True, TILE=128, WIDTH=16)
    return Sums(total[1], total[0], total[2])


def gather(x: Tensor, places: Places, columns: int, sums: bool) -> tuple[Tensor, Tensor | None]:
    """As `reference.gather`."""
    out = x.new_empty((x.shape[0], columns))
    total = _pass(x, places, out, columns, sums)
    return out, None if total is None else total[: len(places)]


def totals(x: Tensor) -> Tensor:
    """As `reference.totals`."""
    return _pass(x, every(x.shape[1]), None, x.shape[1], True)


def _pass(x: Tensor, places: Places, out: Tensor | None, columns: int, sums: bool) -> Tensor | None:
    """Over these columns of x, and zeros up to `columns`: they go to `out`, and their sums are returned."""
    rows, chosen = x.shape[0], len(places)
    shape, first = Grid(rows, columns), places.start or 0
    together = places.start is not None and first % LANES == 0
    unit = unit_of(columns, x[:, first:]) if together else 1
    partial = x.new_empty((shape.parts, columns) if sums else (1,), dtype=torch.float32)
    each = LANES if columns % LANES == 0 else 1
    _gather[(shape.parts, shape.across)](
        x,
        x if places.start is not None else places.on(x.device),
        x if out is None else out,
        partial,
        rows,
        x.stride(0) // unit,
        first // unit,
        chosen,
        columns // unit if unit > 1 else chosen,
        columns // each,
        shape.each,
        RUN=places.start is not None,
        KEEP=out is not None,
        SUMS=sums,
        UNIT=unit,
        EACH=each,
        TILE=shape.tile,
        WIDTH=shape.width,
    )
    return added(partial) if sums else None


def added(partial: Tensor) -> Tensor:
    """The sums of its columns, always in the same order."""
    parts, columns = partial.shape
    total = partial.new_empty(columns)
    _sums[(triton.cdiv(columns, 16),)](
        partial, partial, partial, total, parts, columns, SCALED=False, TILE=128, WIDTH=16
    )
    return total


def pool(x: Tensor, out: Tensor) -> None:
    """As `reference.pool`, into `out`."""
    _pooling(x, x, out, back=False)


def unpool(g: Tensor, x: Tensor, grad: Tensor) -> None:
    """As `reference.unpool`, into `grad`."""
    _pooling(x, g, grad, back=True)


def _pooling(x: Tensor, g: Tensor, out: Tensor, *, back: bool) -> None:
    n, channels, height, width = x.shape
    places = n * (height // 2) * (width // 2)
    shape, unit = Grid(places, channels), unit_of(channels, matrix(x), matrix(g))
    if places:
        _pool[(triton.cdiv(places, shape.tile), shape.across)](
            x,
            g,
            out,
            places,
            channels // unit,
            height // 2,
            width // 2,
            height,
            width,
            BACK=back,
            UNIT=unit,
            TILE=shape.tile,
            WIDTH=shape.width,
        )


def unit_of(columns: int, *matrices: Tensor) -> int:
    """How many columns may be read at once, where each matrix is read up to `columns` from where it begins."""

    def lies_well(m: Tensor) -> bool:
        end = m.storage_offset() + (m.shape[0] - 1) * m.stride(0) + columns
        inside = end * m.element_size() <= m.untyped_storage().nbytes()
        return inside and m.stride(0) % LANES == 0 and m.data_ptr() % 16 == 0

    return LANES if columns % LANES == 0 and all(map(lies_well, matrices)) else 1


class Grid:
    """How a pass over a matrix is shared out: `parts` × `across` programs, each of which takes `each` rows, a tile of
    `tile` × `width` at a time."""

    def __init__(self, rows: int, columns: int) -> None:
        self.width = min(64, max(8, triton.next_power_of_2(columns)))
        self.across = triton.cdiv(columns, self.width)
        self.tile = _TILE // self.width
        self.each = self.tile * max(1, triton.cdiv(rows * self.across, PROGRAMS * self.tile))
        self.parts = triton.cdiv(rows, self.each)


@triton.jit
def _vectors(
    bias, born, gamma, beta, born_at, covered_at, made, features,
    BIAS: tl.constexpr, BORN: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < features
    shift = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        shift = tl.load(bias + i, mask=inside).to(tl.float32)
        if BORN:
            at = tl.load(born_at + i, mask=inside, other=-1)
            shift = tl.where(at >= 0, tl.load(born + at, mask=at >= 0, other=0.0).to(tl.float32), shift)
    if SCALED:
        at = tl.load(covered_at + i, mask=inside, other=-1)
        scale = tl.load(gamma + at, mask=at >= 0, other=1.0).to(tl.float32)
        moved = tl.load(beta + at, mask=at >= 0, other=0.0).to(tl.float32)
        shift = shift * scale + moved
        tl.store(made + features + i, scale, mask=inside)
        tl.store(made + 2 * features + i, moved, mask=inside)
    tl.store(made + i, shift, mask=inside)


@triton.jit
def _finish(
    y, scale, shift, rows, columns,
    SCALED: tl.constexpr, SHIFTED: tl.constexpr, RELU: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = columns * UNIT
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    inside = (row < rows)[:, None] & exists[None, :]
    at = y + row[:, None] * columns + column[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        value = value * tl.load(scale + column, mask=exists, other=0.0)[None, :]
    if SHIFTED:
        value = value + tl.load(shift + column, mask=exists, other=0.0)[None, :]
    if RELU:
        value = tl.where(value < 0.0, 0.0, value)  # tl.maximum would hide NaN
    tl.store(at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _unfinish(
    g, out, scale, gy, partial, rows, columns, each, parts,
    SCALED: tl.constexpr, RELU: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = columns * UNIT
    part = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    if SCALED:
        factor = tl.load(scale + column, mask=exists, other=0.0)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    moment = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(0, each, TILE):
        row = (part * each + step + tl.arange(0, TILE)).to(tl.int64)
        inside = (row < rows)[:, None] & exists[None, :]
        at = row[:, None] * columns + column[None, :]
        m = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            m = tl.where(value > 0, m, 0.0)
        if SCALED:
            total += m
            moment += m * value
            m = m * factor[None, :]
        tl.store(gy + at, m.to(gy.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(partial + part * columns + column, tl.sum(total, 0), mask=exists)
        tl.store(partial + (parts + part) * columns + column, tl.sum(moment, 0), mask=exists)


@triton.jit
def _gather(
    x, index, out, partial, rows, stride, start, chosen, readable, columns, each,
    RUN: tl.constexpr, KEEP: tl.constexpr, SUMS: tl.constexpr,
    UNIT: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    stride, start, readable, columns = stride * UNIT, start * UNIT, readable * UNIT, columns * EACH
    part = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    taken = column < chosen
    source = start + column
    if not RUN:
        source = tl.load(index + column, mask=taken, other=0).to(tl.int32)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(0, each, TILE):
        row = (part * each + step + tl.arange(0, TILE)).to(tl.int64)
        exists = (row < rows)[:, None]
        inside = exists & (column < readable)[None, :]
        value = tl.load(x + row[:, None] * stride + source[None, :], mask=inside, other=0.0)
        value = tl.where(taken[None, :], value, 0.0)
        if KEEP:
            tl.store(out + row[:, None] * columns + column[None, :], value, mask=exists & (column < columns)[None, :])
        if SUMS:
            total += value.to(tl.float32)
    if SUMS:
        tl.store(partial + part * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def _sums(
    partial, scale, beta, made, parts, columns,
    SCALED: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    exists = column < columns
    first = tl.zeros((TILE, WIDTH), tl.float32)
    second = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(0, parts, TILE):
        row = step + tl.arange(0, TILE)
        inside = (row < parts)[:, None] & exists[None, :]
        at = row[:, None] * columns + column[None, :]
        first += tl.load(partial + at, mask=inside, other=0.0)
        if SCALED:
            second += tl.load(partial + parts * columns + at, mask=inside, other=0.0)
    total = tl.sum(first, 0)
    tl.store(made + column, total, mask=exists)
    if SCALED:
        factor = tl.load(scale + column, mask=exists, other=1.0)
        centre = tl.load(beta + column, mask=exists, other=0.0)
        divided = (tl.sum(second, 0) - centre * total) / tl.where(factor == 0.0, 1.0, factor)
        tl.store(made + columns + column, tl.where(factor == 0.0, 0.0, divided), mask=exists)
        tl.store(made + 2 * columns + column, factor * total, mask=exists)


@triton.jit
def _pool(
    x, g, out, places, channels, rows, columns, height, width,
    BACK: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    channels = channels * UNIT
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    channel = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = (place < places)[:, None] & (channel < channels)
    column, row, image = place % columns, (place // columns) % rows, place // (columns * rows)
    corner = ((image * height + 2 * row) * width + 2 * column)[:, None]
    best = tl.load(x + corner * channels + channel, mask=inside, other=0.0)
    which = tl.zeros((TILE, WIDTH), tl.int32)
    for k in tl.static_range(1, 4):
        value = tl.load(x + (corner + (k // 2) * width + k % 2) * channels + channel, mask=inside, other=0.0)
        better = (value > best) | (value != value)  # NaN is larger than anything, as for torch
        best = tl.where(better, value, best)
        which = tl.where(better, k, which)
    if BACK:
        gradient = tl.load(g + place[:, None] * channels + channel, mask=inside, other=0.0)
        for k in tl.static_range(4):
            part = tl.where(which == k, gradient, 0.0).to(out.dtype.element_ty)
            tl.store(out + (corner + (k // 2) * width + k % 2) * channels + channel, part, mask=inside)
    else:
        tl.store(out + place[:, None] * channels + channel, best, mask=inside)
