"""Locks between processes. The system drops them with the process; where it has none, leases stand in."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from zeroforget.files.atomic import make_folder, write_new, write_over
from zeroforget.files.paths import open_regular

PAUSE_S = 0.1
SIGNING_S = 1.0
"""How long a process may take to sign the lock that it has just taken."""
BEAT_S = 10.0
"""Seconds between two signs of life of a lease."""
LEASE_S = 60.0
"""Seconds without a sign of life after which others may take a lease."""
_FREE = b"free"
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


@contextlib.contextmanager
def alone_in(path: Path) -> Iterator[int]:
    """A small file open for one process at a time, to read and change a few bytes; others wait until it is closed."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


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


# Leases: whoever creates the next numbered file holds the lock, as long as it keeps writing there. No clocks are
# compared, and nothing is asked of the file system but that two cannot create the same file.


class Lost(Exception):
    """The lock is another process' now: this one was stopped, or cut off from its files, for too long."""


@dataclass
class Lease:
    """A lock that this process holds."""

    path: Path
    number: int
    note: dict[str, object]
    _beaten: float = field(default_factory=time.monotonic)
    _end: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise `Lost` unless the lock is still held."""
        if time.monotonic() - self._beaten > LEASE_S or _newest(self.path) > self.number:
            raise Lost(f"{self.path} was not renewed for {LEASE_S:.0f} seconds, so another process may have taken it")

    def beat(self) -> None:
        """Write a sign of life, unless it is too late."""
        with contextlib.suppress(OSError, Lost):
            self.check()
            self.note["beat"] = str(time.time_ns())  # any other text would do
            write_over(_numbered(self.path, self.number), json.dumps(self.note).encode())
            self._beaten = time.monotonic()

    def keep(self) -> None:
        """Give signs of life until the end."""
        while not self._end.wait(BEAT_S):
            self.beat()

    def give_back(self) -> None:
        """Let others take it at once."""
        self._end.set()
        with contextlib.suppress(OSError, Lost):
            self.check()
            write_over(_numbered(self.path, self.number), _FREE)


@contextlib.contextmanager
def leased(path: Path, doing: str) -> Iterator[Lease]:
    """Hold the lock whose files are called `path` and a number. `Held` while there is another holder: whoever tries
    again finds out in time that it has ended."""
    lease = _lease_taken(path, doing)
    threading.Thread(target=lease.keep, name=f"lease {path}", daemon=True).start()
    try:
        yield lease
    finally:
        lease.give_back()


_seen: dict[Path, tuple[bytes, float]] = {}
"""The sign of life in a file of another process, and since when this process has seen it."""


def _dead(file: Path, note: bytes) -> bool:
    """Whether its writer has ended: nothing has changed for as long as a lease lasts, or its process is gone."""
    if file not in _seen or _seen[file][0] != note:
        _seen[file] = note, time.monotonic()
    return time.monotonic() - _seen[file][1] > LEASE_S or _gone(note)


def _lease_taken(path: Path, doing: str) -> Lease:
    newest = _newest(path)
    if newest:
        note = _note_in(_numbered(path, newest))
        if note != _FREE and not _dead(_numbered(path, newest), note):
            raise Held(in_words(note))
    mine = newest + 1
    try:
        write_new(_numbered(path, mine), b"")
    except FileExistsError:  # somebody was quicker
        raise Held(in_words(_note_in(_numbered(path, mine)))) from None
    if (newest := _newest(path)) > mine:  # this one was slow: the file of that number had come and gone
        _numbered(path, mine).unlink(missing_ok=True)
        raise Held(in_words(_note_in(_numbered(path, newest))))
    lease = Lease(path, mine, signature(doing) | {"life": _life(os.getpid())})
    lease.beat()
    for number in _numbers(path):
        if number < mine:  # never the highest, so that numbers only rise
            _numbered(path, number).unlink(missing_ok=True)
            _seen.pop(_numbered(path, number), None)
    return lease


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _numbers(path: Path) -> list[int]:
    ends = (entry.name.removeprefix(f"{path.name}.") for entry in path.parent.glob(f"{path.name}.*"))
    return [int(end) for end in ends if end.isdecimal()]


def _newest(path: Path) -> int:
    return max(_numbers(path), default=0)


def _note_in(file: Path) -> bytes:
    try:
        with open_regular(file) as content:
            return content.read(_LONGEST)
    except FileNotFoundError:
        return b""


def _gone(note: bytes) -> bool:
    """Whether the process that signed was of this machine and has ended: then there is nothing to wait for."""
    try:
        signed = json.loads(note)
        life, now = signed["life"], _life(signed["pid"])
        own = _life(os.getpid())
    except (ValueError, KeyError, TypeError):
        return False
    same_machine = isinstance(life, str) and own is not None and life.rpartition(" ")[0] == own.rpartition(" ")[0]
    return same_machine and life != now


def _life(pid: object) -> str | None:
    """A process of this machine and nothing else: which start of the system, which name space, since when. None where
    the system does not tell, or there is no such process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").readlink()
        began = Path(f"/proc/{int(str(pid))}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError, IndexError):
        return None
    return f"{boot} {space} {began}"
