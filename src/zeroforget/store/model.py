"""A model that lives in a folder: learn, predict, prove, export, ship and take back, from Python."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeroforget.files.text import SmallTable
from zeroforget.growing.dense import DenseInTurn
from zeroforget.growing.growth import whole
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import own_code
from zeroforget.progress import Show, showing
from zeroforget.store import task_guess
from zeroforget.store.backbone import Backbone
from zeroforget.store.errors import Damaged, ModelError, Unreadable
from zeroforget.store.export import export, triton_repository
from zeroforget.store.folder import SPREAD, Chain, Ending, Folder, as_path
from zeroforget.store.learning import learn
from zeroforget.store.names import exact, kept_name, means
from zeroforget.store.network import assemble_chain, dense_alone, preparation
from zeroforget.store.options import Options, with_options
from zeroforget.store.pictures import SOURCES, Source, decode
from zeroforget.store.schema import TaskFacts, Tasks
from zeroforget.store.trust import read_trust, write_trust
from zeroforget.store.update import Terms, receive, ship
from zeroforget.store.verify import Report, verify
from zeroforget.store.writing import Watch, locked, told

BATCH = 64
CHUNK = 512
"""So many pictures are decoded before they are classified."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Prediction:
    """What a model says of one picture.

    Example:
        >>> import zeroforget
        >>> said = zeroforget.Prediction("a.jpg", task="flowers", classes=(("rose", 0.9), ("tulip", 0.1)))
        >>> said.classes[0]
        ('rose', 0.9)
    """

    source: str
    task: str
    """The task that was asked, or the likeliest."""
    classes: tuple[tuple[str, float], ...]
    """The likeliest classes of that task and their probabilities, best first."""
    tasks: tuple[tuple[str, float], ...] = ()
    """If no task was asked: how likely each one is, best first. A guess; see the documentation for how good."""
    error: str | None = None
    """Why there is no answer."""

    @property
    def sure(self) -> bool:
        """Whether the task was named, or is likely enough to go by."""
        return not self.tasks or self.tasks[0][1] >= task_guess.SURE

    @property
    def label(self) -> str:
        """The likeliest class."""
        return self.classes[0][0] if self.classes else ""


@dataclass
class _State:
    """A model as it was at one moment; what is expensive is made when it is first wanted."""

    folder: Folder
    chain: Chain
    _net: GrowingNetwork | None = None
    _dense: dict[str, nn.Module] = field(default_factory=dict)
    _spread: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def net(self) -> GrowingNetwork:
        with self._lock:
            if self._net is None:
                self._net = assemble_chain(self.folder, self.chain)
            return self._net

    def dense(self, task: TaskFacts) -> nn.Module:
        with self._lock:
            if task.name not in self._dense:
                first = self._net is None and not self._dense  # who asks for one task has no need of all
                made = dense_alone(self.folder, self.chain, task) if first else self.net().dense(task.number - 1)
                self._dense[task.name] = made
            return self._dense[task.name]

    def spread(self, task: TaskFacts) -> dict[str, Tensor]:
        with self._lock:
            if task.name not in self._spread:
                about = self.folder.tensors(self.folder.task(task), task, SPREAD)
                head = nn.ModuleDict({"head": self.net().heads[task.number - 1]})
                task_guess.check(about, head, task.clusters, self.folder.task(task) / SPREAD)
                self._spread[task.name] = about
            return self._spread[task.name]


def _likely(state: _State, images: Tensor) -> dict[str, Tensor]:
    networks = DenseInTurn(state.net())
    return task_guess.likely(images, state.chain.guessable, lambda facts: networks.turn(facts.number - 1), state.spread)


@torch.no_grad()
def _logits(state: _State, images: Tensor, facts: TaskFacts) -> Tensor:
    dense, prepare = state.dense(facts), preparation(facts.preprocessing)
    return torch.cat([dense(prepare.test(part)) for part in images.split(BATCH)])


def _probabilities(state: _State, images: Tensor, facts: TaskFacts) -> Tensor:
    return task_guess.probabilities(_logits(state, images, facts), facts.calibration)


def _classified(state: _State, images: Tensor, task: str | None, top: int) -> list[Prediction]:
    """All of it from one state: another process may exchange a task for one of the same name."""
    ranks = _likely(state, images) if task is None else {}
    orders = [
        tuple(sorted(((name, float(p[row])) for name, p in ranks.items()), key=lambda pair: -pair[1]))
        for row in range(len(images))
    ]
    chosen = [task or order[0][0] for order in orders]
    out: dict[int, Prediction] = {}
    for name in dict.fromkeys(chosen):
        rows, facts = [row for row, one in enumerate(chosen) if one == name], state.chain.find(name)
        best = _probabilities(state, images[rows], facts).topk(min(top, len(facts.classes)))
        for row, values, indices in zip(rows, best.values.tolist(), best.indices.tolist(), strict=True):
            named = tuple((facts.classes[i], p) for p, i in zip(values, indices, strict=True))
            out[row] = Prediction("", facts.name, named, orders[row])
    return [out[row] for row in range(len(images))]


class Model:
    """A model in a folder. Several may have it open; readers never wait, and see a new task after `refresh`.

    Example:
        >>> import torch, zeroforget
        >>> net = zeroforget.grow(torch.nn.Linear(8, 4), torch.randn(4, 8))
        >>> net.add_task("flowers", ["rose", "tulip"])
        >>> _ = net.save("garden", build="torch.nn:Linear", options={"in_features": 8, "out_features": 4})
        >>> model = zeroforget.open("garden", trust="torch.nn:Linear")
        >>> [task.name for task in model.tasks]
        ['flowers']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path)
        self.folder = Folder(self.path)
        self._state: _State | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Look at the folder again; whether it has changed since. What is in use stays in use until then."""
        if not self.folder.exists() and not self.folder.entries():
            changed, self._state = self._state is not None, None
            return changed
        chain, old = self.folder.read(), self._state
        if old is not None and old.chain.head == chain.head:
            return False
        self._state = _State(self.folder, chain)
        return True

    def _open(self) -> _State:
        if self._state is None:
            self.refresh()
        if self._state is None:
            self.folder.read()  # says that there is none
            raise ModelError(f"there is no model in {self.path}")
        return self._state

    def _reading(self, use: Callable[[_State], Result]) -> Result:
        """Use the model as it is; if a task was taken back just before its files were read, look again."""
        while True:
            try:
                return use(self._open())
            except Damaged:
                if not self.refresh():
                    raise

    def __reduce__(self) -> tuple[Any, ...]:
        return Model, (self.path,)  # a copy, or another process, opens the folder itself

    def __repr__(self) -> str:
        tasks = ", ".join(repr(task.name) for task in self.tasks) or "none yet"
        return f"Model({str(self.path)!r}; tasks: {tasks})"

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().to_html()

    def _table(self) -> SmallTable:
        return self.tasks.table(f"{self.path}: {self.tasks.counted()}")

    # What there is ---------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Tasks:
        """What is written down about each task, in the order they were learned."""
        return Tasks(self._state.chain.tasks if self._state else ())

    @property
    def head(self) -> str:
        """The hash that stands for the whole model."""
        return self._open().chain.head

    @property
    def backbone(self) -> Backbone:
        """The network it grows from."""
        return self._open().chain.model.backbone

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of its pictures."""
        return self.backbone.shape

    @property
    def bytes(self) -> int:
        """What its files take on disk."""
        return self._reading(lambda state: state.folder.size(state.chain))

    def task(self, name: str | int) -> TaskFacts:
        """A task by name, or by number counted from 1."""
        return self._open().chain.find(name)

    def network(self) -> GrowingNetwork:
        """The growing network itself; changing it changes nothing on disk."""
        return assemble_chain(self.folder, self._open().chain)

    def dense(self, task: str | int) -> nn.Module:
        """A task's own plain network, in eval mode; it takes pictures as `normalized` makes them and gives logits. It
        is yours: whatever you do to it, the model answers as before."""
        return copy.deepcopy(self._reading(lambda state: state.dense(state.chain.find(task))))

    # Use -------------------------------------------------------------------------------------------------------

    def prepare(self, source: Source) -> Tensor:
        """A picture (a path, bytes or a PIL image) as the bytes that the model takes; Unreadable if it is none."""
        self._open().chain.check_pictures()
        return decode(_source(source), self.shape)

    def normalized(self, sources: Source | Iterable[Source], task: str | int) -> Tensor:
        """A picture or several as the batch that `dense` of the same task takes; Unreadable names one that cannot be
        read."""
        named, prepare = _named(sources), preparation(self.task(task).preprocessing)
        images = torch.empty((len(named), *self.shape), dtype=torch.uint8)
        for row, (name, source) in enumerate(named):
            try:
                images[row] = self.prepare(source)
            except Unreadable as error:
                raise type(error)(f"{name} {error}") from None
        return prepare.test(images)

    def logits(self, images: Tensor, task: str | int) -> Tensor:
        """A task's logits for prepared pictures (bytes; batch, channels, height, width)."""
        self._check(images)
        return self._reading(lambda state: _logits(state, images, state.chain.find(task)))

    def probabilities(self, images: Tensor, task: str | int) -> Tensor:
        """The probability of each of the task's classes, for prepared pictures."""
        self._check(images)
        return self._reading(lambda state: _probabilities(state, images, state.chain.find(task)))

    def likely_tasks(self, images: Tensor) -> dict[str, Tensor]:
        """Task → how likely each prepared picture belongs to it: a guess, from how far its features lie."""
        self._check(images)
        return self._reading(lambda state: _likely(state, images))

    def _check(self, images: Any) -> None:
        """Floats would be answered too, as if they ran from 0 to 1."""
        self._open().chain.check_pictures()
        fits = isinstance(images, Tensor) and images.dtype == torch.uint8 and images.shape[1:] == self.shape
        if not fits:
            got = f"{images.dtype} of {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            wanted = ", ".join(map(str, ("batch", *self.shape)))
            raise ModelError(f"prepared pictures are a tensor of bytes, ({wanted}), as `prepare` makes each; got {got}")

    def predict(
        self, sources: Source | Iterable[Source], task: str | int | None = None, *, top: int = 3
    ) -> list[Prediction]:
        """The likeliest classes of each picture; without a task, of the likeliest one (`sure` tells whether to go by
        that)."""
        named = _named(sources)
        if (whole(top) or 0) < 1:
            raise ModelError(f"top is how many classes to name, at least 1, not {top!r}")
        chosen = None if task is None else exact(self.task(task).name)
        if chosen is None and not self.tasks:
            self._open()
            raise ModelError(f"{self.path} has no task yet; 'zeroforget learn' adds one")
        parts = (named[start : start + CHUNK] for start in range(0, len(named), CHUNK))
        return [one for part in parts for one in self._answers(part, chosen, top)]

    def _answers(self, named: list[tuple[str, Source]], task: str | None, top: int) -> list[Prediction]:
        tried = [(name, self._try(source)) for name, source in named]
        good = [image for _, image in tried if isinstance(image, Tensor)]
        made = iter(self._reading(lambda state: _classified(state, torch.stack(good), task, top)) if good else ())
        out = []
        for name, image in tried:
            if isinstance(image, str):
                out.append(Prediction(name, "", (), error=image))
            else:
                out.append(replace(next(made), source=name))
        return out

    def _try(self, source: Source) -> Tensor | str:
        try:
            return self.prepare(source)
        except Unreadable as error:
            return str(error)

    def verify(self, data: Mapping[str, str | os.PathLike[str]] | None = None) -> Report:
        """Prove that nothing has moved; with `data` (task → folder of class folders) also measure accuracy there."""
        if data is not None and not isinstance(data, Mapping):
            raise ModelError("data names a folder for each task to measure: verify({'birds': 'photos/birds'})")
        return verify(self.folder, {name: as_path(at) for name, at in (data or {}).items()})

    # Change ----------------------------------------------------------------------------------------------------

    @with_options()
    def learn(
        self,
        pictures: str | os.PathLike[str],
        task: str,
        *,
        options: Options | None = None,
        progress: Show = None,
        watch: Watch | None = None,
        **chosen: Any,
    ) -> TaskFacts:
        """Learn a task from a folder of class folders. What is `chosen` are fields of `Options`, or give `options`.

        `progress` is True to show it, False to hide it, or a function that is told of it; by default it is shown in a
        terminal and in a notebook. Who gives a `watch` hears of it there instead.
        """
        if watch is not None and progress is not None:
            raise ModelError("give learn progress or watch, not both: a watch hears of progress by itself")
        wanted = options or Options.of(**chosen)
        with showing(False if watch else progress) as told:
            facts = learn(self.path, as_path(pictures), task, wanted, watch or Watch(training=told))
        self.refresh()
        return facts

    def export(self, out: str | os.PathLike[str], task: str | int | None = None, *, form: str | None = None) -> Path:
        """Write a task's network (without a task: all, with the task's number as an input) as ONNX or torch.export:
        `form` is 'onnx' or 'torch', else the file's name tells by its ending, .onnx or .pt2. `form="triton"` writes all
        tasks as versions of one model into a Triton model repository, the folder `out`."""
        self._open().chain.check_pictures()
        if form == "triton":
            return triton_repository(self, as_path(out))
        return export(self, as_path(out), task, form)

    def ship(
        self,
        out: str | os.PathLike[str],
        since: str | int | None = None,
        *,
        key: str | os.PathLike[str] | None = None,
    ) -> tuple[TaskFacts, ...]:
        """Write what was born after a task (without one: the whole model) to one file, signed with a private key's
        file if one is given."""
        own = None if key is None else as_path(key)
        return self._reading(lambda state: ship(state.folder, as_path(out), since, own))

    def receive(
        self, update: str | os.PathLike[str], *, watch: Watch | None = None, terms: Terms | None = None
    ) -> tuple[TaskFacts, ...]:
        """Add the tasks of an update; those that were new."""
        new = receive(self.folder, as_path(update), watch or Watch(), terms)
        self.refresh()
        return new

    def undo(self, task: str | None = None, *, watch: Watch | None = None) -> str:
        """Take back the newest of `tasks`; its name. The ones before are as they were, bit for bit.

        With `task`, only if that is the newest. If others have added or taken back one since this model last looked
        (`refresh`), nothing is taken back.
        """
        state = self._state
        name = undo(self.folder, watch or Watch(), task, state.chain.ending if state else Ending())
        assert state is not None  # where there is no model, nothing was taken back
        self._state = _State(self.folder, replace(state.chain, tasks=state.chain.tasks[:-1]))
        with contextlib.suppress(ModelError):  # an earlier task is damaged too, and may have to be taken back as well
            self.refresh()
        return name


def undo(folder: Folder, watch: Watch, task: str | None = None, meant: Ending | None = None) -> str:
    """Take back the newest task of a model, be it damaged or not; its name.

    That is the one which was newest when this was asked (`meant`, else now): whoever has to wait for somebody who
    learns does not take back what that one learned.
    """
    if not folder.exists() and not folder.entries():
        folder.read()  # says that there is none
    meant = folder.ending() if meant is None else meant
    with told(folder.path), locked(folder.path, wait=watch.wait, say=watch.say):
        folder.clear()
        newest, now = folder.newest(), folder.ending()
        if not meant.may_be(now):
            raise ModelError(_changed(newest, another=meant.folder == now.folder))
        if task is not None and newest is not None and not means(kept_name(task), newest):
            raise ModelError(f"the newest task is '{newest}', not '{task}', and tasks are taken back newest first")
        name = folder.undo()
        with contextlib.suppress(Damaged):
            if (trust := read_trust(folder)).head:  # who takes a task back means it: that is no other's work
                write_trust(folder, replace(trust, head=folder.read().head))
        return name


def _changed(newest: str | None, *, another: bool) -> str:
    """What is said to whoever meant to take back a task that is not the newest any more."""
    ends = f"ends with {'another ' if another else ''}'{newest}'" if newest else "has no task"
    said = f"meanwhile the model was changed by others and {ends} now: nothing is taken back"
    again = "Look at its tasks again ('zeroforget tasks', in Python refresh()), then undo takes back the newest of them"
    return f"{said}. {again}" if newest else said


def open_model(path: str | os.PathLike[str], *, trust: str | None = None) -> Model:
    """The model in a folder; where there is none yet, the first `learn` makes it.

    `trust` names code of your own, `package.module:function`, that may build its network (see `GrowingNetwork.save`).

    Example:
        >>> import zeroforget
        >>> model = zeroforget.open("garden")
        >>> print(model)
        garden: no task yet
        >>> # model.learn("photos/birds", "birds") teaches it; model.predict("a.jpg", "birds") asks it
    """
    if trust is not None:
        own_code.trust(trust)
    return Model(path)


def _named(sources: Any) -> list[tuple[str, Source]]:
    """One picture or several, each with its name; what cannot be one is refused, not taken apart."""
    numbers = isinstance(sources, Tensor) or getattr(getattr(sources, "dtype", None), "kind", "") in set("biuf")
    # A file would be taken for its lines, and a buffer for its bytes.
    undivided = isinstance(sources, (*SOURCES, bytearray, memoryview)) or hasattr(sources, "read")
    alone = numbers or undivided or not isinstance(sources, Iterable)
    return [(_name(_source(one), place), one) for place, one in enumerate([sources] if alone else sources)]


def _source(given: Any) -> Source:
    """A picture as it may be given; ModelError for anything else."""
    if not isinstance(given, SOURCES):
        raise ModelError(
            f"a picture is a path, the bytes of a file or a PIL image, not {type(given).__name__}: "
            "PIL.Image.fromarray makes one of an array, read() gives the bytes of an open file; `dense` takes tensors"
        )
    return given


def _name(source: Source, place: int) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else f"picture {place + 1}"
