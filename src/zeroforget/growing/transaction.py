"""A change of a network's structure that happens as a whole or not at all."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

Net = TypeVar("Net", bound=nn.Module)
Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def all_or_nothing(change: Callable[Concatenate[Net, Arguments], Made]) -> Callable[Concatenate[Net, Arguments], Made]:
    """For a method that gives its network other parts and tensors, and writes into none that it had: whatever ends it
    early, Ctrl-C or want of memory, the network is what it was. Whoever else wants the network's `lock` waits."""

    @functools.wraps(change)
    def changed(net: Net, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        lock: Any = net.lock
        with lock, as_it_was(net):
            return change(net, *args, **kwargs)

    return changed


@contextmanager
def as_it_was(net: nn.Module) -> Iterator[None]:
    """What ends this early leaves the network with the parts and tensors that it had; what was written into these is
    for others to put back."""
    lock: Any = net.lock
    with lock:
        before = [(module, _held(module)) for module in net.modules()]
    try:
        yield
    except BaseException:
        with lock:
            for module, held in before:
                object.__setattr__(module, "__dict__", held)
        raise


def _held(module: nn.Module) -> dict[str, Any]:
    """All that a module holds; its lists and tables as they are now, for they are written into.

    Those of hooks are not, and have to stay the same: whoever holds a hook's handle removes it from there.
    """
    return {
        name: copy.copy(value) if type(value) in (dict, list, set, OrderedDict) and "_hooks" not in name else value
        for name, value in vars(module).items()
    }
