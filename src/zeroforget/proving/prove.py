"""Proof that a network grows as its axes say: first by shapes alone, then in numbers, on copies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroforget.axes.find import Axes, CannotGrow, Care, find_axes, fixed_buffers, refuse
from zeroforget.axes.labels import axis_names
from zeroforget.axes.plain_modules import hollow, reshaped
from zeroforget.proving.input_checks import hints
from zeroforget.proving.trial import ERRORS, Broke, Unlike, short, where
from zeroforget.proving.trial_networks import Find, Subjects

_TRIES = 80
Treatment = dict[type[nn.Module], tuple[Care, str]]


@dataclass(frozen=True)
class Failure:
    """What a trial showed, and the module in which it did."""

    path: str
    why: str
    unlike: tuple[str, ...] = ()
    """All modules that are made of other features, if it runs."""


@torch.enable_grad()
def proven_axes(net: nn.Module, example: Tensor, *, keep: Collection[str] = (), unknown: str = "refuse") -> Axes:
    """The axes of a network that can really grow. Whatever fails a trial is treated with more care, then kept.

    Raises:
        CannotGrow: something has to be kept and `unknown` is "refuse", or nothing helps.
    """
    care: Treatment = {}
    kept, given_up = list(keep), dict[str, str]()
    shapes_tell = _runs(hollow(net).eval(), example.to("meta"))
    subjects, held = Subjects(net, example), fixed_buffers(net)
    for _ in range(_TRIES):
        axes = find_axes(net, example, keep=kept, unknown="keep", care=care, held=held)
        if _give_up(axes, _too_many(net, axes), kept, given_up):
            continue
        failure = _try_shapes(net, axes, example, kept, care, held) if shapes_tell else None
        if failure is None:
            find = functools.partial(find_axes, keep=tuple(kept), unknown="keep", care=dict(care), held=held)
            failure = _try_numbers(subjects, axes, find, given_up, kept)
        if failure is None:
            break
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


def _runs(net: nn.Module, x: Tensor) -> bool:
    try:
        with torch.no_grad():
            net(x[:2])
    except ERRORS:
        return False
    return True


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
    if unlike := [name for name, labels in axes.tensors.items() if again.tensors[name] != labels]:
        paths = tuple(name.rpartition(".")[0] for name in unlike)
        return Failure(paths[0], f"'{unlike[0]}' is made of other features there", paths)
    if dict(again.sizes) != widths or again.output != axes.output:
        return Failure("", "its output is made of other features", ("",))
    return None


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
