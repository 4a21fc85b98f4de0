"""A lock by files that are created once: one holder, who is told, and who loses it when no sign of life comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from zeroforget.files import locks
from zeroforget.files.locks import Held, Lost, leased


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time passes when it is told to."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(locks.Lease, "keep", lambda self: None)

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_one_holder_who_is_told(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with leased(path, "learning birds") as lease:
        told = rf"process {os.getpid()} on .* \('learning birds', since 20.*Z\)"
        with pytest.raises(Held, match=told), leased(path, "learning fish"):
            pass
        lease.check()
    with leased(path, "learning fish") as lease:
        assert json.loads((tmp_path / ".lock.2").read_bytes())["command"] == "learning fish"
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock.2"]


def test_who_gives_no_sign_of_life_loses_it(tmp_path: Path, clock: Callable[[float], None]) -> None:
    path = tmp_path / ".lock"
    held = leased(path, "frozen")
    lease = held.__enter__()
    for _ in range(3):
        with pytest.raises(Held), leased(path, "next"):
            pass
        clock(locks.LEASE_S - 1)
        lease.beat()
    clock(locks.LEASE_S - 1)
    with pytest.raises(Held), leased(path, "next"):
        pass  # seen just now with another sign of life than before
    clock(locks.LEASE_S + 1)
    with leased(path, "next") as other:
        with pytest.raises(Lost, match="another process may have taken it"):
            lease.check()
        lease.beat()  # too late: nothing is written
        held.__exit__(None, None, None)
        other.check()
        with pytest.raises(Held, match="'next'"), leased(path, "third"):
            pass


def test_a_holder_cut_off_from_its_files_notices_by_itself(tmp_path: Path, clock: Callable[[float], None]) -> None:
    with leased(tmp_path / ".lock", "cut off") as lease:
        lease.check()
        clock(locks.LEASE_S + 1)
        with pytest.raises(Lost):
            lease.check()


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    code = "import os, sys; from pathlib import Path; from zeroforget.files.locks import leased\n"
    code += "held = leased(Path(sys.argv[1]), 'killed'); held.__enter__(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == 9
    note = json.loads((tmp_path / ".lock.1").read_bytes())
    (tmp_path / ".lock.1").write_text(json.dumps(note | {"life": f"elsewhere {note['life']}"}))
    with pytest.raises(Held, match="'killed'"), leased(path, "next"):
        pass
    (tmp_path / ".lock.1").write_text(json.dumps(note))
    with leased(path, "next") as lease:
        assert lease.number == 2


def test_who_was_slow_does_not_take_a_number_that_has_come_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lock"
    (tmp_path / ".lock.7").write_bytes(b"")
    newest = iter([0, 7])  # at its first look there was none
    monkeypatch.setattr(locks, "_newest", lambda path: next(newest))
    with pytest.raises(Held), leased(path, "slow"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock.7"]


def test_threads_that_hurry_hold_it_one_after_another(tmp_path: Path) -> None:
    """Each counts what it reads before and writes after: with two at a time counts would be lost."""
    path, counter = tmp_path / ".lock", tmp_path / "counter"
    counter.write_text("0")

    def count() -> None:
        for _ in range(5):
            taken = False
            while not taken:
                with suppress(Held), leased(path, "counting") as lease:
                    before = int(counter.read_text())
                    time.sleep(0.001)
                    counter.write_text(str(before + 1))
                    lease.check()
                    taken = True

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.read_text() == "20"
