"""From runs to the rows that charts and tables show: grouped by scenario and network, seeds put together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zeroforget.experiments import archive, tables
from zeroforget.experiments.comparability import check_seeds, settings
from zeroforget.experiments.results import Results, deviation, mean
from zeroforget.experiments.tables import TITLES

Row = dict[str, Any]
POINTS_PER_CURVE = 60


@dataclass(frozen=True)
class Entry:
    """One method with one set of options: a colour, a line, a row. Its runs differ in the seed alone."""

    label: str
    key: str
    """The method's name on the command line, with its options where those tell it apart."""
    runs: tuple[Results, ...]

    @property
    def seeds(self) -> list[int]:
        """The seeds it was run with."""
        return [run.seed for run in self.runs]

    @property
    def learned(self) -> list[int]:
        """The places of the tasks that were trained in their turn. Where one waits for a later task instead, the
        network knows nothing of it yet, and its figures mean nothing."""
        return [place for place, trained in enumerate(self.runs[0].trained) if trained]

    def over_seeds(self, figure: Callable[[Results], float]) -> tuple[float, float]:
        """Mean and standard deviation of a figure over the seeds."""
        values = [figure(run) for run in self.runs]
        return mean(values), deviation(values)


@dataclass(frozen=True)
class Group:
    """All that may be compared: the same tasks, learned by the same network."""

    title: str
    """Scenario and network, and what else tells it from others."""
    scenario: str
    network: str
    entries: tuple[Entry, ...]

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, in order."""
        return self.entries[0].runs[0].names

    @property
    def runs(self) -> list[Results]:
        """Every run of every method."""
        return [run for entry in self.entries for run in entry.runs]


def groups(runs: Iterable[Results]) -> list[Group]:
    """The runs by experiment, scenario and network, then by method and options, methods in the paper's order. Equal
    ones count once."""
    found: dict[tuple[str, str, str, str], list[Results]] = {}
    for run in archive.distinct(runs)[0]:
        found.setdefault((run.experiment, run.scenario, run.network, json.dumps(run.tasks, sort_keys=True)), []).append(
            run
        )
    if not found:
        raise ValueError("a report needs at least one finished run")
    titles = tables.titles(list(found.values()))
    return [
        Group(title, key[1], key[2], _entries(members))
        for title, (key, members) in zip(titles, found.items(), strict=True)
    ]


def labels(found: Sequence[Group]) -> list[str]:
    """Every method's label over the whole report: the place in this list decides its colour."""
    return list(dict.fromkeys(entry.label for group in found for entry in group.entries))


def _entries(runs: Sequence[Results]) -> tuple[Entry, ...]:
    entries = []
    for method in dict.fromkeys(run.method for run in runs):
        own = [run for run in runs if run.method == method]
        by_settings: dict[str, tuple[Row, list[Results]]] = {}
        for run, chosen in zip(own, settings(own), strict=True):
            by_settings.setdefault(json.dumps(chosen, sort_keys=True), (chosen, []))[1].append(run)
        rivals = [chosen for chosen, _ in by_settings.values()]
        for chosen, members in by_settings.values():
            told = _told_apart(chosen, rivals)
            more = f" ({', '.join(told)})" if told else ""
            check_seeds(method, members)
            by_seed = tuple(sorted(members, key=lambda run: run.seed))
            entries.append(Entry(TITLES.get(method, method) + more, method + more, by_seed))
    order = list(TITLES)
    return tuple(sorted(entries, key=lambda e: order.index(m) if (m := e.runs[0].method) in order else len(order)))


def _told_apart(mine: dict[str, Any], rivals: Sequence[dict[str, Any]]) -> list[str]:
    """The settings in which runs of one method differ, as 'strength=100'."""
    keys = sorted({key for rival in rivals for key in rival})
    return [f"{key}={mine.get(key)}" for key in keys if any(rival.get(key) != mine.get(key) for rival in rivals)]


# Rows of charts ------------------------------------------------------------------------------------------------


def averages(group: Group) -> list[Row]:
    """The mean accuracy over the tasks so far, after each task."""
    rows: list[Row] = []
    for entry in group.entries:
        for t in entry.learned:
            rows += _point(entry, [run.averages[t] for run in entry.runs], after=t + 1, name=group.tasks[t])
    return rows


def of_task(group: Group, k: int) -> list[Row]:
    """The accuracy on task k, after it was learned and after each later one."""
    rows: list[Row] = []
    for entry in group.entries:
        for t in (t for t in entry.learned if t >= k):
            rows += _point(entry, [run.accuracy[t][k] for run in entry.runs], after=t + 1, name=group.tasks[t])
    return rows


def _point(entry: Entry, shares: Sequence[float], **facts: Any) -> list[Row]:
    middle, spread = 100 * mean(shares), 100 * deviation(shares)
    if not math.isfinite(middle):
        return []
    row = {"method": entry.label, "value": middle, "low": middle - spread, "high": middle + spread}
    return [row | {"seeds": len(shares)} | facts]


def matrix(group: Group, entry: Entry) -> list[Row]:
    """The accuracy on task k after task t, averaged over seeds."""
    rows = []
    for t in entry.learned:
        for k, task in enumerate(group.tasks[: t + 1]):
            value = 100 * mean([run.accuracy[t][k] for run in entry.runs])
            if math.isfinite(value):
                rows.append({"t": t + 1, "k": k + 1, "after": group.tasks[t], "task": task, "value": value})
    return rows


def overheads(group: Group, kind: str) -> list[Row]:
    """Bytes kept beside the network after each task, 'training' or 'inference'; nothing where there are none."""
    rows = []
    for entry in group.entries:
        for t in range(len(group.tasks)):
            size = mean([run.overhead[t][kind] for run in entry.runs]) / 8
            if size > 0:  # a logarithm has no place for none
                rows.append({"method": entry.label, "after": t + 1, "name": group.tasks[t], "value": size})
    return rows


def network_bytes(group: Group) -> float:
    """The network and its heads after the last task, as 32-bit floats: the largest among the methods."""
    return 4.0 * max(run.parameters[-1] for run in group.runs)


def curves(group: Group, k: int, quantity: str) -> list[Row]:
    """One quantity of the training log of task k, an epoch a row, for the first seed of each method."""
    rows = []
    for entry in group.entries:
        log = entry.runs[0].logs[k]
        if not all(log["epochs"]):
            continue  # an archive keeps no curves
        for place in _thinned(len(log["epochs"]), log["best"]):
            value = float(log["epochs"][place][quantity]) * (100 if quantity == "val_accuracy" else 1)
            if math.isfinite(value):
                kept = place == log["best"]
                rows.append({"method": entry.label, "epoch": place + 1, "value": value, "kept": kept})
    return rows


def _thinned(count: int, best: int) -> list[int]:
    """At most about `POINTS_PER_CURVE` epochs: the eye sees no more, and pages stay small. The best one stays."""
    step = max(1, math.ceil(count / POINTS_PER_CURVE))
    return [i for i in range(count) if i % step == 0 or i in (count - 1, best)]


def grown(group: Group) -> list[tuple[str, dict[str, list[int]]]]:
    """Methods that grew, and axis → its width after each task, of the first seed. Equal growth is told once."""
    found: dict[str, tuple[list[str], dict[str, list[int]]]] = {}
    for entry in group.entries:
        if growth := entry.runs[0].growth:
            found.setdefault(json.dumps(growth), ([], growth))[0].append(entry.label)
    return [(", ".join(names), growth) for names, growth in found.values()]


def lowest(parts: Iterable[Sequence[Row]]) -> float:
    """The smallest value among several charts' rows, so that they can share a scale."""
    values = [float(row["low" if "low" in row else "value"]) for rows in parts for row in rows]
    return min(values, default=0.0)


def proof(entry: Entry) -> tuple[int, int]:
    """How many (task, seed) pairs ended with the very logits they began with, of how many that were checked."""
    checked = [same for run in entry.runs for same in run.unchanged[:-1]]
    return sum(checked), len(checked)
