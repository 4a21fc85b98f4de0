"""A lock between processes: a file that tells who holds it. The system drops the lock with the process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from zeroforget.files.atomic import make_folder
from zeroforget.files.paths import open_regular

PAUSE_S = 0.1
SIGNING_S = 1.0
"""How long a process may take to sign the lock that it has just taken."""
_LONGEST = 2**16
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class Held(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(f"the lock is held by {holder}")


class NoLocks(OSError):
    """The file system has no locks."""


@contextlib.contextmanager
def locked(
    path: Path, doing: str, *, wait: float | None = None, waiting: Callable[[str], None] = lambda holder: None
) -> Iterator[None]:
    """Hold the lock at `path`, signed with what this process is `doing`.

    `wait`: seconds to wait for another holder, then `Held` is raised; None waits as long as it takes. `waiting` is told
    the holder, once, before the wait.
    """
    lock = FileLock(path, fallback_to_soft=False)
    began, told = time.monotonic(), False
    while not _taken(lock, path):
        if wait is not None and time.monotonic() - began >= wait:
            raise Held(_holder(path))
        if not told:
            waiting(_holder(path))
            told = True
        time.sleep(PAUSE_S)
    try:
        _sign(path, doing)
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def locked_if_possible(path: Path) -> Iterator[bool]:
    """Hold the lock; False where the file system has none, and two may then do the same work, unharmed."""
    with contextlib.ExitStack() as stack:
        alone = True
        try:
            stack.enter_context(locked(path, this_process()))
        except NoLocks:
            alone = False
        yield alone


def _taken(lock: FileLock, path: Path) -> bool:
    """Whether the lock is ours now. A holder may have removed the file, and its folder, when it was done."""
    make_folder(path.parent)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.ELOOP, "it should be a lock and is a link, or no file; remove it", str(path))
    try:
        lock.acquire(blocking=False)
    except (Timeout, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocks(error.errno, "the file system has no locks", str(path)) from error
        raise
    return True


def signature(doing: str) -> dict[str, object]:
    """Who holds a lock, for those that ask."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": doing,
        "since": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _sign(path: Path, doing: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk the note is missing
        handle = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        try:
            if os.fstat(handle).st_nlink == 1:  # a file that has another name, too, is somebody's
                os.ftruncate(handle, 0)
                os.write(handle, json.dumps(signature(doing)).encode())
        finally:
            os.close(handle)


def _holder(path: Path) -> str:
    """Who holds the lock, in words. It was taken a moment before its holder signed it."""
    for _ in range(round(SIGNING_S / 0.01)):
        with contextlib.suppress(OSError):
            with open_regular(path) as file:
                note = file.read(_LONGEST).strip()
            if note:
                return in_words(note)
        time.sleep(0.01)
    return "another process"


def in_words(note: bytes) -> str:
    """A signature as people read it."""
    try:
        values = json.loads(note)
        if isinstance(values, int):  # as runs were signed once
            return f"process {values}"
        return f"process {values['pid']} on {values['host']} ('{values['command']}', since {values['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


def this_process() -> str:
    """The command that this process is, for the lock's note."""
    try:
        words = Path(f"/proc/{os.getpid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "python"
    texts = [word.decode(errors="replace") for word in words if word]
    return " ".join(Path(text).name if place < 2 else text for place, text in enumerate(texts))[:200]
