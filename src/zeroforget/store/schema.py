"""What a model and a task write down about themselves: model.json and task.json as values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zeroforget.files import json_fields
from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import MOST_BYTES, Fields, sealed
from zeroforget.files.text import SmallTable, has_hidden
from zeroforget.store.backbone import MOST_VALUES, Backbone, backbone_of, one_of
from zeroforget.store.errors import Damaged, ModelError, Newer, damage_told
from zeroforget.store.names import folder_name, is_task_name, version_of
from zeroforget.store.options import MOST_PIXELS, MOST_SEED

VERSION = 1
"""What is written, but for what needs a later one."""
LIBRARY = RANKED = 2
"""model.json of a network from a library, task.json of a task with rank births."""
AGAIN = 3
"""task.json of a task that was learned again."""
UNMEASURED = 4
"""task.json of a classifier that was adopted without pictures."""
NEWEST = 4
MOST_CLASSES = 100_000
VALUES = "values"
"""The mode of a network that takes tensors as they are, not pictures."""
LEAST_STD = 1e-6
MOST_MEAN = 1e6
"""Of pixels from 0 to 1; a larger mean or deviation would leave nothing of a picture."""
TASK_FILES = ("born.safetensors", "probe.safetensors", "spread.safetensors")
"""The files of a task beside task.json, which has the hash of each."""
_FILE = re.compile(r"[a-z]{1,32}\.safetensors")
_LEARNED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass(frozen=True)
class ModelFacts:
    """model.json, which never changes."""

    backbone: Backbone
    seed: int
    made: str
    program: str
    weights: str | None
    """The sha256 of the file of weights that it started from."""
    fresh: Mapping[str, tuple[float, ...]]
    """Parameter → spread, mean and number of inputs of its first values, which new features' values are drawn by."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        fresh = {name: list(numbers) for name, numbers in self.fresh.items()}
        head = {"format": "zeroforget model", "version": VERSION if self.backbone.library is None else LIBRARY}
        rest = {"seed": self.seed, "made": self.made, "program": self.program, "weights": self.weights}
        return head | {"backbone": self.backbone.to_json()} | rest | {"fresh": fresh}

    @staticmethod
    @damage_told()
    def from_json(values: dict[str, Any], where: object) -> ModelFacts:
        """The inverse of `to_json`, checked."""
        fields = Fields(values, where)
        version = _kind(fields, "zeroforget model", LIBRARY)
        facts = ModelFacts(
            backbone=backbone_of(fields.group("backbone"), from_library=version >= LIBRARY),
            seed=fields.integer("seed", 0, MOST_SEED),
            made=fields.text("made", like=_LEARNED),
            program=fields.text("program"),
            weights=None if fields.any("weights") is None else fields.hash("weights"),
            fresh=_fresh(fields.group("fresh")),
        )
        fields.done()
        return facts


@dataclass(frozen=True)
class Preprocessing:
    """From a picture to the network's input: turned upright, scaled to cover `size`, cut in the middle, normalized."""

    mode: str
    size: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width; of values, whatever they have."""
        return self.size if self.mode == VALUES else (3 if self.mode == "RGB" else 1, *self.size)  # type: ignore[return-value]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "mode": self.mode,
            "size": list(self.size),
            "fit": "cover, then the centre",
            "resample": "bilinear",
            "mean": list(self.mean),
            "std": list(self.std),
        }


@dataclass(frozen=True)
class DataFacts:
    """What a task was learned from."""

    pixels: str
    """sha256 of the test pictures as they were decoded: whoever has them can measure the accuracy again."""
    counts: tuple[int, ...]
    skipped: int
    held_out: int
    """How many pictures the test part has; 0 if no pictures were given, and `pixels` is then of the probe's."""
    share: float
    """Of each class; 1 for a folder of test pictures of its own."""
    seed: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"counts": list(self.counts)}


@dataclass(frozen=True)
class Calibration:
    """A task by its held-out pictures: the temperature of its probabilities, and how far their features lie."""

    temperature: float
    quantiles: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"temperature": self.temperature, "quantiles": list(self.quantiles)}


@dataclass(frozen=True)
class FileFacts:
    """A file beside task.json."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TaskFacts:
    """What a model's folder says of a task (task.json, which never changes).

    Example:
        >>> import torch, zeroforget
        >>> net = zeroforget.grow(torch.nn.Linear(8, 4), torch.randn(4, 8))
        >>> net.add_task("flowers", ["rose", "tulip"])
        >>> _ = net.save("garden", build="torch.nn:Linear", options={"in_features": 8, "out_features": 4})
        >>> model = zeroforget.open("garden", trust="torch.nn:Linear")
        >>> model.tasks[0].classes
        ('rose', 'tulip')
    """

    number: int
    name: str
    before: str
    """The sha256 of the task.json before, or of model.json: the chain."""
    learned: str
    program: str
    classes: tuple[str, ...]
    growth: float | Mapping[str, float]
    rank: float | Mapping[str, float]
    """Of the step that this task adds to older weights; 0: none."""
    born: Mapping[str, int]
    """Axis → how many features were born with this task."""
    weights: int
    """How many numbers were born with it, its own head and normalization included."""
    operations: int
    """Multiplications and additions of its network for one picture."""
    preprocessing: Preprocessing
    accuracy: float
    """On the test part, which chose nothing; of tasks learned before there were three parts it also chose when to
    stop."""
    data: DataFacts
    training: Mapping[str, Any]
    calibration: Calibration
    network: str
    """sha256 of every tensor of its dense network."""
    probe: str
    """sha256 of its logits for the probe."""
    environment: Mapping[str, str]
    files: Mapping[str, FileFacts]
    hash: str = field(default="", compare=False)
    """sha256 of the file itself; not written in it."""

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return folder_name(self.number, self.name)

    @property
    def measured(self) -> bool:
        """Whether its accuracy is that of pictures; a classifier may be adopted without any."""
        return self.data.held_out > 0

    @property
    def clusters(self) -> int:
        """About how many means its features are spread, as they are written down."""
        return len(self.classes) if self.measured else 1

    @property
    def interval(self) -> tuple[float, float]:
        """Where its accuracy lies with 95 % confidence, for so many test pictures."""
        return interval(self.accuracy, self.data.held_out)

    @property
    def bytes(self) -> int:
        """What its files take on disk, task.json aside."""
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        again = version_of(self.name)[1] is not None
        version = UNMEASURED if not self.measured else AGAIN if again else RANKED if self.rank else VERSION
        head: dict[str, Any] = {"format": "zeroforget task", "version": version}
        if version >= RANKED:
            head["rank"] = dict(self.rank) if isinstance(self.rank, Mapping) else self.rank
        plain = {name: getattr(self, name) for name in _PLAIN}
        growth = self.growth if isinstance(self.growth, (int, float)) else dict(self.growth)
        return head | plain | {
            "classes": list(self.classes),
            "growth": growth,
            "born": dict(self.born),
            "preprocessing": self.preprocessing.to_json(),
            "data": self.data.to_json(),
            "training": dict(self.training),
            "calibration": self.calibration.to_json(),
            "environment": dict(self.environment),
            "files": {name: asdict(file) for name, file in self.files.items()},
        }  # fmt: skip

    @staticmethod
    @damage_told()
    def from_json(values: dict[str, Any], where: object, own_hash: str) -> TaskFacts:
        """The inverse of `to_json`, checked."""
        fields = Fields(values, where)
        version = _kind(fields, "zeroforget task", NEWEST)
        name = fields.text("name", most=64)
        if not is_task_name(name) or (version_of(name)[1] is not None and version < AGAIN):
            raise fields.wrong("name", "is none that a task can have")
        classes = fields.texts("classes", least=1 if version >= UNMEASURED else 2, most=MOST_CLASSES)
        if len(set(classes)) != len(classes):
            raise fields.wrong("classes", "names a class twice")
        if any(map(has_hidden, classes)):
            raise fields.wrong("classes", "has a name with control signs, or signs that turn a text's direction")
        facts = TaskFacts(
            number=fields.integer("number", 1, 100_000),
            name=name,
            before=fields.hash("before"),
            learned=fields.text("learned", like=_LEARNED),
            program=fields.text("program"),
            classes=classes,
            growth=_growth(fields),
            rank=_rank(fields) if version >= RANKED else 0,
            born=fields.counts("born"),
            weights=fields.integer("weights", 0, 2**40),
            operations=fields.integer("operations", 0, 2**60),
            preprocessing=_preprocessing(fields.group("preprocessing")),
            accuracy=fields.number("accuracy", 0, 1),
            data=_data(fields.group("data"), least=0 if version >= UNMEASURED else 1),
            training=fields.group("training").values,
            calibration=_calibration(fields.group("calibration")),
            network=fields.hash("network"),
            probe=fields.hash("probe"),
            environment=_environment(fields.group("environment")),
            files=_files(fields.group("files")),
            hash=own_hash,
        )
        fields.done()
        return facts


@damage_told()
def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a model's file, unless there are more than `most`."""
    return json_fields.read_bytes(path, most)


@damage_told()
def unsealed(content: bytes, where: object) -> dict[str, Any]:
    """The values of a sealed file of a model."""

    def not_newer(values: dict[str, Any]) -> None:
        version = values.get("version")
        if isinstance(version, int) and not isinstance(version, bool) and version > NEWEST:
            raise Newer(
                f"{where} has format version {version}; this program knows versions up to {NEWEST}. "
                "Install a newer zeroforget to use this model; nothing was changed"
            )

    return json_fields.unsealed(content, where, not_newer)


def read_sealed(path: Path) -> tuple[dict[str, Any], str]:
    """The values of a sealed file of a model, and the hash of its bytes."""
    content = read_bytes(path)
    return unsealed(content, path), sha256(content)


def text_of(facts: ModelFacts | TaskFacts, where: object) -> bytes:
    """The file's bytes, read once: what would be refused later must not be written."""
    try:
        content = sealed(facts.to_json())
        values = unsealed(content, where)
        if isinstance(facts, ModelFacts):
            ModelFacts.from_json(values, where)
        else:
            TaskFacts.from_json(values, where, "")
    except ValueError as error:
        why = error.why if isinstance(error, Damaged) else error
        raise ModelError(f"{where} could not be read again ({why}); nothing was changed. Please report this") from error
    return content


_PLAIN = (
    *("number", "name", "before", "learned", "program", "weights", "operations"),
    *("accuracy", "network", "probe"),
)


def _kind(fields: Fields, kind: str, newest: int = VERSION) -> int:
    if fields.any("format") != kind:
        raise fields.wrong("format", f"must be '{kind}'")
    return fields.integer("version", 1, newest)


def _fresh(fields: Fields) -> dict[str, tuple[float, ...]]:
    found = {name: fields.numbers(name, least=3, most=3, low=-1e9, high=1e9) for name in list(fields.values)}
    for name, (spread, _, inputs) in found.items():
        if spread < 0 or inputs < 0:
            raise fields.wrong(name, "must be a spread of 0 or more, a mean, and a number of inputs")
    return found


def _growth(fields: Fields) -> float | dict[str, float]:
    """A share of every axis; or for each its number of features, a whole one, or its share."""
    if not isinstance(fields.any("growth"), dict):
        return fields.number("growth", 0, 64)
    each = fields.group("growth")
    return {
        name: each.number(name, 0, 64) if isinstance(value, float) else each.integer(name, 0, 2**24)
        for name, value in each.values.items()
    }


def _rank(fields: Fields) -> float | dict[str, float]:
    """A number of directions, a share of the full rank, or one of these for each weight."""
    if not isinstance(value := fields.any("rank"), dict):
        return fields.number("rank", 0, 1) if isinstance(value, float) else fields.integer("rank", 0, 2**24)
    each = fields.group("rank")
    return {
        name: each.number(name, 0, 1) if isinstance(one, float) else each.integer(name, 0, 2**24)
        for name, one in each.values.items()
    }


def _preprocessing(fields: Fields) -> Preprocessing:
    mode = one_of(fields, "mode", "RGB", "L", VALUES)
    channels, sides, high = 3 if mode == "RGB" else 1, (2, 2), MOST_PIXELS
    if mode == VALUES:
        sides, high = (1, 8), MOST_VALUES
    size = fields.integers("size", least=sides[0], most=sides[1], low=1, high=high)
    if (fields.any("fit"), fields.any("resample")) != ("cover, then the centre", "bilinear"):
        raise fields.wrong("fit", "names a treatment that this version does not have")
    made = Preprocessing(
        mode=mode,
        size=size,
        mean=fields.numbers("mean", least=channels, most=channels, low=-MOST_MEAN, high=MOST_MEAN),
        std=fields.numbers("std", least=channels, most=channels, low=LEAST_STD, high=MOST_MEAN),
    )
    fields.done()
    return made


def _data(fields: Fields, least: int) -> DataFacts:
    made = DataFacts(
        pixels=fields.hash("pixels"),
        counts=fields.integers("counts", least=2 if least else 1, most=MOST_CLASSES),
        skipped=fields.integer("skipped", 0, 2**40),
        held_out=fields.integer("held_out", least, 2**40),
        share=fields.number("share", 0, 1),
        seed=fields.integer("seed", 0, MOST_SEED),
    )
    fields.done()
    return made


def _calibration(fields: Fields) -> Calibration:
    made = Calibration(fields.number("temperature", 1e-4, 1e4), fields.numbers("quantiles", least=2, most=1001))
    fields.done()
    if list(made.quantiles) != sorted(made.quantiles):
        raise fields.wrong("quantiles", "must rise")
    return made


def _environment(fields: Fields) -> dict[str, str]:
    return {name: fields.text(name) for name in list(fields.values)}


def _files(fields: Fields) -> dict[str, FileFacts]:
    out = {}
    for name in list(fields.values):
        one = fields.group(name)
        if not _FILE.fullmatch(name):
            raise fields.wrong(name, "is no file name of ours")
        out[name] = FileFacts(one.integer("bytes", 8, 2**40), one.hash("sha256"))
        one.done()
    if set(out) != set(TASK_FILES):
        raise fields.wrong("", f"must name {', '.join(TASK_FILES[:-1])} and {TASK_FILES[-1]}")
    return out


HEADINGS = ("task", "classes", "accuracy", "features", "new", "bytes", "learned")


class Tasks(tuple[TaskFacts, ...]):
    """What is written down about each task, in order: a tuple that prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(self.table(self.counted()))

    def _repr_html_(self) -> str:
        return self.table(self.counted()).to_html()

    def counted(self) -> str:
        """How many there are, in words."""
        return "no task yet" if not self else "1 task" if len(self) == 1 else f"{len(self)} tasks"

    def table(self, title: str) -> SmallTable:
        """A row for each task: its accuracy with the 95 % interval, its features and what it brought."""
        rows, features = [], 0
        for task in self:
            new = sum(task.born.values())
            features += new
            cells = (task.name, str(len(task.classes)), accuracy_of(task), str(features), f"+{new}", f"+{task.bytes:,}")
            rows.append((*cells, task.learned.replace("T", " ")[:16]))
        return SmallTable(title, HEADINGS, rows)


def accuracy_of(task: TaskFacts) -> str:
    """With its 95 % interval, or that there is none."""
    if not task.measured:
        return "not measured"
    low, high = (f"{100 * bound:.0f}" for bound in task.interval)
    return f"{100 * task.accuracy:.1f} % ({low}-{high})"


def interval(share: float, count: int) -> tuple[float, float]:
    """What a share of so many pictures may be of all such pictures, with 95 % confidence (Wilson, 1927)."""
    if not count:
        return 0.0, 1.0
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    wide = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - wide), min(1.0, middle + wide)
