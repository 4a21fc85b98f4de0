"""Rules of operators that only move features about: views, permutations, concatenation, cuts and look-ups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroforget.axes.labels import Axis, Clash, Prod, Term, axes, cut, product, resolve, size, split, total, unify
from zeroforget.axes.trace import Arguments, Labels, Watcher, dimension, rule


@rule(
    "view reshape _unsafe_view _reshape_alias flatten unflatten view_as reshape_as ravel atleast_1d atleast_2d "
    "atleast_3d"
)
def _view(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Regroup factors in row-major order; a factor wider than what is asked for is split."""
    factors: list[Term] = []
    for term in w.of(given["self"]):
        whole = resolve(term)
        factors += whole.factors if isinstance(whole, Prod) else (whole,)
    labels: list[Term] = []
    for n in outs[0].shape:
        group: list[Term] = []
        have = 1
        while have < n:
            if not factors:
                raise Clash("the view does not line up")
            factor = resolve(factors.pop(0))
            if have * size(factor) > n:
                if n % have:
                    raise Clash("the view cuts through a feature axis")
                factor, rest = split(factor, n // have)
                factors.insert(0, rest)
            group.append(factor)
            have *= size(factor)
        labels.append(product([resolve(f) for f in group]))
    if math.prod(size(f) for f in factors) != 1:
        raise Clash("the view does not line up")
    single = [f for f in map(resolve, factors) if not isinstance(f, int)]
    if single and labels:  # axes of one feature are left over: the last dimension takes them
        labels[-1] = product([resolve(labels[-1]), *single])
    return [tuple(labels)]


@rule("permute transpose t swapaxes swapdims movedim moveaxis numpy_T mT adjoint")
def _permute(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    order = list(range(len(x)))
    if outs[0].dim() == len(x) and not (given.keys() - {"self"}):  # .T, .mT
        order = [*order[:-2], *reversed(order[-2:])] if len(x) > 1 else order
    elif isinstance(given.get("dims"), (list, tuple)):
        order = [dimension(d, len(x)) for d in given["dims"]]
    elif "source" in given:
        source, target = given["source"], given["destination"]
        moves = [(source, target)] if isinstance(source, int) else list(zip(source, target, strict=True))
        moved = {dimension(b, len(x)): dimension(a, len(x)) for a, b in moves}
        rest = iter(i for i in order if i not in moved.values())
        order = [moved[i] if i in moved else next(rest) for i in range(len(x))]
    else:
        pair = [given[k] for k in ("dim0", "dim1", "axis0", "axis1") if k in given] or [0, -1]
        a, b = (dimension(d, len(x)) for d in pair)
        order[a], order[b] = order[b], order[a]
    return [tuple(x[i] for i in order)]


@rule("squeeze")
def _squeeze(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    chosen = given.get("dim", range(len(x)))
    dims = {dimension(d, len(x)) for d in ([chosen] if isinstance(chosen, int) else chosen)}
    w.still(*(term for i, term in enumerate(x) if i in dims and size(term) == 1))
    return [tuple(term for i, term in enumerate(x) if not (i in dims and size(term) == 1))]


@rule("unsqueeze")
def _unsqueeze(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = list(w.of(given["self"]))
    x.insert(dimension(given["dim"], len(x) + 1), 1)
    return [tuple(x)]


@rule("expand expand_as")
def _expand(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x, shape = w.of(given["self"]), outs[0].shape
    old: list[Term] = [*[1] * (len(shape) - len(x)), *x]
    w.still(*(term for term, n in zip(old, shape, strict=True) if size(term) != n))
    new = list(w.of(given["other"]) if "other" in given else shape)
    if (heads := w.heads) is not None and len(new) == 4 and old[1] == 1 and new[1] == size(heads):
        new[1] = heads  # a mask for each of torch's own heads
    if not given["self"].is_floating_point():  # places, the same for all features that they will meet
        new = [Axis(n) if isinstance(n, int) and n > 1 else n for n in new]
    return [tuple(term if size(term) == size(n) else n for term, n in zip(old, new, strict=True))]


@rule("cat concat concatenate")
def _cat(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    parts = [w.of(t) for t in given["tensors"] if t.shape != (0,)]
    dim = dimension(given.get("dim", 0), len(parts[0]))
    for other in parts[1:]:
        for i, (a, b) in enumerate(zip(parts[0], other, strict=True)):
            if i != dim:
                unify(a, b)
    joined = total([resolve(part[dim]) for part in parts])
    return [(*parts[0][:dim], joined, *parts[0][dim + 1 :])]


@rule("hstack vstack row_stack column_stack")
def _side_by_side(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    if min(t.dim() for t in given["tensors"]) < 2:
        raise Clash("vectors are put side by side")
    down = w.calls[-1][0] in {"vstack", "row_stack"}
    return _cat(w, {"tensors": given["tensors"], "dim": 0 if down else 1}, outs)


@rule("view_as_complex view_as_real")
def _complex(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    if outs[0].dim() > len(x):
        return [(*x, 2)]
    w.still(x[-1])
    return [x[:-1]]


@rule("index_add index_copy scatter scatter_add scatter_reduce index_reduce index_fill")
def _put_along(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Rows go to places along one dimension, which stays; the other dimensions meet."""
    x, dim = w.of(given["self"]), given["dim"] % given["self"].dim()
    for key in ("source", "src", "index"):
        other = given.get(key)
        if isinstance(other, Tensor) and other.dim() == len(x):
            for i, (a, b) in enumerate(zip(x, w.of(other), strict=True)):
                if i == dim:
                    w.still(a, b)
                else:
                    unify(a, b)
    w.still(x[dim])
    return [x]


@rule("index_put _index_put_impl")
def _put_at(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Rows go to places along the first dimensions, which stay; the others meet."""
    x, places = w.of(given["self"]), [p for p in given["indices"] if p is not None]
    used = sum(p.dim() if p.dtype == torch.bool else 1 for p in places)
    if len(places) != len(given["indices"]):
        raise Clash("places along later dimensions")
    w.still(*x[:used])
    values = w.of(given["values"])
    for term, value in zip(reversed(x[used:]), reversed(values), strict=False):
        if size(value) == size(term):
            unify(term, value)
    w.still(*values[: max(0, len(values) - len(x) + used)])
    return [x]


@rule("chunk split split_with_sizes tensor_split")
def _split(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    dim = dimension(given.get("dim", 0), len(x))
    pieces = cut(x[dim], [o.shape[dim] for o in outs])
    if "chunks" in given and len({size(p) for p in pieces}) == 1:
        for piece in pieces[1:]:  # so many equal parts: they grow by the same number
            unify(pieces[0], piece)
    return [(*x[:dim], piece, *x[dim + 1 :]) for piece in pieces]


@rule("slice narrow")
def _slice(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    dim = dimension(given.get("dim", 0), len(x))
    n, taken, start = size(x[dim]), outs[0].shape[dim], given.get("start") or 0
    if taken == n:
        return [x]
    if not any(axes(x[dim])):
        return [(*x[:dim], taken, *x[dim + 1 :])]
    if given.get("step", 1) != 1 or not taken:  # an empty end: a width is written down
        w.still(x[dim])
        return [(*x[:dim], taken, *x[dim + 1 :])]
    start = dimension(int(start), n)
    sizes = [start, taken, n - start - taken]
    pieces = dict(zip([i for i, s in enumerate(sizes) if s], cut(x[dim], [s for s in sizes if s]), strict=True))
    return [(*x[:dim], pieces[1], *x[dim + 1 :])]


@rule("select unbind")
def _select(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Things that are picked out by their place are not features of one kind: their number stays, if they are used for
    more than their shape."""
    x = w.of(given["self"])
    dim = dimension(given.get("dim", 0), len(x))
    w.still_once_read(outs, x[dim])
    return [(*x[:dim], *x[dim + 1 :])] * len(outs)


@rule("stack")
def _stack(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    parts = [w.of(t) for t in given["tensors"]]
    for other in parts[1:]:
        for a, b in zip(parts[0], other, strict=True):
            unify(a, b)
    out = list(parts[0])
    out.insert(dimension(given.get("dim", 0), len(out) + 1), len(parts))
    return [tuple(out)]


@rule("repeat tile")
def _repeat(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """All of a dimension again and again: (times, dimension)."""
    x, shape = w.of(given["self"]), outs[0].shape
    old: list[Term] = [*[1] * (len(shape) - len(x)), *x]
    return [tuple(product([n // size(term), resolve(term)]) for term, n in zip(old, shape, strict=True))]


@rule("repeat_interleave")
def _interleave(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x, dim = w.of(given["self"]), given.get("dim")
    if dim is None or not isinstance(given.get("repeats"), int):
        raise Clash("a repetition of single elements")
    dim = dimension(dim, len(x))
    return [(*x[:dim], product([resolve(x[dim]), given["repeats"]]), *x[dim + 1 :])]


@rule("roll flip cumsum cumprod sort argsort topk index_select gather take_along_dim tril triu unfold fft_fft diff")
def _along(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """The places along some dimensions matter: features there cannot be added to, those elsewhere can."""
    x = w.of(given["self"])
    chosen = next((given[k] for k in ("dims", "dim", "dimension") if given.get(k) is not None), [-2, -1])
    dims: list[int] = [chosen] if isinstance(chosen, int) else list(chosen) or list(range(len(x)))
    for d in dims:
        if any(axis.writers for axis in axes(x[dimension(d, len(x))])):
            raise Clash("the order of features matters to it")
        w.still(x[dimension(d, len(x))])
    moved = {dimension(d, len(x)) for d in dims}
    return [tuple(o.shape[i] if i in moved or i >= len(x) else x[i] for i in range(o.dim())) for o in outs]


@rule("index _unsafe_index")
def _index(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Some dimensions are looked up by tensors of places; the others move on."""
    x, places = w.of(given["self"]), list[Tensor | None]()
    for place in given["indices"]:  # a mask takes as many dimensions as it has
        places += [place] * (place.dim() if place is not None and place.dtype == torch.bool else 1)
    w.looks_up(given["self"])
    used = [i for i, p in enumerate(places) if p is not None]
    for i in used:
        w.still(x[i])
    if used != list(range(used[0], used[-1] + 1)):
        raise Clash("a look-up by separated dimensions")
    rest = len(x) - len(used)
    new = outs[0].shape[used[0] : used[0] + outs[0].dim() - rest]
    return [(*x[: used[0]], *new, *x[used[-1] + 1 :])]


@rule("pixel_shuffle")
def _pixel_shuffle(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x, factor = w.of(given["self"]), int(given["upscale_factor"])
    channels = Axis(size(x[-3]) // factor**2)
    unify(x[-3], Prod((channels, factor**2)))
    return [(*x[:-3], channels, *outs[0].shape[-2:])]


@rule("pixel_unshuffle im2col")
def _unfold(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x, channel = w.of(given["self"]), 1 if "kernel_size" in given else -3
    times = outs[0].shape[channel] // size(x[channel])
    return [(x[0], product([resolve(x[channel]), times]), *outs[0].shape[2:])]


@rule("channel_shuffle native_channel_shuffle")
def _channel_shuffle(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    lead, rest = split(x[1], int(given["groups"]))
    w.still(lead)  # a number that is written down
    return [(x[0], product([resolve(rest), resolve(lead)]), *x[2:])]


@rule("col2im")
def _fold(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    channels = Axis(outs[0].shape[1])
    unify(x[1], Prod((channels, size(x[1]) // size(channels))))
    return [(x[0], channels, *outs[0].shape[2:])]
