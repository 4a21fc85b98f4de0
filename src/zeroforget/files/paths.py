"""Paths that people give, to read from or to write to."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

EMPTY = "a path is empty; name a file or a folder, or . for the current folder"


def as_path(path: str | os.PathLike[str], error: type[Exception] = ValueError) -> Path:
    """A path as it was given. An empty one, which Python takes for the current folder, is refused."""
    if os.fspath(path) == "":
        raise error(EMPTY)
    return Path(path)


class NotRegular(OSError):
    """What lies at a path is no file whose content could be read: a folder, a pipe, a device."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Of a pipe, to open it would wait for whoever writes into it: NotRegular."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotRegular(f"{path} is no regular file")
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """The bytes of a file; NotRegular for a pipe, which might never end, or never begin."""
    with open_regular(path) as file:
        return file.read()


def remove(path: Path) -> None:
    """Remove what lies at a path, if anything does: a folder with all in it, or a link, a pipe or a file by itself. To
    look into a link or a pipe as if it were a folder would leave it there, or wait for it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
