"""The model's folder: reading its chain of tasks, adding a task to it, taking the newest back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeroforget.files import atomic, paths
from zeroforget.files.hashes import sha256
from zeroforget.files.text import composed
from zeroforget.store.errors import Damaged, ModelError
from zeroforget.store.names import kept_name, means, version_of
from zeroforget.store.schema import (
    TASK_FILES,
    VALUES,
    FileFacts,
    ModelFacts,
    TaskFacts,
    read_bytes,
    read_sealed,
    unsealed,
)

if TYPE_CHECKING:
    from torch import Tensor

BORN, PROBE, SPREAD = TASK_FILES[:3]
TASK, MODEL = "task.json", "model.json"
TRAINING, LOCK = ".training", ".lock"
ASIDE = ".aside-"
"""How folders begin that are being written; they are nothing until they are renamed."""
UNDONE = ".undone-"
"""How folders begin that are being removed."""
_ENTRY = re.compile(r"(\d{3,6})-(.+)")


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path as it was given, unless it is empty."""
    return paths.as_path(path, ModelError)


@dataclass(frozen=True)
class Ending:
    """What a model ends with."""

    folder: str = ""
    """The newest task's; empty if there is none."""
    hash: str | None = None
    """None if there is no task, or if its facts cannot be read."""

    def may_be(self, other: Ending) -> bool:
        """Whether both can be one: a task whose facts are damaged is known by its folder alone."""
        return self.folder == other.folder and (self.hash == other.hash or None in (self.hash, other.hash))


@dataclass(frozen=True)
class Chain:
    """A model as its JSON files tell it, checked link by link."""

    model: ModelFacts
    root: str
    """sha256 of model.json."""
    tasks: tuple[TaskFacts, ...]

    @property
    def head(self) -> str:
        """What the next task must name as the one before; it identifies the whole model."""
        return self.tasks[-1].hash if self.tasks else self.root

    @property
    def ending(self) -> Ending:
        """Its newest task, if it has one."""
        return Ending(self.tasks[-1].folder, self.tasks[-1].hash) if self.tasks else Ending()

    @property
    def current(self) -> tuple[TaskFacts, ...]:
        """Of tasks that were learned again the newest version, and all others."""
        newest = {version_of(facts.name)[0]: facts for facts in self.tasks}
        return tuple(facts for facts in self.tasks if newest[version_of(facts.name)[0]] is facts)

    @property
    def guessable(self) -> tuple[TaskFacts, ...]:
        """Tasks that a picture may be guessed to be of: those that have seen some, if any has."""
        return tuple(facts for facts in self.current if facts.measured) or self.current

    def check_pictures(self) -> None:
        """ModelError for a network that takes tensors as they are."""
        if self.tasks and self.tasks[0].preprocessing.mode == VALUES:
            raise ModelError(
                f"this model takes {self.model.backbone.takes}, tensors as they are, not pictures: in Python, "
                "dense(task) answers for them, and network() learns on, with fit, and is saved to a new folder"
            )

    def find(self, task: str | int) -> TaskFacts:
        """A task by name, of several versions the newest; by name and version (dogs@1); or by number, counted from 1 as
        its folder is."""
        for facts in reversed(self.tasks):
            found = means(kept_name(task), facts.name) if isinstance(task, str) else task == facts.number
            if found and not isinstance(task, bool):
                return facts
        known = ", ".join(facts.name for facts in self.tasks) or "none yet; 'zeroforget learn' adds one"
        raise ModelError(f"no task {task!r} in this model; its tasks are: {known}")


class Folder:
    """Where a model lies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tasks = path / "tasks"

    def task(self, facts: TaskFacts) -> Path:
        """A task's folder; one that came by a system which takes accents off their letters is found, too."""
        place = self.tasks / facts.folder
        if place.exists():
            return place
        same = (name for _, name in self.entries() if composed(name) == facts.folder)
        return self.tasks / next(same, facts.folder)

    # Reading ---------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether there is a model here."""
        return (self.path / MODEL).exists()

    def read(self) -> Chain:
        """The chain, checked. A task that is taken back while we read makes us read again."""
        for _ in range(20):
            entries = self.entries()
            try:
                return self._read(entries)
            except Damaged:
                if entries == self.entries():
                    raise
        raise ModelError(f"{self.path} changes faster than it can be read; try again")

    def _read(self, entries: list[tuple[int, str]]) -> Chain:
        self.check_place()
        if not self.path.is_dir():
            raise ModelError(
                f"there is no model in {self.path}; 'zeroforget learn {self.path} PICTURES --task NAME' makes one"
            )
        if not self.exists():
            if entries:
                raise Damaged(self.path / MODEL, "it is missing")
            raise ModelError(f"{self.path} holds no model; 'zeroforget learn' makes one there")
        if not entries and os.path.lexists(self.tasks) and not self.tasks.is_dir():
            raise Damaged(self.tasks, "it is not a folder")
        values, root = read_sealed(self.path / MODEL)
        model = ModelFacts.from_json(values, self.path / MODEL)
        tasks: list[TaskFacts] = []
        for place, (number, name) in enumerate(entries, 1):
            if number != place:
                again = number < place
                why = "there are two of its number" if again else f"task {place} is missing before it"
                raise Damaged(self.tasks / name, why)
            tasks.append(self.read_task(self.tasks / name, tasks[-1].hash if tasks else root, model.backbone.shape))
            if tasks[-1].number != number or composed(name) != tasks[-1].folder:
                raise Damaged(self.tasks / name / TASK, f"it belongs to the folder {tasks[-1].folder}")
        names = [task.name for task in tasks]
        if len(set(names)) != len(names):
            raise Damaged(self.tasks, "two tasks have one name")
        return Chain(model, root, tuple(tasks))

    def entries(self) -> list[tuple[int, str]]:
        """The folders of tasks, by number; whatever else lies there is not ours."""
        if not self.tasks.is_dir():
            return []
        found = [(match, entry.name) for entry in self.tasks.iterdir() if (match := _ENTRY.fullmatch(entry.name))]
        return sorted((int(match[1]), name) for match, name in found)

    @staticmethod
    def read_task(folder: Path, before: str, shape: tuple[int, int, int]) -> TaskFacts:
        """A task's facts; it must follow the one whose hash is `before`, with pictures of the model's shape."""
        if not folder.is_dir():
            raise Damaged(folder, "it is not a folder")
        facts = _task(folder / TASK)
        if facts.before != before:
            raise Damaged(folder / TASK, "it does not follow the task before it; one of the two was changed or swapped")
        if facts.preprocessing.shape != shape:
            raise Damaged(folder / TASK, "its pictures have another shape than the model's")
        for name, file in facts.files.items():
            try:
                size = (folder / name).stat().st_size
            except OSError:
                raise Damaged(folder / name, "it is missing") from None
            if size != file.bytes:
                raise Damaged(folder / name, f"it has {size} bytes and should have {file.bytes}")
        return facts

    @staticmethod
    def tensors(folder: Path, facts: TaskFacts, name: str) -> dict[str, Tensor]:
        """A tensor file's content, once its hash is right."""
        from safetensors import SafetensorError
        from safetensors.torch import load as parse_tensors

        path, file = folder / name, facts.files[name]
        content = read_bytes(path, file.bytes)
        if sha256(content) != file.sha256:
            raise Damaged(path, "its content is not what was written (sha256 differs)")
        try:
            return parse_tensors(content)
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise Damaged(path, f"it is no safetensors file ({error})") from error

    def size(self, chain: Chain) -> int:
        """What a model's files take."""
        try:
            places = [self.path / MODEL, *(file for task in chain.tasks for file in self.task(task).iterdir())]
            return sum(path.stat().st_size for path in places)
        except FileNotFoundError as error:
            raise Damaged(error.filename, "it is missing") from None

    # Writing: only under the lock ------------------------------------------------------------------------------

    def check_place(self) -> None:
        """Refuse a place where no folder can be, and a folder that is somebody else's."""
        there = next((place for place in (self.path, *self.path.parents) if place.exists()), self.path)
        if there.exists() and not there.is_dir():
            raise ModelError(f"{there} is a file, and a model is a folder; name one that is new or holds a model")
        if self.path.is_dir() and not self.exists() and not self.entries():
            others = sorted(place.name for place in self.path.iterdir() if not place.name.startswith("."))
            if others and not self.exists():  # another process may just have made it
                raise ModelError(
                    f"{self.path} is no model and holds other things, such as '{others[0]}'; name a folder that is new "
                    "or holds a model"
                )

    def clear(self) -> None:
        """Remove what a process left that was stopped while it wrote or removed."""
        for left in [*self.path.glob(f"{ASIDE}*"), *self.path.glob(f"{UNDONE}*")]:
            paths.remove(left)

    def create(self, content: bytes) -> None:
        """Write model.json."""
        aside = self.path / f"{ASIDE}{MODEL}"
        atomic.write_new(aside, content)
        place(aside, self.path / MODEL)

    def aside(self, name: str) -> Path:
        """A fresh folder to write a task into."""
        path = self.path / f"{ASIDE}{name}"
        paths.remove(path)
        path.mkdir()
        return path

    @staticmethod
    def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> FileFacts:
        """Write a tensor file and tell what it is."""
        from safetensors.torch import save as pack_tensors

        content = pack_tensors(dict(tensors))
        atomic.write_new(folder / name, content)
        return FileFacts(len(content), sha256(content))

    def commit(self, aside: Path, folder: str) -> None:
        """Make a finished folder the newest task."""
        atomic.make_folder(self.tasks)
        place(aside, self.tasks / folder)

    def undo(self) -> str:
        """Take the newest task's folder away. Whatever state it is in: this is also the way out of damage."""
        called = self.newest()
        if called is None:
            raise ModelError(f"{self.path} has no task to take back")
        name = self.entries()[-1][1]
        away = self.path / f"{UNDONE}{name}"
        paths.remove(away)
        (self.tasks / name).rename(away)
        atomic.sync_folder(self.tasks)
        atomic.sync_folder(self.path)
        shutil.rmtree(away, ignore_errors=True)
        return called

    def newest(self) -> str | None:
        """The newest task's name, if there is one; that in its folder's, which has no spaces, if it cannot be read."""
        entries = self.entries()
        if not entries:
            return None
        entry = entries[-1][1]
        facts = self._facts(entry)
        return _ENTRY.fullmatch(entry)[2] if facts is None else facts.name  # type: ignore[index]

    def ending(self) -> Ending:
        """What the model ends with, whatever state that is in."""
        entries = self.entries()
        if not entries:
            return Ending()
        facts = self._facts(entries[-1][1])
        return Ending(composed(entries[-1][1]), None if facts is None else facts.hash)

    def _facts(self, entry: str) -> TaskFacts | None:
        """What is written down about the task of a folder, if it can be read."""
        where = self.tasks / entry / TASK
        with contextlib.suppress(ModelError, OSError):
            return _task(where)
        return None


def _task(path: Path) -> TaskFacts:
    """A task's facts. A file whose every byte was checked before in this process is not taken apart again."""
    content = read_bytes(path)
    key = sha256(content)
    if key not in _CHECKED:
        if len(_CHECKED) >= _MOST_CHECKED:
            _CHECKED.clear()
        _CHECKED[key] = TaskFacts.from_json(unsealed(content, path), path, key)
    return _CHECKED[key]


_CHECKED: dict[str, TaskFacts] = {}
_MOST_CHECKED = 2**14


def place(aside: Path, final: Path) -> None:
    """The one step that changes a model: a finished folder or file gets its name."""
    try:
        atomic.place(aside, final)
    except FileExistsError as error:
        raise ModelError(str(error)) from error
    except atomic.Unconfirmed as error:
        raise ModelError(
            f"{final} is written, but the disk did not confirm it ({error.strerror}); verify the model before you rely "
            "on it"
        ) from error
