"""Proof that a network grows as its axes say: first by shapes alone, then in numbers, on copies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

import torch
from torch import Tensor, nn

from zeroforget.axes.care import Care
from zeroforget.axes.find import Axes, CannotGrow, find_axes, fixed_buffers, refuse, watched
from zeroforget.axes.labels import axis_names
from zeroforget.axes.plain_modules import hollow, reshaped
from zeroforget.proving.input_checks import hints, refuse_training_state, unused
from zeroforget.proving.trial import ERRORS, Broke, Unlike, short, where
from zeroforget.proving.trial_networks import Find, Subjects, pair

_TRIES = 80
_LONG = 500
"""Operators from which a run takes its time."""
_PASSED = 4
"""So many widths between a start and the whole are tried."""
Treatment = dict[type[nn.Module], tuple[Care, str]]


@dataclass(frozen=True)
class Failure:
    """What a trial showed, and the module in which it did."""

    path: str
    why: str
    unlike: tuple[str, ...] = ()
    """All modules that are made of other features, if it runs."""
    other_code: bool = False
    """Whether it runs other operators there."""
    widths: Mapping[str, int] | None = None
    """The widths at which it does, if they are special."""


@torch.enable_grad()
def proven_axes(net: nn.Module, example: Tensor, *, keep: Collection[str] = (), unknown: str = "refuse") -> Axes:
    """The axes of a network that can really grow. Whatever fails a trial is treated with more care, then kept.

    Raises:
        CannotGrow: something has to be kept and `unknown` is "refuse", or nothing helps.
    """
    watched(net, example)  # a copy: it tells whether the given one may be asked
    refuse_training_state(net, pair(example))
    care: Treatment = {}
    kept, given_up = list(keep), dict[str, str]()
    shapes_tell = _runs(hollow(net).eval(), pair(example).to("meta"))
    subjects, held, idle = Subjects(net, example), fixed_buffers(net), tuple(unused(net, example))
    for _ in range(_TRIES):
        axes = find_axes(net, example, keep=kept, unknown="keep", care=care, held=held)
        axes = dataclasses.replace(axes, idle=idle)
        if still := [path for path in _of_idle_layers(axes) if path not in kept]:
            kept.extend(still)
            continue
        if _give_up(axes, _too_many(net, axes), kept, given_up):
            continue
        failure = _try_shapes(net, axes, example, kept, care, held) if shapes_tell else None
        if failure is None:
            find = functools.partial(find_axes, keep=tuple(kept), unknown="keep", care=dict(care), held=held)
            failure = _try_numbers(subjects, axes, find, given_up, kept)
        if failure is None:
            break
        if failure.widths and _give_up(axes, _culprit(net, axes, example, failure), kept, given_up):
            continue
        if failure.why and not (
            shapes_tell
            and _care_of(net, failure, care) == Care.WHOLE
            and _give_up(axes, _alone(net, axes, example, kept, care, held), kept, given_up)
        ):
            _take_more_care(net, failure, care)
    else:
        raise CannotGrow("no way was found to widen this network; convert fewer of its layers, or pass keep=[...]")
    axes = dataclasses.replace(axes, unfollowed={**axes.unfollowed, **given_up})
    if unknown == "refuse":
        refuse(axes)
    return axes


def _of_idle_layers(axes: Axes) -> list[str]:
    """Layers that write features which no layer writes that gets a gradient: such features would never learn."""
    writers: dict[str, set[str]] = {}
    for name, dim in axes.writes.items():
        for axis in axis_names(axes.tensors[name][dim]) if dim >= 0 else ():
            writers.setdefault(axis, set()).add(name)
    dead = [names for names in writers.values() if names <= {*axes.idle}]
    paths = {name.rpartition(".")[0] for names in dead for name in names}
    return [path for path in axes.layers if path in paths]


def _runs(net: nn.Module, x: Tensor) -> bool:
    """Whether a network without storage runs, what its code makes being on the CPU or without storage too."""
    for device in ("cpu", "meta"):
        try:
            with torch.no_grad(), torch.device(device):
                net(x)
            return True
        except ERRORS:
            continue
    return False


# By shapes ------------------------------------------------------------------------------------------------------


def _try_shapes(
    net: nn.Module,
    axes: Axes,
    example: Tensor,
    keep: Collection[str],
    care: Treatment,
    held: Collection[str],
    alone: str | None = None,
) -> Failure | None:
    """A wider network must run and, watched in its turn, show the same axes. It needs no storage for that.

    All axes are wider, or one `alone`.
    """
    # Neighbours grow by different numbers, so that none is taken for another.
    every = {axis: size + 1 + i % 3 for i, (axis, size) in enumerate(axes.sizes.items())}
    widths = every if alone is None else {**axes.sizes, alone: axes.sizes[alone] + 1}
    wide = reshaped(net, axes.tensors, axes.attributes, widths)
    try:
        again = find_axes(wide, example, keep=keep, unknown="keep", care=care, held=held)
    except ERRORS as error:
        return Failure(where(wide, example.to("meta")[:2]), short(error))
    if other := _other_call(axes, again.calls):
        return other
    if unlike := [name for name, labels in axes.tensors.items() if again.tensors[name] != labels]:
        paths = tuple(name.rpartition(".")[0] for name in unlike)
        return Failure(paths[0], f"'{unlike[0]}' is made of other features there", paths)
    if dict(again.sizes) != widths or again.output != axes.output:
        return Failure("", "its output is made of other features", ("",))
    return None if alone else _try_equal_widths(net, axes, example)


def _try_equal_widths(net: nn.Module, axes: Axes, example: Tensor) -> Failure | None:
    """Where axes become as wide as each other, or as something fixed, the network must run the same operators."""
    for widths in _equal_widths(net, axes, example):
        if failure := _at(net, axes, example, widths):
            return failure
    return None


def _at(net: nn.Module, axes: Axes, example: Tensor, widths: Mapping[str, int]) -> Failure | None:
    wide = reshaped(net, axes.tensors, axes.attributes, widths)
    try:
        other = _other_call(axes, watched(wide, example)[0].calls)
    except ERRORS as error:
        return Failure(where(wide, example.to("meta")[:2]), short(error))
    return None if other is None else dataclasses.replace(other, widths=widths)


def _culprit(net: nn.Module, axes: Axes, example: Tensor, failure: Failure) -> dict[str, str]:
    """An axis without whose growth the network runs the same operators at these widths."""
    assert failure.widths is not None
    for axis, size in axes.sizes.items():
        if _at(net, axes, example, {**failure.widths, axis: size}) is None:
            return {axis: _reason(failure)}
    return {}


def check_start(net: nn.Module, axes: Axes, example: Tensor, widths: Mapping[str, int]) -> None:
    """Raise CannotGrow if the network computes other things at the widths that its first task starts with, or where on
    the way to its full width axes become as wide as something else."""
    for reached in (widths, *_passed(axes, example, widths)):
        wide = reshaped(net, axes.tensors, axes.attributes, dict(reached))
        try:
            with torch.device("meta"):  # for what a network makes when it runs first
                other = _other_call(axes, watched(wide, example)[0].calls)
        except ERRORS as error:
            other = Failure("", short(error))
        if other is not None:
            where_so = (
                "at the widths that start= gives" if reached is widths else "on the way from start= to its full width"
            )
            raise CannotGrow(f"{_reason(other)}. It does so {where_so}: pass another one, or start=1")


def _passed(axes: Axes, example: Tensor, start: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Widths between these and the full ones at which axes are as wide as something else, the widest first."""
    known = _known_sizes(axes, example)
    between = {a: [s for s in reversed(known) if start[a] < s < size] for a, size in axes.sizes.items()}
    count = max(map(len, between.values()), default=0)
    for nth in range(min(count, _PASSED if len(axes.calls) < _LONG else 1)):
        yield {axis: sizes[nth] if nth < len(sizes) else start[axis] for axis, sizes in between.items()}


def _known_sizes(axes: Axes, example: Tensor) -> list[int]:
    """All widths in a network: of its axes, of what does not grow, and of its input."""
    fixed = {n for labels in axes.tensors.values() for n in labels if isinstance(n, int)}
    return sorted({*axes.sizes.values(), *fixed, *example.shape[1:]})


def _equal_widths(net: nn.Module, axes: Axes, example: Tensor) -> Iterator[dict[str, int]]:
    """All axes as wide as the widest; each as wide as the next wider thing, then the one after that; as the next
    narrower one, for a first task may start with a part; and several times as wide, a multiple of 16."""
    if not axes.sizes:
        return
    widest = max(axes.sizes.values())
    yield {axis: widest + (widest == size == min(axes.sizes.values())) for axis, size in axes.sizes.items()}
    sizes = _known_sizes(axes, example)
    for nth in (0, 1) if len(axes.calls) < _LONG else (0,):
        yield {
            axis: larger[min(nth, len(larger) - 1)] if (larger := [s for s in sizes if s > size]) else size + 1 + nth
            for axis, size in axes.sizes.items()
        }
    yield {axis: max((s for s in sizes if 1 < s < size), default=size) for axis, size in axes.sizes.items()}
    yield {axis: 16 * (size // 4 + 1) for axis, size in axes.sizes.items()}


def _other_call(axes: Axes, calls: Sequence[tuple[str, str]]) -> Failure | None:
    """The first place where a network of another width does not run the operators that it did."""
    first = next((i for i, (a, b) in enumerate(zip_longest(axes.calls, calls)) if a != b), None)
    if first is None:
        return None
    before, after = axes.calls[first : first + 50], calls[first : first + 50]
    _, i, i_end, j, j_end = next(c for c in SequenceMatcher(None, before, after).get_opcodes() if c[0] != "equal")
    gone, new = before[i:i_end], after[j:j_end]
    path, why = (new or gone)[0][1], f"'{(new or gone)[0][0]}' runs {'only there' if new else 'no more'}"
    return Failure(path, why, other_code=True)


def _alone(
    net: nn.Module, axes: Axes, example: Tensor, keep: Collection[str], care: Treatment, held: Collection[str]
) -> dict[str, str]:
    """The axes that fail even when nothing else grows."""
    tried = {axis: _try_shapes(net, axes, example, keep, care, held, axis) for axis in axes.sizes}
    return {axis: _reason(failure) for axis, failure in tried.items() if failure is not None}


def _give_up(axes: Axes, bad: Mapping[str, str], kept: list[str], given_up: dict[str, str]) -> bool:
    """Keep these axes from now on; whether there was any."""
    paths = {axis.partition("#")[0]: why for axis, why in bad.items()}
    new = {(path if path in axes.layers else ""): why for path, why in paths.items() if path not in kept}
    given_up.update(new)
    kept.extend(new)
    return bool(new)


def _too_many(net: nn.Module, axes: Axes) -> dict[str, str]:
    """Axes to keep because a parameter would grow along more than two dimensions at once."""
    shapes = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    return {
        axis: f"parameter '{name}' of shape {shapes.get(name, ())} would grow along more than two dimensions"
        for name, labels in axes.tensors.items()
        for label in [label for label in labels if any(axis_names(label))][2:]
        for axis in axis_names(label)
    }


def _reason(failure: Failure) -> str:
    place = f"module '{failure.path}'" if failure.path else "the network's own forward"
    if failure.other_code:
        return (
            f"a wider network computes other things in {place} ({failure.why}): some code there asks for a width, such "
            "as `if h.shape == x.shape`; decide by a flag of the module (self.skips = True) instead"
        )
    what = f"runs, but {failure.why}" if failure.unlike else f"does not run in {place} ({failure.why})"
    return (
        f"a wider network {what}: some code has an old width or number of heads baked in, such as view(-1, 400); take "
        "it from the tensor's shape there, or keep it as a number of the module (self.heads = 4, with no underscore "
        "before it), which is adapted"
    )


def _patients(net: nn.Module, failure: Failure, care: Treatment) -> Iterator[type[nn.Module]]:
    """Classes with code of their own around a failure, nearest first, that can be treated with more care."""
    for path in _upwards(failure.path):
        module = net.get_submodule(path)
        standard = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.MultiheadAttention)
        if care.get(type(module), (Care.NAMED, ""))[0] < Care.STILL and not (standard and path):
            yield type(module)


def _care_of(net: nn.Module, failure: Failure, care: Treatment) -> Care | None:
    return next((care.get(kind, (Care.NAMED, ""))[0] for kind in _patients(net, failure, care)), None)


def _take_more_care(net: nn.Module, failure: Failure, care: Treatment) -> None:
    for kind in _patients(net, failure, care):
        if care.get(kind, (Care.NAMED, ""))[0] == Care.TIED_ALL and (tied := _tied(net, failure, care, kind)):
            del care[kind]  # its features only showed what the other's code does with those that are tied to them
            kind = tied
        level, why = care.get(kind, (Care.NAMED, ""))
        care[kind] = (Care(level + 1), why or _reason(failure))
        return
    raise CannotGrow(
        f"a wider network does not run ({failure.why}), and keeping layers as they are does not help{hints(net)}"
    )


def _tied(net: nn.Module, failure: Failure, care: Treatment, besides: type[nn.Module]) -> type[nn.Module] | None:
    """Another class around a failure whose code has tied features, if it can be treated with more care."""
    kinds = (type(net.get_submodule(path)) for other in failure.unlike for path in _upwards(other))
    tied = (kind for kind in kinds if kind in care and care[kind][0] in (Care.TIED, Care.TIED_ALL))
    return next((kind for kind in tied if kind is not besides), None)


def _upwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


# In numbers -----------------------------------------------------------------------------------------------------


def _try_numbers(
    subjects: Subjects, axes: Axes, find: Find, given_up: dict[str, str], kept: list[str]
) -> Failure | None:
    """A trial growth. Axes that fail alone go to `given_up` and `kept`; a failure without a reason says: try again."""
    try:
        bad = subjects.check(axes, find)
    except Unlike as error:
        raise CannotGrow(str(error)) from error
    except Broke as broke:
        return Failure(broke.path, broke.why)
    if bad and not _give_up(axes, bad, kept, given_up):
        raise CannotGrow(next(iter(bad.values())))
    return Failure("", "") if bad else None
