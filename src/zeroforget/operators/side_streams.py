"""Parts of a recorded step at the same time: while a GPU finds the gradients of layers' inputs, those of weights too.

The gradients of a few newborn features do not fill a GPU, and the layers below do not wait for them. Within `late`, not
even the end of a layer's way back waits: gradients of parameters are there when the whole way is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

_BEHIND = 3
"""How many layers' gradients may be on their way at once: what they read is kept until they are there."""


class Beside:
    """Within the block, what is done in `with it.aside():` runs beside all else; after the block everything is done,
    but for gradients that were given to a `late` around it.

    Only while a step is recorded: then it costs nothing to arrange. Otherwise one thing comes after the other.
    """

    def __init__(self, x: Tensor) -> None:
        self.recorded = recorded(x.device)
        self._here = stream_of(x.device) if self.recorded else None
        self._ways: dict[int, torch.cuda.Stream] = {}
        self._late = OPEN.get(_place(x.device)) if self.recorded else None
        self._awaited = False
        self._read: list[Any] = []

    def __enter__(self) -> Beside:
        return self

    @contextmanager
    def aside(self, way: int = 0) -> Iterator[None]:
        """Apart from what comes next; behind what came before, and behind what goes the same way."""
        if self._here is None:
            yield
            return
        there = self._ways[way] = companion(self._here, way)
        there.wait_stream(self._here)
        with torch.cuda.stream(there):
            yield

    def reads(self, *read: Any) -> None:
        """What goes on aside reads these: they must not be overwritten before it is done."""
        self._read += read

    def give(self, given: Origin | None, gradient: Tensor | None) -> Tensor | None:
        """From aside, the gradient of what was given that was found there: what autograd is to be told of it, which is
        nothing if it may come late."""
        if given is None or gradient is None:
            return None
        parameter = given.parameter
        if self._late is None or parameter is None or not _may_come_late(parameter):
            self._awaited = True
            return gradient.to(given.dtype)
        if gradient.dtype != parameter.dtype or gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter.detach()).copy_(gradient)
        self._late.found.append((parameter, gradient))
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._here is None:
            return
        if self._late is None or self._awaited:
            for there in self._ways.values():
                self._here.wait_stream(there)
        else:
            self._late.leave(self._here, list(self._ways.values()), self._read)


@dataclass(frozen=True, eq=False)
class Origin:
    """What an operator remembers of a tensor that it was given, for its gradient's sake."""

    dtype: torch.dtype
    parameter: Tensor | None
    """The tensor itself, if it was computed from nothing else."""

    @staticmethod
    def of(tensor: Tensor | None) -> Origin | None:
        """Of this one, if there is one."""
        return None if tensor is None else Origin(tensor.dtype, tensor if tensor.is_leaf else None)


class Late:
    """Gradients on their way, and what they read."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []
        self._going: deque[tuple[list[torch.cuda.Event], list[Any]]] = deque()

    def leave(self, here: torch.cuda.Stream, ways: list[torch.cuda.Stream], read: list[Any]) -> None:
        """Let them go on, but not too many at once: each keeps memory."""
        self._going.append(([way.record_event() for way in ways], read))
        while len(self._going) > _BEHIND:
            self._arrive(here)

    def _arrive(self, here: torch.cuda.Stream) -> None:
        events, _ = self._going.popleft()
        for event in events:
            here.wait_event(event)

    def end(self, here: torch.cuda.Stream | None) -> None:
        """Wait for all."""
        while here is not None and self._going:
            self._arrive(here)

    @torch.no_grad()
    def hand_over(self) -> None:
        """Give the parameters their gradients."""
        for parameter, gradient in self.found:
            if parameter.grad is None:
                parameter.grad = gradient
            else:  # in place, as autograd would: who replays this reads the same memory again
                parameter.grad += gradient


@contextmanager
def late(device: torch.device) -> Iterator[None]:
    """Around the way back of a step that is recorded: parameters have their gradients after the block, not before."""
    if not recorded(device):
        yield
        return
    place, here = _place(device), stream_of(device)
    going = OPEN[place] = Late()
    try:
        yield
    finally:
        del OPEN[place]
        going.end(here)  # after an error too: a recording ends only where all ways have come back
    going.hand_over()


def recorded(device: torch.device) -> bool:
    """Whether what is done now is recorded, to be replayed later."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


OPEN: dict[object, Late] = {}
"""By the stream that a step is recorded on: its way back runs in another thread, on the same stream."""


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Where things are done now; on a CPU one thing comes after the other."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _place(device: torch.device) -> object:
    return stream_of(device) or device


def _may_come_late(parameter: Tensor) -> bool:
    """Whether nobody wants to see its gradient before all are there, neither a hook nor whoever asked for it: inside
    of the way back a block may go back through a part of itself by `torch.autograd.grad`."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # its gradient is asked for by name
        return False


_COMPANIONS: dict[tuple[torch.cuda.Stream, int], torch.cuda.Stream] = {}


def companion(stream: torch.cuda.Stream, way: int) -> torch.cuda.Stream:
    """Each stream has its own. Products recorded on one share a workspace, and steps of two streams may run at once;
    torch hands out 32 streams of each priority in turn, so companions of each way have a priority of their own. A step
    is recorded on a stream of a higher one: what every layer waits for goes first. GPUs with few priorities have one
    way."""
    way = way if stream.priority_range()[1] <= -3 else 0
    if (stream, way) not in _COMPANIONS:
        _COMPANIONS[stream, way] = torch.cuda.Stream(stream.device, priority=-1 - way)
    return _COMPANIONS[stream, way]
