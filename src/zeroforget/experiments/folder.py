"""A run's folder on disk: its configuration, its lock, its environment and its log."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from zeroforget._version import __version__
from zeroforget.experiments.comparability import data_changes
from zeroforget.experiments.disk import damaged, read_json, write_json
from zeroforget.experiments.results import FILE, Results
from zeroforget.files import locks
from zeroforget.files.paths import read_regular
from zeroforget.methods import registry

LOCKS = "ZEROFORGET_LOCKS"
"""The environment's word that the file system's locks are not to be used: "lease"."""
_AGAIN = "delete the run's folder and start it again"


class OtherConfiguration(ValueError):
    """The folder holds a run of another configuration."""


class OtherData(OtherConfiguration):
    """The run was begun with other data."""


class Busy(ValueError):
    """Another process is working in the folder."""


@dataclass(frozen=True)
class RunFolder:
    """config.json, data.json, environment.json, log.jsonl, tasks/NNN (finished), learning/NNN (unfinished),
    results.json."""

    path: Path

    @contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        """Keep other processes out. The system drops the lock with the process, however that ends. On a file system
        without locks it is a lease; what is yielded raises `Busy` if it was lost."""
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                held = _lock(stack, self.path / ".lock")
            except locks.Held as error:
                raise Busy(
                    f"{self.path} is being worked on by {error.holder}; wait for it, or choose another --out"
                ) from error

            def check() -> None:
                try:
                    held()
                except locks.Lost as error:
                    raise Busy(str(error)) from error

            yield check

    def begun(self) -> bool:
        """Whether a run has claimed the folder."""
        return (self.path / "config.json").exists()

    def claim(self, config: dict[str, Any], defaults: Mapping[str, Any], processes: int = 1) -> None:
        """Write the configuration, or check that the one that is there is the same. What came with a later version
        had its default before. A run that is not finished goes on with as many processes as began it.

        A run that failed before it began, by an option that does not exist, say, leaves nothing that counts.
        """
        file = self.path / "config.json"
        if not file.exists() or not any((self.path / name).exists() for name in ("log.jsonl", "tasks", FILE)):
            for name in ("environment.json", "data.json"):
                (self.path / name).unlink(missing_ok=True)
            write_json(file, config | ({"processes": processes} if processes > 1 else {}))
            return
        there = _on_any_device(read_json(file, _AGAIN))
        before = there.pop("processes", 1)
        if before != processes and not (self.path / FILE).exists():
            raise OtherConfiguration(
                f"{self.path} holds a run that was begun by {before} process{'es' if before > 1 else ''} and would go "
                f"on with {processes}: what they draw would differ. Start it with {before}, or delete that folder"
            )
        parts = (name for name in defaults if isinstance(there.get(name), dict))
        there |= {name: defaults[name] | there[name] for name in parts}
        if different := differences(there, _on_any_device(config)):
            raise OtherConfiguration(
                f"{self.path} holds a run with another configuration ({'; '.join(different)}); "
                "choose another --out or name, or delete that folder"
            )

    def claim_data(self, facts: dict[str, Any]) -> None:
        """Write what `datafacts` says of the data, or check that the run was begun with the same. Earlier versions
        wrote nothing: their runs go on."""
        file = self.path / "data.json"
        if not file.exists():
            write_json(file, facts)
            return
        there = read_json(file, _AGAIN)
        try:
            different = data_changes(there, facts)
        except (KeyError, TypeError, AttributeError) as error:
            raise damaged(file, f"it lacks {error}", _AGAIN) from error
        if different:
            more = f"; and {len(different) - 4} more" if len(different) > 4 else ""
            raise OtherData(
                f"{self.path} holds a run that was begun with other data ({'; '.join(different[:4])}{more}); "
                "bring them back, choose another --out or name, or delete that folder"
            )

    def results(self) -> Results | None:
        """What the run found, if it is finished."""
        return Results.load(self.path) if (self.path / FILE).exists() else None

    def environment(self, method: str | None = None) -> dict[str, Any]:
        """Where the run was begun, with which code of a method of one's own and which revision of one of ours: written
        once. What another revision began does not go on."""
        file = self.path / "environment.json"
        revision = 0 if method is None else registry.find(method)[0].revision
        if not file.exists():
            told = {"code": None if method is None else registry.code(method), "revision": revision or None}
            write_json(file, environment() | {key: value for key, value in told.items() if value is not None})
        there = read_json(file, "delete it, and it is written anew")
        if method is not None and there.get("revision", 0) != revision:
            raise OtherConfiguration(
                f"{self.path} holds a run that another version of zeroforget began, in which '{method}' learns "
                "otherwise; delete that folder and start it again"
            )
        return there

    def code(self) -> str | None:
        """A name for the code of a method of one's own with which the run was begun, if that was written down."""
        return self.environment().get("code") if (self.path / "environment.json").exists() else None

    def task(self, index: int) -> Path:
        """Where a finished task's state goes."""
        return self.path / "tasks" / f"{index:03d}"

    def learning(self, index: int) -> Path:
        """Where a task that is being learned keeps its checkpoints."""
        return self.path / "learning" / f"{index:03d}"


def _on_any_device(config: dict[str, Any]) -> dict[str, Any]:
    """A run may go on with another device of its kind."""
    regime = config.get("regime")
    if not isinstance(regime, dict) or not isinstance(regime.get("device"), str):
        return config
    return config | {"regime": regime | {"device": regime["device"].partition(":")[0]}}


def _lock(stack: ExitStack, file: Path) -> Callable[[], None]:
    """Hold a lock as long as the stack; what is returned raises `Lost` if it is held no more."""
    doing = locks.this_process()
    if os.environ.get(LOCKS) != "lease":
        with suppress(locks.NoLocks):
            stack.enter_context(locks.locked(file, doing, wait=0.0))
            return lambda: None
    return stack.enter_context(locks.leased(file, doing)).check


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """'regime.lr was 0.05, now 0.1' for each value that differs."""
    found: list[str] = []
    for key in old | new:
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} was {json.dumps(a)}, now {json.dumps(b)}")
    return found


def environment() -> dict[str, Any]:
    """What results may depend on beside the configuration."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "zeroforget": __version__,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(
            ["zeroforget" if Path(sys.argv[0]).stem == "__main__" else Path(sys.argv[0]).name, *sys.argv[1:]]
        ),
    }


@cache
def _commit() -> str | None:
    """The git commit of the source that runs; '+' where files differ from it. A copy that is no checkout is told it by
    ZEROFORGET_COMMIT."""
    if told_by_hand := os.environ.get("ZEROFORGET_COMMIT"):
        return told_by_hand
    here = Path(__file__).resolve().parent
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None if told.returncode == 0 else None


class Log:
    """log.jsonl: one event a line, only ever appended to; a resumed run does not repeat an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = {self._key(event) for event in read_log(path)}
        if path.exists() and not read_regular(path).endswith(b"\n"):
            self._append("\n")  # a kill cut the last line

    def write(self, event: str, **values: Any) -> None:
        """Append an event, unless it is an epoch that is there already."""
        line = {"event": event, **values}
        if event == "epoch":
            if self._key(line) in self._seen:
                return
            self._seen.add(self._key(line))
        self._append(json.dumps(line) + "\n")

    def _append(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    @staticmethod
    def _key(event: dict[str, Any]) -> str:
        return json.dumps([event.get(name) for name in ("event", "task", "trial", "phase", "epoch")])


class Unwritten(Log):
    """What a process that only takes part hears, and keeps to itself."""

    def __init__(self) -> None:
        pass

    def write(self, event: str, **values: Any) -> None:
        """Nothing: the first process writes."""


def read_log(path: Path) -> list[dict[str, Any]]:
    """The events of a log; a line that holds none, as one that a kill cut short, is left out."""
    events: list[dict[str, Any]] = []
    for line in read_regular(path).splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events
