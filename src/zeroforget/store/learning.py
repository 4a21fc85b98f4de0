"""Learning a task into a model's folder: said before it begins, resumed after a kill, written at once or not at all."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zeroforget import nets
from zeroforget._version import __version__
from zeroforget.core.grow import grow
from zeroforget.core.network import GrowingNetwork
from zeroforget.methods.base import Method, TaskSpec
from zeroforget.methods.tfm import Tfm
from zeroforget.store import files
from zeroforget.store.errors import ModelError
from zeroforget.store.facts import MOST_PIXELS, Backbone, ModelFacts, TaskFacts, folder_name, task_name
from zeroforget.store.fields import sealed, sha256
from zeroforget.store.folder import BORN, PROBE, TASK, TRAINING, Chain, Folder
from zeroforget.store.images import Told
from zeroforget.store.lock import locked
from zeroforget.store.network import (
    assemble,
    command,
    empty_network,
    environment,
    example,
    fresh_values,
    plain_network,
    preparation,
    probe_logits,
)
from zeroforget.store.pictures import Lesson, check, lesson, list_pictures, read_pictures
from zeroforget.store.tensors import born, digest, expected
from zeroforget.store.which import calibrate
from zeroforget.training import Fit, FitLog, Progress, Regime, logits
from zeroforget.training.seeding import seeded

PROBES = 4
"""Held-out pictures kept with a task, to prove its logits by."""
SEARCH = (0.0, 0.05, 0.1, 0.2)
"""The growths that a search tries."""


@dataclass(frozen=True)
class Options:
    """How to learn. What concerns the network itself counts when the model is made, with its first task."""

    network: str | None = None
    """A network by name; by default one that fits the size of the pictures."""
    width: float | None = None
    """Its width, as a share of the published one."""
    size: int | None = None
    """Pixels of each side of its pictures; 64 by default."""
    gray: bool | None = None
    """One channel instead of three."""
    weights: Path | None = None
    """A safetensors file to start from."""
    growth: float | Sequence[float] = 0.1
    """The share of the first network that a task adds; several are tried, and the smallest good one is taken."""
    margin: float = 0.015
    """How much accuracy a search may give up for a smaller growth."""
    epochs: int = 60
    lr: float = 0.02
    batch_size: int = 32
    patience: int = 4
    seed: int = 0
    held_out: float = 0.2
    """The share of each class that is held out, to choose when to stop and to measure by."""
    flip: bool = False
    """Also learn from pictures mirrored left to right."""
    shift: int | None = None
    """Also learn from pictures moved by so many pixels; by default a sixteenth of the size."""
    strict: bool = False
    """Refuse unreadable pictures and classes with few."""
    finish: bool = False
    """Of training that was interrupted, take the best so far after one more epoch."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ModelError(f"held_out is a share of each class, between 0 and 1, not {self.held_out}")
        if self.size is not None and not 4 <= self.size <= MOST_PIXELS:
            raise ModelError(f"size is from 4 to {MOST_PIXELS} pixels, not {self.size}")
        if any(not 0 <= g <= 4 for g in self.growths):
            raise ModelError(f"growth is a share of the network, from 0 to 4, not {self.growth}")

    @property
    def growths(self) -> tuple[float, ...]:
        """Those to try."""
        return (float(self.growth),) if isinstance(self.growth, (int, float)) else tuple(map(float, self.growth))

    def regime(self) -> Regime:
        """How to train."""
        return Regime(
            optimizer="sgd",
            lr=self.lr,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=self.batch_size,
            epochs=1 if self.finish else self.epochs,
            patience=self.patience,
            min_lr=self.lr / 100,
            clip=5.0,
            device=self.device,
        )


@dataclass(frozen=True)
class Addition:
    """What a task adds to a model."""

    growth: float
    features: Mapping[str, tuple[int, int]]
    """Axis → features before and after."""
    weights: int
    bytes: int
    operations: int
    before: int | None
    """Operations of the newest network before it."""

    def __str__(self) -> str:
        new = sum(after - before for before, after in self.features.values())
        text = f"{new} features, {self.weights:,} weights, {self.bytes:,} bytes"
        if self.before is None:
            return f"{text}; {self.operations:,} operations a picture"
        return f"{text}; inference costs {100 * (self.operations / self.before - 1):+.1f} % of the task before"


@dataclass(frozen=True)
class Watch:
    """Who is told what happens."""

    say: Callable[[str], None] = lambda text: None
    decoding: Told | None = None
    training: Callable[[Progress], None] | None = None
    wait: float | None = None
    """Seconds to wait for another process that changes the model; None waits as long as it takes."""
    adds: Callable[[Sequence[Addition]], None] = field(default=lambda additions: None)


def learn(path: Path, pictures: Path, name: str, options: Options, watch: Watch) -> TaskFacts:
    """Learn a task from a folder of class folders; the model is made if there is none."""
    name, folder = task_name(name), Folder(path)
    backbone = _backbone(folder.read() if folder.exists() or folder.entries() else None, options, name)
    listing = list_pictures(pictures)
    decoded = read_pictures(listing, backbone.shape, told=watch.decoding)
    for note in check(decoded, strict=options.strict):
        watch.say(note)
    shift = backbone.shape[1] // 16 if options.shift is None else options.shift
    ready = lesson(name, decoded, share=options.held_out, seed=options.seed, flip=options.flip, shift=shift)
    watch.say(
        f"{len(listing.classes)} classes: {len(ready.task.train)} pictures to learn from, {len(ready.task.val)} held out"
    )
    with files.told(path):
        files.make(path)
        with locked(path, command(), wait=watch.wait, say=watch.say):
            files.clear(path)
            chain = folder.read() if folder.exists() else None
            return _Learning(folder, chain, _backbone(chain, options, name), ready, options, watch).run()


def default_network(size: int) -> tuple[str, float]:
    """A network that fits pictures of this size and little data, and its width."""
    if size <= 40:
        return "small", 1.0
    return ("resnet18", 0.25) if size <= 96 else ("resnet18", 0.5)


def _backbone(chain: Chain | None, options: Options, name: str) -> Backbone:
    """The model's own, which the options may not contradict, or a new one as the options say."""
    if chain is None:
        size = options.size or 64
        network, width = default_network(size)
        if options.network is not None:
            network, width = options.network, 1.0
        width = width if options.width is None else options.width
        nets.find(network)
        return Backbone(network, {"width": width}, (1 if options.gray else 3, size, size))
    if name in (task.name for task in chain.tasks):
        raise ModelError(f"there is a task '{name}' already, and learned tasks never change; choose another name")
    own = chain.model.backbone
    asked = {
        "network": (options.network, own.network),
        "width": (options.width, own.options.get("width", 1.0)),
        "size": (options.size, own.shape[1]),
        "gray": (options.gray, own.shape[0] == 1),
    }
    for what, (wanted, has) in asked.items():
        if wanted is not None and wanted != has:
            raise ModelError(f"this model was made with {what} {has}, which cannot change; leave out {what} or make another")
    if options.weights is not None and chain.tasks:
        raise ModelError("weights to start from count for the first task only; this model has learned already")
    return own


class Grower(Tfm):
    """Ternary feature masks over a network that is already there."""

    def __init__(self, net: GrowingNetwork, backbone: Backbone, growths: Sequence[float], margin: float) -> None:
        Method.__init__(self, net, example(backbone))
        self.start, self.growth, self.margin = backbone.start, growths[0], margin
        self.search = tuple(growths) if len(growths) > 1 else ()
        self.search_start = ()
        self.specs = [TaskSpec(record.name, record.classes) for record in net.history]


class _Learning:
    """One task on its way into the folder; the lock is held."""

    def __init__(
        self, folder: Folder, chain: Chain | None, backbone: Backbone, ready: Lesson, options: Options, watch: Watch
    ) -> None:
        self.folder, self.chain, self.ready, self.options, self.watch = folder, chain, ready, options, watch
        self.number = len(chain.tasks) + 1 if chain else 1
        self.backbone = backbone
        self.model, self.net = self._start()
        self.growths = self._possible()

    def run(self) -> TaskFacts:
        self.additions = [addition(self.net, self.ready, growth) for growth in self.growths]
        self.watch.adds(self.additions)
        grower = Grower(self.net, self.backbone, self.growths, self.options.margin).to(self.options.device)
        log = self._train(grower)
        grower.to("cpu")
        facts = self._write(grower.net, log)
        shutil.rmtree(self.folder.path / TRAINING, ignore_errors=True)
        return facts

    def _start(self) -> tuple[ModelFacts, GrowingNetwork]:
        """The network as it stands, or a new one that is proved to grow."""
        chain, folder = self.chain, self.folder
        if chain and chain.tasks:
            return chain.model, assemble_chain(folder, chain)
        plain = plain_network(self.backbone, chain.model.seed if chain else self.options.seed)
        key = None if self.options.weights is None else load_weights(plain, self.options.weights)
        backbone = self.backbone
        net = grow(plain, example(backbone), start=backbone.start, limit=backbone.limit, unit=backbone.unit)
        if chain is not None and key is None:
            return chain.model, empty_network(chain.model, folder.path / "model.json")
        made, program = now(), f"zeroforget {__version__}"
        model = ModelFacts(backbone, self.options.seed, made, program, key, fresh_values(net))
        if chain is not None:
            model = chain.model  # model.json never changes; its spreads are close enough for other weights
        return model, net

    def _possible(self) -> tuple[float, ...]:
        """The growths to try, none beyond what is left."""
        if not self.net.history:
            return (self.backbone.start,)
        left = max(0.0, self.net.left())
        growths = tuple(sorted({min(g, left) for g in self.options.growths}))
        if growths[-1] < max(self.options.growths):
            self.watch.say(f"the network is near its limit: it can grow by {left:.3g} of its full width")
        return growths

    def _train(self, grower: Grower) -> FitLog:
        training = self.folder.path / TRAINING
        plan = self._plan()
        if not (training / "plan").is_file() or (training / "plan").read_text() != plan:
            if self.options.finish:
                raise ModelError("there is no interrupted training of this task with these pictures and options to finish")
            shutil.rmtree(training, ignore_errors=True)
            training.mkdir()
            files.write(training / "plan", plan.encode())
        elif any(training.glob("phase-*")):
            self.watch.say("going on with the training that was interrupted")
        try:
            return self._fit(grower, training)
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            if "I/O" in str(error) or "No space" in str(error):
                raise OSError(28, f"a checkpoint could not be written ({error})") from error
            shutil.rmtree(training, ignore_errors=True)
            raise ModelError(
                f"what was kept of an interrupted training is damaged ({error}) and was removed; learn again to start "
                "over. The model is as it was"
            ) from error

    def _fit(self, grower: Grower, training: Path) -> FitLog:
        fit = Fit(self.options.regime(), self.options.seed, self.watch.training, training)
        with seeded("learn", self.options.seed, self.number):
            return grower.learn(self.ready.task, fit)

    def _plan(self) -> str:
        """What an interrupted training must share with this one to be gone on with."""
        options = {f.name: str(getattr(self.options, f.name)) for f in fields(self.options)}
        for same in ("finish", "strict", "epochs", "weights"):
            options.pop(same)
        key = {
            "head": self.chain.head if self.chain else "",
            "backbone": str(self.backbone),
            "weights": self.model.weights,
            "name": self.ready.task.name,
            "data": self.ready.data.listing,
            "options": options,
        }
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()

    def _write(self, net: GrowingNetwork, log: FitLog) -> TaskFacts:
        """Written aside, read back, measured as read back, and only then given its name."""
        name, index = self.ready.task.name, self.number - 1
        folder = self.folder
        chain = self.chain or Chain(self.model, sha256(sealed(self.model.to_json())), ())
        aside = folder.aside(folder_name(self.number, name))
        tensors = born(net, index)
        written = {BORN: folder.write_tensors(aside, BORN, tensors)}
        images = self._probes()
        logits_ = probe_logits(net.dense(index), images, self.ready.preprocessing)
        written[PROBE] = folder.write_tensors(aside, PROBE, {"images": images, "logits": logits_})
        before = net.widths(index - 1) if index else dict.fromkeys(net.axes.sizes, 0)
        facts = TaskFacts(
            number=self.number,
            name=name,
            before=chain.head,
            learned=now(),
            program=f"zeroforget {__version__}",
            classes=self.ready.task.classes,
            growth=net.history[index].growth,
            born={axis: width - before[axis] for axis, width in net.widths(index).items()},
            weights=sum(t.numel() for t in tensors.values()),
            operations=operations(net.dense(index), self.backbone),
            preprocessing=self.ready.preprocessing,
            accuracy=0.0,
            data=self.ready.data,
            training=_summary(log),
            calibration=calibrate(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)),
            network=digest(net.dense(index)),
            probe=sha256(logits_.numpy().tobytes()),
            environment=environment(),
            files=written,
        )
        dense = prove(folder, chain, [(facts, aside)])[-1]
        val = self.ready.task.val
        scores = logits(dense, val, preparation(facts.preprocessing))
        right = float((scores.argmax(1) == val.labels).sum()) / len(val)
        facts = replace(facts, accuracy=right, calibration=calibrate(scores, val.labels))
        content = sealed(facts.to_json())
        files.write(aside / TASK, content)
        if not folder.exists():
            folder.create(self.model)
        folder.commit(aside, facts.folder)
        return replace(facts, hash=sha256(content))

    def _probes(self) -> torch.Tensor:
        """Held-out pictures, as far apart as they lie."""
        val = self.ready.task.val
        rows = torch.linspace(0, len(val) - 1, min(PROBES, len(val))).long()
        return val.batch(rows)[0].clone()


def prove(folder: Folder, chain: Chain, more: Sequence[tuple[TaskFacts, Path]]) -> list[nn.Module]:
    """Read a chain and tasks to come after it from disk; every network must be the one that was written down.

    Gives the dense networks of the tasks to come.
    """
    net = assemble_chain(folder, chain, more)
    dense = []
    for index, task in enumerate([*chain.tasks, *(facts for facts, _ in more)]):
        one = net.dense(index)
        if digest(one) != task.network:
            raise ModelError(f"task '{task.name}' would not be the network it was; nothing was changed. Please report this")
        if index >= len(chain.tasks):
            dense.append(one)
    return dense


def assemble_chain(folder: Folder, chain: Chain, more: Sequence[tuple[TaskFacts, Path]] = ()) -> GrowingNetwork:
    """The network of a chain and of tasks to come after it, from their files."""
    places = [(task, folder.task(task)) for task in chain.tasks] + list(more)
    given = [(task, folder.tensors(path, task, BORN), path) for task, path in places]
    return assemble(chain.model, given, folder.path / "model.json")


def addition(net: GrowingNetwork, ready: Lesson, growth: float) -> Addition:
    """What a task of this growth would add, found by growing a copy."""
    index = len(net.history)
    before = operations(net.dense(index - 1), None, net.shape) if index else None
    widths = net.widths()
    trial = copy.deepcopy(net)
    with seeded("trial"):
        trial.add_task(ready.task.name, len(ready.task.classes), growth)
    numbers = [(dtype.itemsize, torch.Size(shape).numel()) for dtype, shape in expected(trial, index).values()]
    return Addition(
        growth=growth,
        features={axis: (widths[axis], width) for axis, width in trial.widths().items()},
        weights=sum(count for _, count in numbers),
        bytes=sum(size * count for size, count in numbers),
        operations=operations(trial.dense(index), None, net.shape),
        before=before,
    )


@torch.no_grad()
def operations(dense: nn.Module, backbone: Backbone | None, shape: Sequence[int] = ()) -> int:
    """Multiplications and additions for one picture."""
    x = torch.zeros(1, *(backbone.shape if backbone else shape))
    with FlopCounterMode(display=False) as counter:
        dense(x)
    return int(counter.get_total_flops())


@torch.no_grad()
def load_weights(net: nn.Module, path: Path) -> str:
    """Fill a plain network from a safetensors file; its sha256. Extra tensors, such as a head's, are left out."""
    own = net.state_dict()
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if missing := [n for n in own if n not in names and not n.endswith("num_batches_tracked")]:
                raise ModelError(
                    f"{path} lacks '{missing[0]}'{f' and {len(missing) - 1} more' if missing[1:] else ''}; it should "
                    f"hold the tensors of the network by the names that nets.build gives them"
                )
            for name, tensor in own.items():
                if name in names:
                    value = file.get_tensor(name)
                    if value.shape != tensor.shape:
                        found, has = tuple(value.shape), tuple(tensor.shape)
                        raise ModelError(f"{path}: '{name}' is {found}, but the network has {has}; is the width the same?")
                    tensor.copy_(value)
    except SafetensorError as error:
        raise ModelError(f"{path} is no safetensors file ({error})") from error
    return sha256(path.read_bytes())


def _summary(log: FitLog) -> dict[str, Any]:
    notes = {"search": log.notes["search"]} if "search" in log.notes else {}
    return {"epochs": len(log.epochs), "kept": log.best, "seconds": round(log.seconds, 2), "stopped": log.stopped} | notes


def now() -> str:
    """The time, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
