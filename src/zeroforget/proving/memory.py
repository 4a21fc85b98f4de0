"""Memory that trials have used goes back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Let the C library give back what is free in its heap.

    It keeps tensors' memory there in pieces, and those that a trial leaves do not fit the tensors of the next: without
    this, a process grows to several times what is in use at any time.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """The GNU C library's `malloc_trim`, where that is the one in use."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found
