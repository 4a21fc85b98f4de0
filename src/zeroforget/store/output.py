"""A file that a model writes for others: whole or not at all, and over nothing but its like."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroforget.data.paths import in_the_way
from zeroforget.store import files
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import MODEL, TRAINING
from zeroforget.store.lock import NAME

_REASONS = {
    errno.ENOSPC: "the disk is full; make room, or write it elsewhere",
    errno.EDQUOT: "the disk is full; make room, or write it elsewhere",
    errno.EROFS: "that is a read-only file system; write it elsewhere",
    errno.EACCES: "this user may not write there; write it elsewhere",
    errno.EPERM: "this user may not write there; write it elsewhere",
}
_OWN = {MODEL, "tasks", TRAINING, NAME}


@contextmanager
def output(out: Path, ending: str = ".part") -> Iterator[Path]:
    """A file to write beside `out`; it gets that name if nothing goes wrong, and is removed otherwise.

    What lies at `out` goes then: `check_output` comes first.
    """
    aside = out.with_name(f".{os.getpid()}-{out.stem[:40]}{ending}")
    try:
        yield aside
        aside.replace(out)
        files.sync(out.parent)
    except OSError as error:
        why = _REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise ModelError(f"{out} could not be written: {why}") from error
    finally:
        with suppress(OSError):  # where nothing may be written nothing is there to remove
            aside.unlink(missing_ok=True)


def check_output(out: Path, model: Path, what: str, is_one: Callable[[Path], bool]) -> None:
    """Refuse a place where no file can be written, that is the model's own, or that holds another kind of file."""
    if not out.parent.is_dir():
        raise ModelError(f"there is no folder {out.parent} to write {out.name} into; make it first")
    if out.is_dir():
        raise ModelError(f"{out} is a folder; name a file to write")
    place, own = out.parent.resolve() / out.name, model.resolve()
    if place.is_relative_to(own) and place.relative_to(own).parts[0] in _OWN:
        raise ModelError(f"{out} belongs to the model itself; name another file to write")
    if (why := in_the_way(out, what, is_one)) is not None:
        raise ModelError(why)
