"""Streams of a GPU on a CPU, as late as they may be: what goes on aside is done when somebody waits for it, not before.

Until then its results are NaN. Memory that was not made aside is not kept for it: if it is freed in between, on a GPU
somebody else might have written there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zeroforget.operators import side_streams as beside


class Main:
    """The stream on which all is done at once."""

    def __init__(self) -> None:
        self.ways: dict[int, Way] = {}
        self.current: list[Main | Way] = [self]

    def companion(self, _: object, way: int) -> Way:
        """One of those beside it."""
        return self.ways.setdefault(way, Way(self))

    def wait_stream(self, other: Way) -> None:
        """Everything there is done now."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Everything before it is done now."""
        event.run()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, steps are recorded on this stream."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(beside, "recorded", lambda device: True)
            patch.setattr(beside, "stream_of", lambda device: self.current[-1])
            patch.setattr(beside, "companion", self.companion)
            patch.setattr(torch.cuda, "stream", lambda way: way)
            yield


class Event:
    """A place in what a stream has to do."""

    def __init__(self, way: Way) -> None:
        self.way, self.until = way, len(way.todo)

    def run(self) -> None:
        """Do what comes before it and is not yet done; that may want others to do theirs."""
        while self.way.done < self.until:
            self.way.done += 1
            self.way.do(*self.way.todo[self.way.done - 1])

    def synchronize(self) -> None:
        """The host waits for it."""
        self.run()


class Way(TorchDispatchMode):
    """A stream that is as late as it may be."""

    def __init__(self, main: Main | None = None) -> None:
        super().__init__()
        self.main = main or Main()
        self.own: dict[int, Tensor] = {}
        self.todo: list[tuple[Callable[..., Any], Any, Any, list[tuple[int, Tensor]]]] = []
        self.done = 0

    def __enter__(self) -> Way:
        self.main.current.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.main.current.pop()

    def wait_stream(self, other: Main) -> None:
        """What was done there is done."""
        assert isinstance(other, Main)

    def wait_event(self, event: Event) -> None:
        """What comes next comes after it."""
        self.todo.append((event.run, (), {}, []))

    def record_event(self) -> Event:
        """To wait for what has been asked for until now."""
        return Event(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is to be done."""
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        held = tree_map_only(Tensor, self._held, (args, kwargs))
        before = [(t, t.detach().clone()) for t in given] if func._schema.is_mutable else []
        out = func(*args, **kwargs)
        read = {_memory(t) for t in given}
        made = [(n, t) for n, t in enumerate(tree_leaves(out)) if isinstance(t, Tensor) and _memory(t) not in read]
        for tensor, value in before:  # it is not yet written
            tensor.detach().copy_(value)
        for _, tensor in made:
            self.own[_memory(tensor)] = tensor.detach()
            if tensor.is_floating_point():
                tensor.detach().fill_(torch.nan)
        if made or before:
            self.todo.append((func, *held, [(n, t.detach()) for n, t in made]))
        return out

    def later(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note a call that writes into tensors it is given."""
        self.todo.append((call, *tree_map_only(Tensor, self._held, (args, kwargs)), []))

    @torch.no_grad()
    def do(self, func: Callable[..., Any], args: Any, kwargs: Any, made: list[tuple[int, Tensor]]) -> None:
        """What was noted."""
        args, kwargs = tree_map_only(Held, lambda held: held.tensor(), (args, kwargs))
        found = tree_leaves(func(*args, **kwargs))
        for number, tensor in made:
            tensor.copy_(found[number])

    def _held(self, tensor: Tensor) -> Held:
        others = [way for way in self.main.ways.values() if way is not self]
        assert not any(_memory(tensor) in way.own for way in others), "it was made on another way"
        return Held(tensor.detach(), _memory(tensor) in self.own)


class Held:
    """A tensor to be read later, whether it is kept for that or not."""

    def __init__(self, tensor: Tensor, own: bool) -> None:
        self.kept = tensor if own else None
        self.memory = StorageWeakRef(tensor.untyped_storage())
        self.lies = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        """As it is now."""
        if self.kept is not None:
            return self.kept
        memory = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        assert memory is not None, "it was freed before it was read"
        dtype, *lies = self.lies
        return torch.empty(0, dtype=dtype).set_(memory, *lies)  # type: ignore[call-overload, no-any-return]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
