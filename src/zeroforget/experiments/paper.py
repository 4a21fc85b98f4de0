"""Figures of the paper, each with its table's label, and of other papers, in per cent: to stand beside ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class PaperRow:
    """One method: final accuracy and forgetting of each task, and the average as printed."""

    method: str
    accuracy: tuple[float, ...]
    forgetting: tuple[float, ...]
    average: float


@dataclass(frozen=True)
class PaperTable:
    """One table. Its averages are over tasks `average_from`, `average_from` + 1, ... (counted from 1)."""

    label: str
    scenario: str
    title: str
    tasks: tuple[str, ...]
    average_from: int
    rows: tuple[PaperRow, ...]

    def row(self, method: str) -> PaperRow | None:
        """The row of a method, by its name on the command line."""
        return next((row for row in self.rows if row.method == method), None)


@dataclass(frozen=True)
class PaperSummary:
    """The table of averages over the three splits of Tiny ImageNet."""

    label: str
    title: str
    scenarios: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]


@cache
def tables() -> tuple[PaperTable, ...]:
    """The tables with a column for each task."""
    return tuple(
        PaperTable(
            label=table["label"],
            scenario=table["scenario"],
            title=table["title"],
            tasks=tuple(table["tasks"]),
            average_from=table["average_from"],
            rows=tuple(
                PaperRow(row["method"], tuple(row["accuracy"]), tuple(row["forgetting"]), row["average"])
                for row in table["rows"]
            ),
        )
        for table in _data()["tables"]
    )


@cache
def summary() -> PaperSummary:
    """tab:tiny_imagenet_all."""
    data = _data()["summary"]
    rows = {row["method"]: tuple(row["averages"]) for row in data["rows"]}
    return PaperSummary(data["label"], data["title"], tuple(data["scenarios"]), rows)


@dataclass(frozen=True)
class PublishedTable:
    """Other papers' averages on a scenario, by our names of the methods, with the capacity in per cent where told."""

    source: str
    averages: dict[str, tuple[float, float | None]]


def published(scenario: str) -> PublishedTable | None:
    """What others printed for a scenario, if anything."""
    values = json.loads(resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8"))
    rows = values["tables"].get(scenario)
    return None if rows is None else PublishedTable(values["source"], {name: tuple(row) for name, row in rows.items()})


def table_of(scenario: str) -> PaperTable | None:
    """The paper's table for a scenario, if it has one."""
    return next((table for table in tables() if table.scenario == scenario), None)


def comparable(scenario: str, tasks: int) -> PaperTable | None:
    """The same, if it is of so many tasks: figures of a scenario that was cut otherwise say nothing about ours."""
    found = table_of(scenario)
    return found if found is not None and len(found.tasks) == tasks else None


@cache
def _data() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(resources.files(__package__).joinpath("paper.json").read_text())
    return values
