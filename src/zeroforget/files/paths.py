"""Paths that people give, to read from or to write to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

EMPTY = "a path is empty; name a file or a folder, or . for the current folder"


def as_path(path: str | os.PathLike[str], error: type[Exception] = ValueError) -> Path:
    """A path as it was given. An empty one, which Python takes for the current folder, is refused."""
    if os.fspath(path) == "":
        raise error(EMPTY)
    return Path(path)


def in_the_way(path: Path, what: str, is_one: Callable[[Path], bool]) -> str | None:
    """Why `what` may not be written here: something else lies there, and would be lost. None: it may."""
    if path.exists() and not path.is_file():
        return f"{path} is no regular file, and would be replaced by one; name another"
    try:
        if not path.is_file() or not path.stat().st_size or is_one(path):
            return None
        why = f"is no {what} of zeroforget's"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    return f"{path} is there and {why}; name another file, or remove it first"
