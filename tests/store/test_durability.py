"""What a power cut could take: files last before they get their names, and names before anything builds on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.store.helpers import QUICK, learn_more, tree
from zeroforget.files import atomic
from zeroforget.store import Model, ModelError, open_model
from zeroforget.store.folder import TRAINING, place

Step = tuple[str, str]
FILES = ("born.safetensors", "probe.safetensors", "spread.safetensors", "task.json")


@contextmanager
def journal(path: Path) -> Iterator[list[Step]]:
    """What is done to the disk below a folder and with the folder itself, step by step; '.' is the folder."""
    steps: list[Step] = []
    opened: dict[int, str] = {}

    def short(place: Any) -> str:
        return os.path.relpath(os.fspath(place), path)

    def note(name: str, place: str) -> None:
        if not place.startswith((TRAINING, "../", "/")):
            steps.append((name, place))

    def opening(place: Any, flags: int, *rest: Any, **more: Any) -> int:
        handle: int = really["open"](place, flags, *rest, **more)
        opened[handle] = short(place)
        if flags & os.O_CREAT:
            note("create", opened[handle])
        return handle

    def syncing(handle: int) -> None:
        note("fsync", opened[handle])
        really["fsync"](handle)

    def renaming(old: Any, new: Any, **more: Any) -> None:
        note("rename", f"{short(old)} > {short(new)}")
        really["rename"](old, new, **more)

    really: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("open", "fsync", "rename")}
    with pytest.MonkeyPatch.context() as patch:
        for name, watched in (("open", opening), ("fsync", syncing), ("rename", renaming)):
            patch.setattr(os, name, watched)
        yield steps


def written(aside: str, folder: str, *names: str) -> list[Step]:
    """A task's files, each made to last; then the folder they lie in; then its name; then where that stands."""
    each = [step for name in names for step in (("create", f"{aside}/{name}"), ("fsync", f"{aside}/{name}"))]
    return [*each, ("fsync", aside), ("rename", f"{aside} > tasks/{folder}"), ("fsync", "tasks")]


def test_a_first_task_lasts_before_it_has_a_name(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    with journal(path) as steps:
        open_model(path).learn(data / "low", "low", **(QUICK | {"epochs": 1}))
    born, probe, spread, task = FILES
    *content, last, name, place = written(".aside-001-low", "001-low", born, probe, spread, task)
    root = [("create", ".aside-model.json"), ("fsync", ".aside-model.json")]
    root += [("rename", ".aside-model.json > model.json"), ("fsync", "."), ("fsync", ".")]  # and once for tasks
    assert steps == [("fsync", ".."), ("create", ".lock"), *content, *root, last, name, place]
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", "model.json", "tasks"]


def test_new_folders_last_where_they_stand(tmp_path: Path) -> None:
    with journal(tmp_path) as steps:
        atomic.make_folder(tmp_path / "new" / "deep" / "m")
        atomic.make_folder(tmp_path / "new" / "deep" / "m")
    assert sorted(steps) == [("fsync", "."), ("fsync", "new"), ("fsync", "new/deep")]


def test_received_tasks_last_one_by_one(trained: Path, tmp_path: Path) -> None:
    open_model(trained).ship(tmp_path / "all.zfu")
    received = open_model(tmp_path / "m")
    with journal(received.path) as steps:
        received.receive(tmp_path / "all.zfu")
    synced = [place for what, place in steps if what == "fsync"]
    assert {f".aside-received-{n}/{name}" for n in (0, 1) for name in FILES} <= set(synced)
    renamed = [place for what, place in steps if what == "rename"]
    assert renamed == [
        ".aside-model.json > model.json",
        ".aside-received-0 > tasks/001-low",
        ".aside-received-1 > tasks/002-middle",
    ]
    for number, name in ((0, "001-low"), (1, "002-middle")):
        at = steps.index(("rename", f".aside-received-{number} > tasks/{name}"))
        assert steps[at - 1] == ("fsync", f".aside-received-{number}")
        assert steps[at + 1] == ("fsync", "tasks")


def test_a_task_taken_back_leaves_at_once_and_wholly(model: Model) -> None:
    with journal(model.path) as steps:
        model.undo()
    where = [("fsync", "tasks"), ("fsync", ".")]
    assert steps == [("rename", "tasks/002-middle > .undone-002-middle"), *where]
    assert sorted(entry.name for entry in model.path.iterdir()) == [".lock", "model.json", "tasks"]


def test_what_was_left_is_cleared_before_a_task_is_taken_back(model: Model) -> None:
    for name in (".aside-003-high", ".undone-002-middle", ".undone-007-x"):
        (model.path / name).mkdir()
        (model.path / name / "born.safetensors").write_bytes(b"half")
    assert model.undo() == "middle"
    assert sorted(entry.name for entry in model.path.iterdir()) == [".lock", "model.json", "tasks"]


def test_a_file_is_written_whole_though_the_system_takes_it_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, content[:7]))
    atomic.write_new(tmp_path / "new", bytes(range(100)))
    assert (tmp_path / "new").read_bytes() == bytes(range(100))


def test_what_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        atomic.write_new(tmp_path / "old", b"other")
    (tmp_path / "new").write_bytes(b"other")
    with pytest.raises(ModelError, match="is there already; it was left as it is"):
        place(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"mine"


def test_a_failure_before_the_name_leaves_nothing_behind(
    model: Model, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = tree(model.path)
    monkeypatch.setattr(atomic, "place", refuse)
    with pytest.raises(ModelError, match="the disk is full"):
        learn_more(model, data, "high", epochs=1)
    assert tree(model.path) == before
    assert not list(model.path.glob(".aside-*"))


def test_what_was_left_is_cleared_before_a_task_is_learned(model: Model, data: Path) -> None:
    for name in (".aside-003-other", ".undone-007-x"):
        (model.path / name).mkdir()
        (model.path / name / "born.safetensors").write_bytes(b"half")
    learn_more(model, data, "high", epochs=1)
    assert sorted(entry.name for entry in model.path.iterdir()) == [".lock", "model.json", "tasks"]
