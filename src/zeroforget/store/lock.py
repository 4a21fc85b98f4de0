"""One writer at a time: a lock on a file that tells who holds it. Readers neither take it nor wait for it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from zeroforget.store import files
from zeroforget.store.errors import Locked

NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path, doing: str, *, wait: float | None, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the model's lock. `wait`: seconds to wait for another holder; None waits as long as it takes."""
    handle = _held(folder, wait, say)
    try:
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": doing,
            "since": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        with contextlib.suppress(OSError):  # on a full disk the note is missing, and the lock is held all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(holder).encode(), 0)
        yield
    finally:
        os.close(handle)  # the lock goes with it, also when the process dies


def _held(folder: Path, wait: float | None, say: Callable[[str], None]) -> int:
    """The locked file; one that its holder has removed meanwhile locks nothing, so another is made."""
    while True:
        files.make(folder)
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _acquire(handle, folder, wait, say)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), (folder / NAME).stat()):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _acquire(handle: int, folder: Path, wait: float | None, say: Callable[[str], None]) -> None:
    if sys.platform == "win32":
        return  # no flock there; renames still keep every state whole
    import fcntl

    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(handle)
        if wait is not None and time.monotonic() - began >= wait:
            raise Locked(f"{folder} is being changed by {holder}; wait for it, or stop it, and try again")
        if not told:
            say(f"waiting: {folder} is being changed by {holder}")
            told = True
        time.sleep(0.1)


def _holder(handle: int) -> str:
    try:
        values = json.loads(os.pread(handle, 4096, 0))
        return f"process {values['pid']} on {values['host']} ('{values['command']}', since {values['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
