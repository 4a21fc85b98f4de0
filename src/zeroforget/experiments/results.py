"""What a run found: the whole accuracy matrix and what it cost, as plain values that go to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from zeroforget.experiments.disk import damaged, read_json, write_json
from zeroforget.experiments.resolve import conform
from zeroforget.files.text import nearest

FILE = "results.json"
_REMEDY = "delete it and run the experiment again: it is made anew from the tasks that the run's folder holds"
_ENTRIES: dict[str, dict[str, Any]] = {
    "tasks": {"name": str, "classes": int},
    "overhead": {"training": int, "inference": int},
    "logs": {"epochs": list[dict[str, float]], "best": int, "stopped": str, "notes": dict[str, Any]},
}
"""What the entries of these lists hold."""


@dataclass(frozen=True)
class Results:
    """One method, one seed, every task of a scenario.

    `accuracy[t][k]`, for k <= t, is the share of task k's test images that are right after task t was learned. All
    lists have one entry for each task.
    """

    scenario: str
    network: str
    method: str
    options: dict[str, Any]
    regime: dict[str, Any]
    seed: int
    tasks: list[dict[str, Any]]
    """Each {"name": str, "classes": int}."""
    accuracy: list[list[float]]
    logs: list[dict[str, Any]]
    """Each as `FitLog.to_dict()` makes it."""
    seconds: list[float]
    """Learning and evaluating, a task at a time."""
    parameters: list[int]
    """Of the network and its heads, after each task."""
    overhead: list[dict[str, int]]
    """Bits kept beside them after each task: {"training": int, "inference": int}, and where there is such a thing
    "packed", the latter in the smallest code, and "spared", bits of the network that a seed makes again."""
    growth: dict[str, list[int]] = field(default_factory=dict)
    """Axis → its width after each task; empty for methods that do not grow."""
    unchanged: list[bool] = field(default_factory=list)
    """Whether, after all tasks, the test logits of each task were bit-equal to those right after it was learned."""
    environment: dict[str, Any] = field(default_factory=dict)
    experiment: str = ""
    operations: list[dict[str, int]] = field(default_factory=list)
    """Of each task: {"training": of all its steps, "answer": of one image's logits}. Earlier versions counted none."""
    setup: dict[str, Any] = field(default_factory=dict)
    """What else decided the results: {"method": its class, "scenario": with its options, "search": its settings}."""

    def __post_init__(self) -> None:
        count = len(self.tasks)
        if not count:
            raise ValueError("results without a task")
        if [len(row) for row in self.accuracy] != list(range(1, count + 1)):
            raise ValueError(f"results of {count} tasks need an accuracy row of 1, 2, ... {count} entries for each")
        for name in ("logs", "seconds", "parameters", "overhead", "operations"):
            if len(getattr(self, name)) != count and (self.operations or name != "operations"):
                raise ValueError(f"results of {count} tasks have {len(getattr(self, name))} entries in '{name}'")
        for axis, sizes in self.growth.items():
            if len(sizes) != count:
                raise ValueError(f"results of {count} tasks have {len(sizes)} entries in 'growth' of {axis}")

    # Figures ---------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The tasks, in order."""
        return [str(task["name"]) for task in self.tasks]

    @property
    def learned(self) -> list[float]:
        """The accuracy of each task right after it was learned."""
        return [row[k] for k, row in enumerate(self.accuracy)]

    @property
    def final(self) -> list[float]:
        """The accuracy of each task after the last one was learned."""
        return list(self.accuracy[-1])

    @property
    def average(self) -> float:
        """The mean over tasks of the final accuracy: the paper's "Avg." column."""
        return mean(self.final)

    @property
    def averages(self) -> list[float]:
        """The mean accuracy over the tasks so far, after each task."""
        return [mean(row) for row in self.accuracy]

    @property
    def forgetting(self) -> list[float]:
        """As the paper prints it: final accuracy minus that right after learning. Negative means forgotten."""
        return [now - then for now, then in zip(self.final, self.learned, strict=True)]

    @property
    def epochs(self) -> list[int]:
        """How many epochs each task was trained for, in the training that was kept: trials of a search come on top."""
        return [len(log["epochs"]) for log in self.logs]

    @property
    def kept(self) -> int:
        """Bits of all that must be kept to answer for every task: the network, its heads, what the method adds."""
        return 32 * self.parameters[-1] - self.overhead[-1].get("spared", 0) + self.overhead[-1]["inference"]

    @property
    def packed(self) -> int | None:
        """The same in the smallest code that there is for what the method adds."""
        packed = self.overhead[-1].get("packed")
        return None if packed is None else self.kept - self.overhead[-1]["inference"] + packed

    @property
    def trained(self) -> list[bool]:
        """Whether each task was trained in its turn, or waited for a later one."""
        return [not str(log["stopped"]).startswith("waits") for log in self.logs]

    def forward_transfer(self, alone: Sequence[float]) -> float:
        """What the past gave to the new: mean over tasks 2, 3, ... of its accuracy right after learning, less `alone`.

        `alone` holds the accuracy of each task learned by a network of its own, from the same start and with the same
        regime. Above 0: earlier tasks helped. A head that was never trained says nothing, so the accuracy before
        learning, which other definitions use, is of no use where every task has its own head.
        """
        if len(alone) != len(self.tasks):
            raise ValueError(f"forward transfer needs {len(self.tasks)} accuracies, one a task; got {len(alone)}")
        return mean([a - b for a, b in zip(self.learned, alone, strict=True)][1:])

    def comparable(self) -> dict[str, Any]:
        """Everything but times and environment: equal for two runs of one configuration, interrupted or not."""
        values = self.to_dict()
        del values["seconds"], values["environment"]
        plain: dict[str, Any] = _without_seconds(values)
        return plain

    # JSON ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Results:
        """The inverse of `to_dict`; ValueError names the field that is not what it should be."""
        known = {f.name for f in fields(Results)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"results have no field '{unknown[0]}'{nearest(unknown[0], known)}")
        hints = get_type_hints(Results)
        typed = {name: conform(value, hints[name], f"field '{name}'") for name, value in values.items()}
        try:
            results = Results(**typed)
        except TypeError as error:
            raise ValueError(f"these are no results of a run: {error}") from error
        _check_entries(results)
        return results

    def save(self, folder: Path) -> None:
        """Write results.json: aside, synced, renamed."""
        write_json(folder / FILE, self.to_dict(), seal=True)

    @staticmethod
    def load(path: Path) -> Results:
        """From a run's folder, or its results.json."""
        file = path / FILE if path.is_dir() else path
        other = f"{file} holds no results of runs; give runs' folders, their {FILE} or archives"
        try:
            values = read_json(file, _REMEDY)
        except FileNotFoundError as error:
            raise ValueError(
                f"no results in {path}: the run is not finished (start it again and it goes on)"
            ) from error
        except ValueError as error:
            if file.name == FILE:
                raise
            raise ValueError(other) from error  # anybody's file: nothing to delete
        if file.name != FILE and not {"scenario", "method", "accuracy"} <= values.keys():
            raise ValueError(other)
        try:
            return Results.from_dict(values)
        except ValueError as error:
            raise damaged(file, str(error), _REMEDY) from error


def _check_entries(results: Results) -> None:
    for field_name, kinds in _ENTRIES.items():
        for place, entry in enumerate(getattr(results, field_name)):
            for key, kind in kinds.items():
                where = f"'{key}' of entry {place + 1} of field '{field_name}'"
                if key not in entry:
                    raise ValueError(f"{where} is missing")
                conform(entry[key], kind, where)


def _without_seconds(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_seconds(value) for key, value in values.items() if key != "seconds"}
    if isinstance(values, list):
        return [_without_seconds(value) for value in values]
    return values


def load_runs(paths: Iterable[Path]) -> list[Results]:
    """Every finished run in or below these folders (or these results.json files), in the order of their paths."""
    found: list[Results] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such folder: {path}")
        files = [path] if path.is_file() else sorted(path.rglob(FILE))
        if not files:
            raise ValueError(f"no finished run in {path}: 'zeroforget run' leaves a {FILE} for each")
        found += [Results.load(file) for file in files]
    return found


def unfinished(paths: Iterable[Path]) -> list[str]:
    """The runs in or below these folders that were begun and are not finished: method, seed, tasks that are done."""
    folders = [file.parent for path in paths if path.is_dir() for file in sorted(path.rglob("config.json"))]
    left = [folder for folder in {f.resolve(): f for f in folders}.values() if not (folder / FILE).exists()]
    done = [len(list(folder.glob("tasks/[0-9]*/task.json"))) for folder in left]
    return [f"{f.parent.name}/{f.name} (tasks done: {count})" for f, count in zip(left, done, strict=True)]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample (n - 1); 0 of a single value."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))
