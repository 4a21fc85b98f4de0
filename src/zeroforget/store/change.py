"""Changing a model under its lock. What fails leaves the model as it was, and no folder where there was none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from zeroforget.store import files
from zeroforget.store.folder import TRAINING, Folder
from zeroforget.store.lock import NAME, locked
from zeroforget.store.network import command
from zeroforget.store.options import Watch


@contextlib.contextmanager
def changing(folder: Folder, watch: Watch) -> Iterator[None]:
    """Hold the lock of a model; its folder is made if need be."""
    path = folder.path
    with files.told(path):
        folder.check_place()
        new = [place for place in (path, *path.parents) if not place.exists()]
        files.make(path)
        with locked(path, command(), wait=watch.wait, say=watch.say):
            files.clear(path)
            try:
                yield
            except BaseException:
                with contextlib.suppress(OSError):
                    _tidy(folder, new)
                raise


def _tidy(folder: Folder, new: Sequence[Path]) -> None:
    """Remove what a failure left, folders that were made for it too, but for training that can be gone on with."""
    path = folder.path
    files.clear(path)
    if any((path / TRAINING).glob("phase-*")):
        return
    shutil.rmtree(path / TRAINING, ignore_errors=True)
    if new and {entry.name for entry in path.iterdir()} <= {NAME}:
        (path / NAME).unlink(missing_ok=True)
        for place in new:
            place.rmdir()
