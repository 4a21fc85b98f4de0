"""Writing so that a crash, a full disk or a power cut leaves the old state or the new one, never something between."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PART = 2**24


class Unconfirmed(OSError):
    """A file or folder has its name, but the disk did not confirm that it will keep it."""


def write_new(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a new file and make it last. An existing one is never touched."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(handle, view[:_PART]) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, in place of the one that may be there."""
    with replacing(path) as aside:
        write_new(aside, content)


def write_over(path: Path, content: bytes) -> None:
    """Write in place, for a note of a few bytes: a file that another process has removed is not made again."""
    handle = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.write(handle, content)
        os.ftruncate(handle, len(content))
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path, aside: Path | None = None) -> Iterator[Path]:
    """A file to write beside `path`. It is made to last and gets that name, or, if anything goes wrong, is removed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp") if aside is None else aside
    try:
        with suppress(FileNotFoundError):
            aside.unlink()  # what lies there, a link perhaps, is not written through
        yield aside
        replace(aside, path)
    except OSError as error:
        if error.filename == str(aside):
            error.filename = str(path)  # what was asked for, not the name aside
        raise
    finally:
        with suppress(OSError):  # where nothing may be written nothing is there to remove
            aside.unlink(missing_ok=True)


def replace(aside: Path, final: Path) -> None:
    """A finished file is made to last and gets its name, in place of the file that may have it."""
    sync_file(aside)
    aside.replace(final)
    sync_folder(final.parent)


def place(aside: Path, final: Path) -> None:
    """A finished file or folder gets its name. FileExistsError if there is something of that name."""
    if final.exists():
        raise FileExistsError(f"{final} is there already; it was left as it is")
    if aside.is_dir():
        sync_folder(aside)
    aside.rename(final)
    try:
        sync_folder(final.parent)
    except OSError as error:
        raise Unconfirmed(error.errno, error.strerror, str(final)) from error


def make_folder(folder: Path) -> None:
    """Make a folder that is not there yet, with those above it, and make them last."""
    if not folder.is_dir():
        new = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in new:
            sync_folder(place.parent)


def sync_file(path: Path) -> None:
    """Make a file's content last through a power cut."""
    _sync(os.open(path, os.O_RDONLY))


def sync_folder(folder: Path) -> None:
    """Make what was named, renamed or removed in this folder last through a power cut."""
    _sync(os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)))


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
