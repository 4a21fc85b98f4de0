"""A lock for file systems that have none: whoever creates the next numbered file holds it, as long as it keeps writing
there. No clocks are compared, and nothing is asked of the file system but that two cannot create the same file."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zeroforget.files.locks import Held, in_words, signature
from zeroforget.files.paths import open_regular

BEAT_S = 10.0
"""Seconds between two signs of life."""
LEASE_S = 60.0
"""Seconds without a sign of life after which others may take the lock."""
_FREE = b"free"
_LONGEST = 2**16


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
            _write(_file(self.path, self.number), json.dumps(self.note).encode())
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
            _write(_file(self.path, self.number), _FREE)


@contextlib.contextmanager
def leased(path: Path, doing: str) -> Iterator[Lease]:
    """Hold the lock whose files are called `path` and a number. `Held` while there is another holder: whoever tries
    again finds out in time that it has ended."""
    lease = _taken(path, doing)
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


def _taken(path: Path, doing: str) -> Lease:
    newest = _newest(path)
    if newest:
        note = _read(_file(path, newest))
        if note != _FREE and not _dead(_file(path, newest), note):
            raise Held(in_words(note))
    mine = newest + 1
    try:
        os.close(os.open(_file(path, mine), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:  # somebody was quicker
        raise Held(in_words(_read(_file(path, mine)))) from None
    if (newest := _newest(path)) > mine:  # this one was slow: the file of that number had come and gone
        _file(path, mine).unlink(missing_ok=True)
        raise Held(in_words(_read(_file(path, newest))))
    lease = Lease(path, mine, signature(doing) | {"life": _life(os.getpid())})
    lease.beat()
    for number in _numbers(path):
        if number < mine:  # never the highest, so that numbers only rise
            _file(path, number).unlink(missing_ok=True)
            _seen.pop(_file(path, number), None)
    return lease


def _file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _numbers(path: Path) -> list[int]:
    ends = (entry.name.removeprefix(f"{path.name}.") for entry in path.parent.glob(f"{path.name}.*"))
    return [int(end) for end in ends if end.isdecimal()]


def _newest(path: Path) -> int:
    return max(_numbers(path), default=0)


def _read(file: Path) -> bytes:
    try:
        with open_regular(file) as content:
            return content.read(_LONGEST)
    except FileNotFoundError:
        return b""


def _write(file: Path, content: bytes) -> None:
    """In place: a file that another process has removed is not made again."""
    handle = os.open(file, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.write(handle, content)
        os.ftruncate(handle, len(content))
        os.fsync(handle)
    finally:
        os.close(handle)


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
