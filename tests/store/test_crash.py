"""Killed at any moment, refused at any write: the model is the old one or the new one, and the next try succeeds."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import SEED, many
from tests.store.helpers import LATER, tree
from zeroforget.store import Model, ModelError, open_model
from zeroforget.store.folder import TRAINING

ROOT = Path(__file__).parents[2]


def campaign(trained: Path, data: Path, base: Path, rounds: int, steps: int, seed: int) -> list[dict[str, Any]]:
    words = [sys.executable, "-m", "tests.store.crash", trained, data, base, rounds, steps, seed]
    done = subprocess.run([str(w) for w in words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for one in found:
        assert one["state"] in {"old", "new"}, one
        assert one["holds"], one
        assert one["again"], one
    return found


def test_killed_at_some_moments(trained: Path, data: Path, tmp_path: Path) -> None:
    found = campaign(trained, data, tmp_path, rounds=4, steps=1, seed=1)
    assert len(found) >= 6
    assert sum(one["killed"] for one in found) >= 5
    assert {"old", "new"} == {one["state"] for one in found}


@pytest.mark.soak
def test_killed_at_random_moments_and_before_every_file_operation(trained: Path, data: Path, tmp_path: Path) -> None:
    rounds = many(560)
    found = campaign(trained, data, tmp_path, rounds=rounds, steps=-1, seed=2 + SEED)
    killed = [one for one in found if one["killed"]]
    assert sum("step" not in one for one in killed) >= rounds - 4
    assert sum("step" in one for one in killed) >= 30
    print(f"{len(found)} attempts, {len(killed)} killed, each left the old model or the new one")


FUNCTIONS = ("write", "fsync", "rename", "mkdir")


class Refusal:
    """Makes the nth call that changes the disk fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.left, self.code, self.hit = number, code, ""
        for name in FUNCTIONS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                self.hit = name
                raise OSError(self.code, os.strerror(self.code), *[a for a in args if isinstance(a, (str, Path))][:1])
            return function(*args, **kwargs)

        return counted


def refused(model: Model, data: Path, number: int, code: int) -> str:
    """Learn with the nth write refused; which call that was, or nothing if there are fewer."""
    shutil.rmtree(model.path / TRAINING, ignore_errors=True)  # each time from the very beginning
    before, said = tree(model.path), ""
    with pytest.MonkeyPatch.context() as patch:
        refusal = Refusal(patch, number, code)
        try:
            model.learn(data / "high", "high", **(LATER | {"epochs": 1}))
        except ModelError as error:
            said = str(error)
    again = open_model(model.path)
    assert said or len(again.tasks) == 3
    if len(again.tasks) == 2:
        assert tree(model.path) == before
        assert f"{model.path} cannot be changed" in said
        assert "The model is as it was" in said
    elif said:
        assert "the disk did not confirm it" in said
    assert again.verify()
    if len(again.tasks) == 3:  # it was refused after the rename, or not at all
        again.undo()
        assert tree(model.path) == before
    model.refresh()
    return refusal.hit


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_write_refused(model: Model, data: Path, code: int) -> None:
    hits = []
    while not hits or hits[-1]:
        hits.append(refused(model, data, len(hits), code))
    assert len(hits) > 15
    assert {"write", "fsync", "rename", "mkdir"} <= set(hits)
    model.learn(data / "high", "high", **(LATER | {"epochs": 1}))
    assert model.verify()


def test_a_real_limit_on_the_size_of_files(model: Model, data: Path) -> None:
    """The system itself refuses: the checkpoint's writes too, which go past Python."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from zeroforget.store import open_model\n"
        "model = open_model(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))\n"
        "try: model.learn(sys.argv[2], 'high', epochs=1)\n"
        "except ValueError as error: print(error)\n"
        "assert len(open_model(sys.argv[1]).tasks) == 2 and model.verify()\n"
    )
    before = tree(model.path)
    words = [sys.executable, "-c", script, str(model.path), str(data / "high"), "2000"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "cannot be changed" in done.stdout
    assert "The model is as it was" in done.stdout
    assert tree(model.path) == before
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_leftovers_of_a_crash_are_cleared_by_the_next_writer(model: Model, data: Path) -> None:
    for name in (".aside-003-high", ".undone-002-x"):
        (model.path / name).mkdir()
        (model.path / name / "born.safetensors").write_bytes(b"half")
    (model.path / ".aside-model.json").write_text("half")
    assert model.verify()
    model.learn(data / "high", "high", **(LATER | {"epochs": 1}))
    assert sorted(entry.name for entry in model.path.iterdir()) == [".lock", "model.json", "tasks"]
