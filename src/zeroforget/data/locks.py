"""A lock between processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def only_one(path: Path) -> Iterator[bool]:
    """Hold the lock of this file; False where the system has none, and two may then do the same work, unharmed."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield False
            return
        yield True
