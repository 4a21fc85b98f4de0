"""Kills a learning, receiving or undoing process at seeded moments and looks at what is left.

Run as a program: it forks for every attempt, from a process that has never trained, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.store.helpers import LATER, QUICK
from zeroforget.store import open_model
from zeroforget.store.folder import Folder
from zeroforget.store.verify import verify

Act = Callable[[], object]
STEPS = ("write", "fsync", "rename", "mkdir", "open", "close", "unlink", "rmdir")


def child(act: Act, die_at: int | None = None) -> int:
    """Fork and act; with `die_at`, the process kills itself before that file operation."""
    pid = os.fork()
    if pid:
        return pid
    if die_at is not None:
        _kill_before(die_at)
    code = 1
    try:
        act()
        code = 0
    finally:
        os._exit(code)


def _kill_before(number: int) -> None:
    left = [number]

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*args, **kwargs)

        return counted

    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))


def wait(pid: int) -> int:
    """0: it finished; -9: it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def acts(path: Path, data: Path, update: Path) -> dict[str, Act]:
    """What is interrupted, on a model that has learned `low` and `middle` (`receive`: `low`; `first`: none)."""
    return {
        "first": lambda: open_model(path).learn(data / "low", "low", **QUICK),
        "learn": lambda: open_model(path).learn(data / "high", "high", **LATER),
        "undo": lambda: open_model(path).undo(),
        "receive": lambda: open_model(path).receive(update),
    }


def attempt(kind: str, base: Path, trained: Path, data: Path, kill: Callable[[Act], int]) -> dict[str, object]:
    """One interruption: the model must verify as it was or as it should become, and the same act must then succeed."""
    path = base / "model"
    shutil.rmtree(path, ignore_errors=True)
    if kind != "first":
        shutil.copytree(trained, path)
    if kind == "receive":
        open_model(path).undo()
    act = acts(path, data, base / "update.zfu")[kind]
    before = names(path)
    code = kill(act)
    after = names(path)
    holds = not Folder(path).exists() or bool(verify(Folder(path)))
    expected = {"first": ["low"], "learn": ["low", "middle", "high"], "undo": ["low"], "receive": ["low", "middle"]}[
        kind
    ]
    again = after == expected or wait(child(act)) == 0
    clean = names(path) == expected and bool(verify(Folder(path)))
    return {
        "kind": kind,
        "killed": code == -9,
        "state": "old" if after == before else "new" if after == expected else str(after),
        "holds": holds,
        "again": again and clean,
    }


def names(path: Path) -> list[str]:
    return [task.name for task in open_model(path).tasks]


def at_random(seconds: float, draw: random.Random) -> Callable[[Act], int]:
    def kill(act: Act) -> int:
        pid = child(act)
        time.sleep(draw.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        return wait(pid)

    return kill


def at_step(number: int) -> Callable[[Act], int]:
    return lambda act: wait(child(act, number))


def main(trained: Path, data: Path, base: Path, rounds: int, steps: int, seed: int) -> None:
    """`rounds` kills at random moments, and `steps` before a randomly chosen file operation (-1: before each)."""
    torch.set_num_threads(1)  # threads of a process that forks are not there in its children, which would wait for them
    moments, operations = random.Random(seed), random.Random(seed + 1)  # how many moments it takes is chance
    open_model(trained).ship(base / "update.zfu", since="low")
    out: list[dict[str, object]] = []
    kinds = ["first", "learn", "receive", "undo"]
    seconds: dict[str, float] = {}
    for kind in kinds:

        def unharmed(act: Act, kind: str = kind) -> int:
            began = time.monotonic()
            code = wait(child(act))
            seconds[kind] = time.monotonic() - began
            return code

        attempt(kind, base, trained, data, unharmed)
    for kind in kinds:
        while sum(bool(one["killed"]) for one in out if one["kind"] == kind) < rounds // len(kinds):
            out.append(attempt(kind, base, trained, data, at_random(seconds[kind], moments)))
            if not out[-1]["killed"]:
                seconds[kind] *= 0.9  # it was done before it could be killed
    for kind in kinds:
        most = 60 if kind in {"first", "learn"} else 25
        numbers = range(10_000) if steps < 0 else sorted(operations.sample(range(most), steps))
        for number in numbers:
            out.append(attempt(kind, base, trained, data, at_step(number)) | {"step": number})
            if not out[-1]["killed"]:
                break
    print(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
