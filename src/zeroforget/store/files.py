"""Writing so that a crash, a full disk or a power cut leaves the old state or the new one, never something between."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeroforget.data import paths
from zeroforget.store.errors import ModelError

ASIDE = ".aside-"
"""How folders begin that are being written; they are nothing until they are renamed."""
UNDONE = ".undone-"
"""How folders begin that are being removed."""
_PART = 2**24


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path as it was given, unless it is empty."""
    return paths.as_path(path, ModelError)


def write(path: Path, content: bytes) -> None:
    """Write a new file and make it last. An existing one is never touched."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(handle, view[:_PART]) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(folder: Path) -> None:
    """Make what was named, renamed or removed in this folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make(folder: Path) -> None:
    """Make a folder that is not there yet, with those above it, and make them last."""
    if not folder.is_dir():
        new = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in new:
            sync(place.parent)


def place(aside: Path, final: Path) -> None:
    """The one step that changes a model: a finished folder or file gets its name."""
    if final.exists():
        raise ModelError(f"{final} is there already; it was left as it is")
    if aside.is_dir():
        sync(aside)
    aside.rename(final)
    try:
        sync(final.parent)
    except OSError as error:
        raise ModelError(
            f"{final} is written, but the disk did not confirm it ({error.strerror}); verify the model before you rely "
            "on it"
        ) from error


def clear(folder: Path) -> None:
    """Remove what a process left that was stopped while it wrote or removed."""
    for left in [*folder.glob(f"{ASIDE}*"), *folder.glob(f"{UNDONE}*")]:
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Turn what the system says about a failed write into what it means for the model."""
    try:
        yield
    except OSError as error:
        there = (folder / "model.json").exists()
        reading = "; predict, tasks, verify and export still work" if there else ""
        reasons = {
            errno.ENOSPC: "the disk is full; make room and try again",
            errno.EDQUOT: "the quota is used up; make room and try again",
            errno.EFBIG: "a file would be larger than allowed; raise the limit and try again",
            errno.EROFS: f"it is on a read-only file system{reading}",
            errno.EACCES: f"it may not be written by this user{reading}",
            errno.EPERM: f"it may not be written by this user{reading}",
            errno.EIO: "the disk reports an error; look to your disk, and to a copy of the model",
        }
        if error.errno not in reasons:
            raise
        why = reasons[error.errno]
        raise ModelError(
            f"{folder} cannot be changed: {why}. The model is as it was"
            if there
            else f"no model can be made in {folder}: {why}"
        ) from error
