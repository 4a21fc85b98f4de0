"""Locks between processes: who holds one is told, and plain `flock` on the same file is the same lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from zeroforget.files.locks import Held, NoLocks, locked, this_process


def test_the_holder_is_told(tmp_path: Path) -> None:
    path = tmp_path / "new" / ".lock"
    with locked(path, "learning birds"):
        note = json.loads(path.read_bytes())
        assert (note["pid"], note["command"]) == (os.getpid(), "learning birds")
        told = rf"process {os.getpid()} on .* \('learning birds', since 20.*Z\)"
        with pytest.raises(Held, match=told), locked(path, "learning fish", wait=0.0):
            pass
        assert json.loads(path.read_bytes()) == note
    with locked(path, "learning fish", wait=0.0):
        assert json.loads(path.read_bytes())["command"] == "learning fish"


def test_a_plain_flock_keeps_us_out_and_we_keep_it_out(tmp_path: Path) -> None:
    """As the versions before did it, for models and for runs."""
    path = tmp_path / ".lock"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("4711")
        file.flush()
        with pytest.raises(Held) as refused, locked(path, "", wait=0.0):
            pass
        assert refused.value.holder == "process 4711"
        fcntl.flock(file, fcntl.LOCK_UN)
        with locked(path, "", wait=0.0), pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_wait_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / ".lock"
    with locked(path, "first"), pytest.raises(Held), locked(path, "second", wait=0.25, waiting=told.append):
        pass
    assert len(told) == 1
    assert "'first'" in told[0]


def test_a_removed_folder_is_made_again(tmp_path: Path) -> None:
    with locked(tmp_path / "m" / ".lock", "first"):
        shutil.rmtree(tmp_path / "m")
        with locked(tmp_path / "m" / ".lock", "second", wait=0.0):
            assert (tmp_path / "m" / ".lock").exists()


def test_a_file_system_without_locks_has_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    for code in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):

        def without(*_: object, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("fcntl.flock", without)
        with pytest.raises(NoLocks, match="the file system has no locks"), locked(tmp_path / ".lock", ""):
            pass


def test_a_process_knows_its_command() -> None:
    assert "python" in this_process() or "pytest" in this_process()
