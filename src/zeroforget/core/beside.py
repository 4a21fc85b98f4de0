"""Two parts of a recorded step at the same time: while a GPU finds a layer's input gradient, its weight gradients too.

The gradients of a few newborn features do not fill a GPU, and the layers below do not wait for them. Nor do the first
layers wait for what later ones make of their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor


class Beside:
    """Within the block, what is done in `with it.aside():` runs beside all else; after the block everything is done.

    Only while a step is recorded: then it costs nothing to arrange. Otherwise one thing comes after the other.
    """

    def __init__(self, x: Tensor) -> None:
        self.recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
        self._here = torch.cuda.current_stream(x.device) if self.recorded else None
        self._there: torch.cuda.Stream | None = None

    def __enter__(self) -> Beside:
        return self

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Apart from what comes next; behind what came before."""
        if self._here is None:
            yield
            return
        self._there = _companion(self._here)
        self._there.wait_stream(self._here)
        with torch.cuda.stream(self._there):
            yield

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._here is not None and self._there is not None:
            self._here.wait_stream(self._there)


_COMPANIONS: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def _companion(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """Each stream has its own. Products recorded on one share a workspace, and steps of two streams may run at once;
    torch hands out 32 streams of each priority in turn, so a companion has another priority than its stream."""
    if stream not in _COMPANIONS:
        _COMPANIONS[stream] = torch.cuda.Stream(stream.device, priority=-1)
    return _COMPANIONS[stream]
