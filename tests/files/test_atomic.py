"""Atomic writes: a failure leaves what was there, and nothing aside."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from zeroforget.files import atomic


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in (b"old", b"new"):
        atomic.write_bytes(path, content)
        assert path.read_bytes() == content
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(os, failing, refuse)
    with pytest.raises(OSError) as error:
        atomic.write_bytes(tmp_path / "a", b"new")
    assert error.value.errno == errno.ENOSPC
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        atomic.write_bytes(tmp_path / "no" / "a", b"new")
    assert error.value.filename == str(tmp_path / "no" / "a")


def test_a_place_that_is_taken_stays_as_it_is(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    with pytest.raises(FileExistsError, match="is there already; it was left as it is"):
        atomic.place(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "new").is_dir()


def test_a_name_that_the_disk_does_not_confirm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "new").write_bytes(b"new")
    monkeypatch.setattr(atomic, "sync_folder", refuse)
    with pytest.raises(atomic.Unconfirmed) as error:
        atomic.place(tmp_path / "new", tmp_path / "final")
    assert (error.value.errno, (tmp_path / "final").read_bytes()) == (errno.EIO, b"new")
