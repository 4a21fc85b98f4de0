"""What a dimension of a tensor is made of: feature axes, fixed sizes, products (flattening) and sums (concatenation).

While a network is traced an axis is a variable: finding that two dimensions are the same unifies their labels, as in
logic programming. `settle` turns the outcome into plain values.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

# --- While tracing ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Axis:
    """A variable for a run of features. Once `bound`, it stands for that label instead."""

    size: int
    bound: Term | None = None
    writers: list[str] = field(default_factory=list)
    """Paths of the modules that compute these features, in the order they ran."""
    coupled: bool = False
    """Some statistic over the axis (a layer norm, a softmax) lets its features see each other."""
    parted: bool = False
    """It came out of a view that cut a wider axis into factors, such as heads."""
    placed: bool = False
    """A weight on the left of a product makes it: these may be mixtures of places, beside which features are meant."""


@dataclass(frozen=True)
class Prod:
    """Row-major product: each feature of the first factor repeated for every one of the next."""

    factors: tuple[Term, ...]


@dataclass(frozen=True)
class Sum:
    """One part after another."""

    parts: tuple[Term, ...]


Term: TypeAlias = int | Axis | Prod | Sum


class Clash(Exception):
    """Two labels cannot be the same dimension."""


def size(term: Term) -> int:
    """How many elements a dimension with this label has."""
    match term:
        case int():
            return term
        case Axis():
            return term.size
        case Prod():
            return math.prod(size(f) for f in term.factors)
        case Sum():
            return sum(size(p) for p in term.parts)


def resolve(term: Term) -> Term:
    """Follow bindings and write the label in one normal form."""
    match term:
        case int():
            return term
        case Axis():
            return term if term.bound is None else resolve(term.bound)
        case Prod():
            return product([resolve(f) for f in term.factors])
        case Sum():
            return total([resolve(p) for p in term.parts])


def product(factors: list[Term]) -> Term:
    """A product without ones, nested products, or neighbouring fixed sizes."""
    flat: list[Term] = []
    for factor in factors:
        for f in factor.factors if isinstance(factor, Prod) else (factor,):
            if f == 1:
                continue
            if isinstance(f, int) and flat and isinstance(flat[-1], int):
                flat[-1] *= f
            else:
                flat.append(f)
    return flat[0] if len(flat) == 1 else Prod(tuple(flat)) if flat else 1


def total(parts: list[Term]) -> Term:
    """A sum without nested sums or neighbouring fixed sizes."""
    flat: list[Term] = []
    for part in parts:
        for p in part.parts if isinstance(part, Sum) else (part,):
            if p == 0:
                continue
            if isinstance(p, int) and flat and isinstance(flat[-1], int):
                flat[-1] += p
            else:
                flat.append(p)
    return flat[0] if len(flat) == 1 else Sum(tuple(flat)) if flat else 0


def axes(term: Term) -> Iterator[Axis]:
    """Every free axis in a label."""
    match resolve(term):
        case Axis() as axis:
            yield axis
        case Prod(factors):
            for f in factors:
                yield from axes(f)
        case Sum(parts):
            for p in parts:
                yield from axes(p)
        case int():
            pass


def fix(term: Term) -> None:
    """No axis in this label may grow."""
    for axis in list(axes(term)):
        axis.bound = axis.size


def unify(a: Term, b: Term) -> None:
    """Make two labels the same, or raise Clash and leave what was already bound."""
    a, b = resolve(a), resolve(b)
    if a is b or a == b:
        return
    if size(a) != size(b):
        raise Clash(f"{size(a)} against {size(b)}")
    if isinstance(a, Axis) and isinstance(b, Axis):
        b.bound = a
        _inherit(a, b)
    elif isinstance(a, Axis):
        _bind(a, b)
    elif isinstance(b, Axis):
        _bind(b, a)
    elif isinstance(a, int) or isinstance(b, int):
        fix(a)
        fix(b)
    elif isinstance(a, Sum) and isinstance(b, Sum):
        seams = sorted({*_seams(a), *_seams(b)})
        sizes = [end - start for start, end in zip([0, *seams], seams, strict=False)]
        for p, q in zip(cut(a, sizes), cut(b, sizes), strict=True):
            unify(p, q)
    else:
        _align(a.factors if isinstance(a, Prod) else (a,), b.factors if isinstance(b, Prod) else (b,))


def _bind(axis: Axis, term: Term) -> None:
    inner = list(axes(term))
    if axis in inner:
        raise Clash("an axis inside itself")
    axis.bound = term
    for other in inner:
        _inherit(other, axis)


def _inherit(axis: Axis, other: Axis) -> None:
    axis.writers += [w for w in other.writers if w not in axis.writers]
    axis.coupled |= other.coupled
    axis.parted |= other.parted
    axis.placed |= other.placed


def _align(a: tuple[Term, ...], b: tuple[Term, ...]) -> None:
    """Walk two products from the left, splitting the larger factor where their sizes differ."""
    left, right = list(a), list(b)
    while left and right:
        x, y = resolve(left.pop(0)), resolve(right.pop(0))
        if size(x) > size(y):
            x, rest = split(x, size(y))
            left.insert(0, rest)
        elif size(x) < size(y):
            y, rest = split(y, size(x))
            right.insert(0, rest)
        unify(x, y)


def split(term: Term, first: int) -> tuple[Term, Term]:
    """A dimension as a product (first, rest). Which factor of an axis grows is left open: `choose` decides."""
    term = resolve(term)
    rest = size(term) // first
    if first * rest != size(term):
        raise Clash(f"{size(term)} does not divide by {first}")
    match term:
        case int():
            return first, rest
        case Axis():
            lead, last = (
                Axis(n, None, list(term.writers), term.coupled, parted=True, placed=term.placed) for n in (first, rest)
            )
            term.bound = Prod((lead, last))
            return lead, last
        case Prod(factors):
            return _split_product(factors, first)
        case Sum(parts):
            if len(parts) == first and len({size(p) for p in parts}) == 1:
                for part in parts[1:]:  # b and b again are two times b
                    unify(parts[0], part)
                return first, resolve(parts[0])
            pieces = [split(p, _divided(size(p), rest)) for p in parts]
            for _, other in pieces[1:]:
                unify(pieces[0][1], other)
            return total([resolve(lead) for lead, _ in pieces]), resolve(pieces[0][1])


def _split_product(factors: tuple[Term, ...], first: int) -> tuple[Term, Term]:
    lead: list[Term] = []
    rest = list(factors)
    while (have := math.prod(size(f) for f in lead)) < first:
        factor = resolve(rest.pop(0))
        if have * size(factor) > first:
            factor, left = split(factor, _divided(first, have))
            rest.insert(0, left)
        lead.append(factor)
    if have != first:
        raise Clash("a view cuts through a feature axis")
    return product(lead), product([resolve(f) for f in rest])


def _divided(n: int, by: int) -> int:
    if n % by:
        raise Clash(f"{n} does not divide by {by}")
    return n // by


def _seams(term: Sum) -> list[int]:
    return list(itertools.accumulate(size(p) for p in term.parts))


def cut(term: Term, sizes: Sequence[int]) -> list[Term]:
    """A dimension cut into runs of these sizes: a fixed one anywhere, a sum at its seams, an axis into a sum."""
    term = resolve(term)
    if len(sizes) == 1:
        return [term]
    match term:
        case int():
            return list(sizes)
        case Axis():
            pieces: list[Term] = [
                Axis(n, None, list(term.writers), term.coupled, term.parted, term.placed) for n in sizes
            ]
            term.bound = Sum(tuple(pieces))
            return pieces
        case Prod(factors):
            rest = product(list(factors[1:]))
            leads = cut(factors[0], [_divided(n, size(rest)) for n in sizes])
            return [product([resolve(lead), resolve(rest)]) for lead in leads]
        case Sum(parts):
            return _cut_sum(list(parts), sizes)


def _cut_sum(parts: list[Term], sizes: Sequence[int]) -> list[Term]:
    runs: list[Term] = []
    for n in sizes:
        run: list[Term] = []
        while (have := sum(size(p) for p in run)) < n:
            part = parts.pop(0)
            if size(part) > n - have:
                part, left = cut(part, [n - have, size(part) - n + have])
                parts.insert(0, left)
            run.append(part)
        runs.append(total([resolve(p) for p in run]))
    return runs


def choose(term: Term) -> None:
    """Of a product whose factors are all free only one may grow: the first over which no statistic runs, of features
    rather than of places."""
    match resolve(term):
        case Prod(factors):
            free = [f for f in factors if any(axes(f))]
            if len(free) > 1:
                grows = min(free, key=lambda f: max((a.coupled, a.placed) for a in axes(f)))
                for factor in free:
                    if factor is not grows:
                        fix(factor)
            for factor in factors:
                choose(factor)
        case Sum(parts):
            for part in parts:
                choose(part)
        case int() | Axis():
            pass


# --- Afterwards ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """A growing axis, by name."""

    name: str


@dataclass(frozen=True)
class Product:
    """Settled form of Prod."""

    factors: tuple[Label, ...]


@dataclass(frozen=True)
class Concat:
    """Settled form of Sum."""

    parts: tuple[Label, ...]


Number = TypeVar("Number", int, float)
Label: TypeAlias = int | Named | Product | Concat


def settle(term: Term, names: Mapping[Axis, str]) -> Label:
    """The final label: an axis without a name (nothing writes it) is a fixed size."""
    match resolve(term):
        case int() as n:
            return n
        case Axis() as axis:
            return Named(names[axis]) if axis in names else axis.size
        case Prod(factors):
            return Product(tuple(settle(f, names) for f in factors))
        case Sum(parts):
            return Concat(tuple(settle(p, names) for p in parts))


def births_of(label: Label, births: Mapping[str, Tensor]) -> Tensor:
    """When each element of a dimension was born; what is fixed was there from the first task (0) on."""
    match label:
        case int():
            return torch.zeros(label, dtype=torch.int64)
        case Named(name):
            return births[name]
        case Concat(parts):
            return torch.cat([births_of(p, births) for p in parts])
        case Product(factors):
            out = births_of(factors[0], births)
            for factor in factors[1:]:
                out = torch.maximum(out[:, None], births_of(factor, births)[None, :]).flatten()
            return out


def axis_names(label: Label) -> Iterator[str]:
    """The growing axes in a label."""
    match label:
        case int():
            pass
        case Named(name):
            yield name
        case Concat(parts) | Product(parts):
            for part in parts:
                yield from axis_names(part)


def spans(label: Label) -> dict[str, int]:
    """Axis → how many elements of a dimension each of its features stands for, at least: a head for its channels."""
    match label:
        case int():
            return {}
        case Named(name):
            return {name: 1}
        case Concat(parts):
            found: Counter[str] = Counter()
            for part in parts:
                found.update(spans(part))
            return dict(found)
        case Product(factors):
            fixed = math.prod(factor for factor in factors if isinstance(factor, int))
            return {name: fixed * n for factor in factors for name, n in spans(factor).items()}


def label_size(label: Label, widths: Mapping[str, Number]) -> Number:
    """How many elements a dimension has where the axes have these widths."""
    match label:
        case int():
            return label
        case Named(name):
            return widths[name]
        case Concat(parts):
            return sum(label_size(p, widths) for p in parts)
        case Product(factors):
            return math.prod(label_size(f, widths) for f in factors)
