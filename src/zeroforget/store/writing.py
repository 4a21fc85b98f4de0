"""Writing into a model's folder under its lock, and writing files for others: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroforget.files import atomic, locks
from zeroforget.files.paths import in_the_way, remove
from zeroforget.store.errors import Locked, ModelError
from zeroforget.store.folder import LOCK, MODEL, TRAINING, Folder
from zeroforget.store.network import Addition
from zeroforget.store.pictures import Told
from zeroforget.training import Progress

_OWN = {MODEL, "tasks", TRAINING, LOCK, "trust.json", "serving.json"}
_OUTPUT_REASONS = {
    errno.ENOSPC: "the disk is full; make room, or write it elsewhere",
    errno.EDQUOT: "the disk is full; make room, or write it elsewhere",
    errno.EROFS: "that is a read-only file system; write it elsewhere",
    errno.EACCES: "this user may not write there; write it elsewhere",
    errno.EPERM: "this user may not write there; write it elsewhere",
}


@dataclass(frozen=True)
class Watch:
    """Who is told what happens."""

    say: Callable[[str], None] = lambda text: None
    decoding: Told | None = None
    training: Callable[[Progress], None] | None = None
    wait: float | None = None
    """Seconds to wait for another process that changes the model; None waits as long as it takes."""
    adds: Callable[[Sequence[Addition]], None] = lambda additions: None


@contextlib.contextmanager
def locked(
    path: Path, doing: str = "", *, wait: float | None = None, say: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Hold the lock of a model's folder: one writer at a time. Readers neither take it nor wait for it."""

    def waiting(holder: str) -> None:
        say(f"waiting: {path} is being changed by {holder}")

    for name in sorted(_OWN):
        if (path / name).is_symlink():
            raise ModelError(
                f"{path / name} is a link, and nothing is written through one; put in its place what it links to"
            )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.locked(path / LOCK, doing or locks.this_process(), wait=wait, waiting=waiting))
        except locks.Held as error:
            raise Locked(
                f"{path} is being changed by {error.holder}; wait for it, or stop it, and try again"
            ) from error
        yield


@contextlib.contextmanager
def changing(folder: Folder, watch: Watch) -> Iterator[None]:
    """Hold the lock of a model; its folder is made if need be. What fails leaves the model as it was, and no folder
    where there was none."""
    path = folder.path
    with told(path):
        folder.check_place()
        new = [place for place in (path, *path.parents) if not place.exists()]
        atomic.make_folder(path)
        with locked(path, wait=watch.wait, say=watch.say):
            folder.clear()
            try:
                yield
            except BaseException:
                with contextlib.suppress(OSError):
                    _tidy(folder, new)
                raise


def _tidy(folder: Folder, new: Sequence[Path]) -> None:
    """Remove what a failure left, folders that were made for it too, but for training that can be gone on with."""
    path = folder.path
    folder.clear()
    if any((path / TRAINING).glob("phase-*")):
        return
    remove(path / TRAINING)
    if new and {entry.name for entry in path.iterdir()} <= {LOCK}:
        (path / LOCK).unlink(missing_ok=True)
        for place in new:
            place.rmdir()


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """Turn what the system says about a failed write into what it means for the model."""
    try:
        yield
    except OSError as error:
        there = (folder / MODEL).exists()
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


# Files for others ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def output(out: Path, ending: str = ".part") -> Iterator[Path]:
    """A file to write beside `out`; it gets that name if nothing goes wrong, and is removed otherwise.

    What lies at `out` goes then: `check_output` comes first.
    """
    try:
        with atomic.replacing(out, out.with_name(f".{os.getpid()}-{out.stem[:40]}{ending}")) as aside:
            yield aside
    except OSError as error:
        why = _OUTPUT_REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise ModelError(f"{out} could not be written: {why}") from error


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
