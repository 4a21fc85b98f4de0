"""Buffers of a user's own modules: running averages that are no normalization layer's, tables, masks. And numbers that
such modules keep without a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from zeroforget.core.dense import OWN
from zeroforget.core.labels import Label, axis_names, births_of
from zeroforget.core.layers import GrowingLayer, GrowingNorm, widen
from zeroforget.core.tensors import GrowingTensor

Labels = Mapping[str, tuple[Label, ...]]
Numbers = dict[str, dict[str, float]]
"""Of each module by its path, the numbers that it holds as plain attributes."""
ASKS = "it asks for next(parameters()), but only what is newborn is a parameter; ask its input or a buffer instead"
"""Why a module of the user's own finds nothing (StopIteration)."""


def owners(body: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are the user's own, with their paths."""
    ours = (GrowingTensor, GrowingLayer, GrowingNorm)
    inside = {id(part) for m in body.modules() if isinstance(m, ours) for part in m.modules()}
    for path, module in body.named_modules():
        if id(module) not in inside:
            yield path, module


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


def noted(body: nn.Module) -> Numbers:
    """All plain numbers as they are, likewise."""
    return {path: noted_by(module) for path, module in owners(body)}


def noted_by(module: nn.Module) -> dict[str, float]:
    """Those of one module: a scale that it follows while it learns, say."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def note(module: nn.Module, numbers: Mapping[str, float]) -> None:
    """Give a module these numbers, where it has some of the same names."""
    for name in noted_by(module).keys() & numbers.keys():
        vars(module)[name] = numbers[name]


def put_back(body: nn.Module, held: nn.Module, numbers: Numbers) -> None:
    """All buffers and numbers as they were; a buffer that was not there then is not there again."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in owners(body):
        for name, buffer in module._buffers.items():
            value = held._buffers.get(key(joined(path, name)))
            if value is None or buffer is None:
                module._buffers[name] = None if value is None else value.clone()
            else:
                module._buffers[name] = made.setdefault(id(buffer), (buffer, value.clone()))[1]
        note(module, numbers.get(path, {}))


def let_go(body: nn.Module) -> None:
    """What modules keep of their last input (an attention map) stays, without its history: that cannot be copied."""
    for module in body.modules():
        for name, value in list(vars(module).items()):
            if name not in OWN:
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
