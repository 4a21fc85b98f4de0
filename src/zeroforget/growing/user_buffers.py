"""Buffers of a user's own modules: running averages that are no normalization layer's, tables, masks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from zeroforget.axes.labels import Label, axis_names, births_of
from zeroforget.axes.plain_modules import MODULE_ATTRIBUTES
from zeroforget.growing.layers import GrowingLayer, GrowingNorm, widen
from zeroforget.growing.tensors import GrowingTensor

Labels = Mapping[str, tuple[Label, ...]]
ASKS = "it asks for next(parameters()), but only what is newborn is a parameter; ask its input or a buffer instead"
"""Why a module of the user's own finds nothing (StopIteration)."""


def owners(body: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are the user's own, with their paths."""
    seen, waiting = set[int](), [("", body)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen or isinstance(module, (GrowingTensor, GrowingLayer, GrowingNorm)):
            continue
        seen.add(id(module))
        yield path, module
        inside = [(joined(path, name), part) for name, part in module._modules.items() if part is not None]
        waiting += reversed(inside)


def buffers(body: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each buffer that is there."""
    for path, module in owners(body):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield joined(path, name), buffer


def numbers_in(body: nn.Module, labels: Labels) -> dict[str, float]:
    """Of the buffers that grow, the number that each holds over and over; new features start with it."""
    return {
        name: buffer.flatten()[0].item()
        for name, buffer in buffers(body)
        if buffer.numel() and not buffer.is_meta and _grows(labels.get(name, ()))
    }


def resize(body: nn.Module, labels: Labels, births: Mapping[str, Tensor], task: int, fill: Mapping[str, float]) -> None:
    """Make room in the buffers for what is born with a task; old features keep their values.

    One whose shape is not what it was given (a table that its module made anew for longer inputs) stays as it is.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # what several modules hold stays one
    for path, module in owners(body):
        for name, buffer in module._buffers.items():
            full = joined(path, name)
            own = labels.get(full, ())
            if buffer is None or not _grows(own) or full not in fill:
                continue
            along = [births_of(label, births) for label in own]
            if id(buffer) not in made:
                wide = buffer
                if task == 0:
                    wide = buffer.new_full([len(each) for each in along], fill[full])
                elif list(buffer.shape) == [int((each < task).sum()) for each in along]:
                    wide = widen(buffer, along, task - 1, fill[full])
                made[id(buffer)] = (buffer, wide)
            module._buffers[name] = made[id(buffer)][1]


def kept(body: nn.Module) -> nn.Module:
    """A copy of all buffers as they are: a later task may change them."""
    held = nn.Module()
    for name, buffer in buffers(body):
        held.register_buffer(key(name), buffer.detach().clone())
    return held


def put_back(body: nn.Module, held: nn.Module) -> None:
    """All buffers as they were; one that was not there then is not there again."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in owners(body):
        for name, buffer in module._buffers.items():
            value = held._buffers.get(key(joined(path, name)))
            if value is None or buffer is None:
                module._buffers[name] = None if value is None else value.clone()
            else:
                module._buffers[name] = made.setdefault(id(buffer), (buffer, value.clone()))[1]


def warn_if_moved(body: nn.Module, given: nn.Module) -> None:
    """Say so where a module follows something in a plain number while it learns (a running scale without a buffer).

    That is in no state, so answers go by the number that was given. What only counts, or drops features while learning,
    is nobody's concern.
    """
    before = dict(given.named_modules())
    for path, module in owners(body):
        then = vars(before[path]) if path in before else {}
        for name, value in vars(module).items():
            if isinstance(value, float) and name in then and not _drops(name) and _another(then[name], value):
                warnings.warn(
                    f"module '{path}' ({type(module).__name__}) has changed its number '{name}' from {then[name]} to "
                    f"{value:g} while it learned. Answers go by the first, for plain numbers are not saved and belong "
                    f"to no task: make it a tensor, register_buffer('{name}', ...), and each task keeps its own",
                    stacklevel=4,
                )


def _another(then: Any, now: float) -> bool:
    return then is None or (isinstance(then, (int, float)) and then != now)


def _drops(name: str) -> bool:
    """Whether a number of this name is that of a dropout, which may follow a schedule."""
    return name == "p" or "drop" in name


def let_go(body: nn.Module) -> None:
    """What modules keep of their last input (an attention map) stays, without its history: that cannot be copied."""
    for module in body.modules():
        for name, value in list(vars(module).items()):
            if name not in MODULE_ATTRIBUTES:
                vars(module)[name] = _detached(value)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_leaf else value.detach()
    if type(value) in (list, tuple):
        return type(value)(map(_detached, value))
    return {k: _detached(v) for k, v in value.items()} if type(value) is dict else value


def joined(path: str, name: str) -> str:
    """The full name of a tensor or a part of a module."""
    return f"{path}.{name}" if path and name else path or name


def key(name: str) -> str:
    """A full name as one that a module may give to a tensor or a part of its own."""
    return name.replace("/", "//").replace(".", "/")


def _grows(labels: tuple[Label, ...]) -> bool:
    return any(any(axis_names(label)) for label in labels)
