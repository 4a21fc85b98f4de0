"""Results as the paper's tables: accuracy (forgetting) of each task after all tasks, and the average."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeroforget.experiments import paper
from zeroforget.experiments.experiment import defaults
from zeroforget.experiments.results import Results, deviation, mean
from zeroforget.methods import registry

TITLES = {
    "finetuning": "Finetuning",
    "freezing": "Freezing",
    "joint": "Joint",
    "joint-scratch": "Joint, from scratch",
    "lwf": "LwF",
    "lfl": "LfL",
    "pnn": "PNN",
    "progress-compress": "P&C",
    "imm-mean": "IMM-mean",
    "imm-mode": "IMM-mode",
    "ewc": "EWC",
    "r-ewc": "R-EWC",
    "si": "SI",
    "mas": "MAS",
    "ssl": "SSL",
    "piggyback": "PiggyBack",
    "hat": "HAT",
    "packnet": "PackNet",
    "packnet-short": "PackNet, ten epochs again",
    "tfm-nofn": "TFM w/o FN",
    "tfm": "TFM",
    "tfm-weights": "TFM, shares of weights",
    "tfm-nofn-search": "TFM w/o FN, searched",
    "tfm-search": "TFM, searched",
    "tfm-10": "TFM, 10 % + 10 %",
    "tfm-55": "TFM, 55 % + 5 %",
}
"""Names as the paper prints them, in its order, and those of our own; other methods follow under their labels."""

BASELINES = ("finetuning", "freezing", "joint", "joint-scratch")
UPPER_BOUNDS = ("joint", "joint-scratch", "alone")
"""Not in the contest for the best average: they see old data, or keep a network a task."""


@dataclass(frozen=True)
class Cell:
    """Figures in per cent. `spread` is the standard deviation over seeds, if there are several."""

    accuracy: float
    forgetting: float | None = None
    spread: float | None = None
    best: bool = False

    def __str__(self) -> str:
        text = f"{self.accuracy:.1f}"
        if self.spread is not None:
            text += f" ± {self.spread:.1f}"
        if self.forgetting is not None:
            text += f" ({signed(self.forgetting)})"
        return text


@dataclass(frozen=True)
class Row:
    """One method, ours or the paper's, with an entry for each column."""

    method: str
    entries: tuple[Cell, ...]
    seeds: int = 1
    source: str = "ours"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Those of the tasks, where the last column is the average."""
        return self.entries[:-1]

    @property
    def average(self) -> Cell:
        """The last one."""
        return self.entries[-1]

    @property
    def title(self) -> str:
        """What the first column says."""
        return _title(self.method) if self.source == "ours" else "  the paper"


@dataclass(frozen=True)
class Table:
    """Rows with a cell for each column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The columns before the last, which is the average."""
        return self.columns[:-1]

    @property
    def header(self) -> tuple[str, ...]:
        """The first line."""
        return ("Method", *self.columns)

    def lines(self) -> list[tuple[str, ...]]:
        """The rows as text, without bold."""
        return [(row.title, *map(str, row.entries)) for row in self.rows]


def _title(method: str) -> str:
    return TITLES.get(method, method)


def signed(forgetting: float) -> str:
    """As the paper: 0.0 where nothing changed, else with a sign. What rounds to nothing keeps its sign: -0.0."""
    return "0.0" if forgetting == 0 else f"{forgetting:+.1f}"


def tables(runs: Iterable[Results], *, beside_paper: bool = False) -> list[Table]:
    """One table for each experiment, scenario and network among the runs."""
    return [_table(group, beside_paper) for group in groups(runs)]


def groups(runs: Iterable[Results]) -> list[list[Results]]:
    """The runs that stand in one table, together."""
    found: dict[tuple[str, str, str], list[Results]] = {}
    for results in runs:
        found.setdefault((results.experiment, results.scenario, results.network), []).append(results)
    return list(found.values())


def _table(group: Sequence[Results], beside_paper: bool) -> Table:
    first = group[0]
    _check_tasks(group)
    printed = paper.comparable(first.scenario, len(first.tasks))
    start = printed.average_from if printed is not None else 1
    methods = by_method(group)
    rows = _bold([_row(runs, start) for runs in methods])
    notes = _lacking(methods)
    if beside_paper and printed is not None:
        rows = _beside(rows, printed)
        notes += (f"The paper's figures: {printed.label} ({printed.title}).",)
    elif beside_paper and (other := paper.table_of(first.scenario)) is not None:
        notes += (f"The paper's table for {first.scenario} has {len(other.tasks)} tasks, not {len(first.tasks)}.",)
    elif beside_paper:
        notes += (f"The paper has no table for {first.scenario}.",)
    average = "Avg." if start == 1 else f"Avg. ({start}+)"
    return Table(f"{first.scenario} · {first.network}", (*first.names, average), tuple(rows), notes)


def _check_tasks(group: Sequence[Results]) -> None:
    """The columns of a table are the tasks of every row."""
    first = group[0]
    for other in group:
        if other.tasks != first.tasks and other.method != first.method:  # one method's seeds are compared below
            raise ValueError(
                f"'{first.method}' and '{other.method}' did not learn the same tasks of {first.scenario} "
                f"({', '.join(first.names)}; {', '.join(other.names)}); they cannot share a table"
            )


def _lacking(methods: Sequence[Sequence[Results]]) -> tuple[str, ...]:
    """Which methods were not run with seeds that others were: their figures are of fewer runs."""
    seeds = sorted({r.seed for runs in methods for r in runs})
    left = {_title(runs[0].method): [s for s in seeds if s not in {r.seed for r in runs}] for runs in methods}
    parts = [f"{title} lacks {', '.join(map(str, without))}" for title, without in left.items() if without]
    every = ", ".join(map(str, seeds))
    return (f"Not every method has a finished run with each seed ({every}): {'; '.join(parts)}.",) if parts else ()


def by_method(group: Sequence[Results]) -> list[list[Results]]:
    """The runs of each method together, methods in the paper's order; seeds must differ in nothing but the seed."""
    found: dict[str, list[Results]] = {}
    for results in group:
        found.setdefault(results.method, []).append(results)
    for method, runs in found.items():
        _check_alike(method, runs)
    order = list(TITLES)
    return sorted(found.values(), key=lambda r: order.index(r[0].method) if r[0].method in order else len(order))


def check_seeds(method: str, runs: Sequence[Results]) -> None:
    """Refuse runs of one method that have a seed in common: each would stand for the other."""
    seeds = [r.seed for r in runs]
    if twice := [seed for seed in sorted(set(seeds)) if seeds.count(seed) > 1]:
        home = f" of the experiment '{runs[0].experiment}'" if runs[0].experiment else ""
        raise ValueError(
            f"method '{method}'{home} is there twice on {runs[0].scenario} with seed {twice[0]}; give one run of each"
        )


def _check_alike(method: str, runs: Sequence[Results]) -> None:
    check_seeds(method, runs)
    for other in runs[1:]:
        for name in ("options", "regime", "tasks"):
            said = getattr(other, name), getattr(runs[0], name)
            if said[0] != said[1] and _in_force(other, name) != _in_force(runs[0], name):
                raise ValueError(
                    f"the runs of '{method}' with seeds {runs[0].seed} and {other.seed} differ in their {name}: "
                    f"{said[1]} and {said[0]}; they cannot share a row"
                )


def _in_force(results: Results, name: str) -> Any:
    """A part of a run's configuration; what came with a later version had its default before."""
    own = getattr(results, name)
    if not isinstance(own, dict):
        return own
    known = results.method if results.method in registry.names() else None
    return defaults(known)[name] | own


def _row(runs: Sequence[Results], average_from: int) -> Row:
    several = len(runs) > 1
    cells = []
    for k in range(len(runs[0].tasks)):
        accuracies = [100 * r.final[k] for r in runs]
        # A task that was not trained in its turn (joint from scratch) has nothing to compare with.
        forgotten = 100 * mean([r.forgetting[k] for r in runs]) if runs[0].trained[k] else None
        cells.append(Cell(mean(accuracies), forgotten, deviation(accuracies) if several else None))
    cells.append(_average(runs, average_from))
    return Row(runs[0].method, tuple(cells), len(runs))


def _average(runs: Sequence[Results], average_from: int) -> Cell:
    averages = [100 * mean(r.final[average_from - 1 :]) for r in runs]
    return Cell(mean(averages), None, deviation(averages) if len(runs) > 1 else None)


def _bold(rows: Sequence[Row], column: int = -1) -> list[Row]:
    """Mark the best of a column; methods that print the same figure share it."""
    contest = [round(r.entries[column].accuracy, 1) for r in rows if r.method not in UPPER_BOUNDS]
    best = max(contest, default=None) if len(contest) > 1 else None
    return [
        row
        if row.method in UPPER_BOUNDS or round(row.entries[column].accuracy, 1) != best
        else replace(row, entries=_marked(row.entries, column))
        for row in rows
    ]


def _marked(cells: tuple[Cell, ...], column: int) -> tuple[Cell, ...]:
    chosen = column % len(cells)
    return tuple(replace(cell, best=True) if c == chosen else cell for c, cell in enumerate(cells))


def _beside(rows: Sequence[Row], printed: paper.PaperTable) -> list[Row]:
    """Below each of our rows the paper's, where it has one."""
    theirs = {row.method: row for row in _bold([_paper_row(row) for row in printed.rows])}
    pairs = [[row, theirs[row.method]] if row.method in theirs else [row] for row in rows]
    return [row for pair in pairs for row in pair]


def _paper_row(row: paper.PaperRow) -> Row:
    cells = tuple(Cell(a, f) for a, f in zip(row.accuracy, row.forgetting, strict=True))
    return Row(row.method, (*cells, Cell(row.average)), source="paper")


# Averages only -----------------------------------------------------------------------------------------------------


def averages(runs: Iterable[Results], *, beside_paper: bool = False) -> Table:
    """One column for each scenario, as the paper's summary of Tiny ImageNet (tab:tiny_imagenet_all).

    Only methods that were run on every scenario have a row; a note names the others.
    """
    made = [_table(group, beside_paper) for group in groups(runs)]
    found = [{(row.method, row.source): row for row in table.rows} for table in made]
    keys = [key for key in found[0] if all(key in other for other in found)]
    rows: list[Row] = []
    for source in ("ours", "paper"):
        part = [_last_cells([rows_of[key] for rows_of in found]) for key in keys if key[1] == source]
        for column in range(len(found)):
            part = _bold(part, column)
        rows += part
    rows.sort(key=lambda row: [key[0] for key in keys].index(row.method))  # stable: ours, then the paper's
    notes = tuple(dict.fromkeys(note for table in made for note in table.notes))
    others = dict.fromkeys(
        m for rows_of in found for m, source in rows_of if source == "ours" and (m, source) not in keys
    )
    if others:
        notes = (f"Not run on every scenario: {'; '.join(map(_title, others))}.", *notes)
    return Table("Average accuracy", tuple(table.title for table in made), tuple(rows), notes)


def _last_cells(rows: Sequence[Row]) -> Row:
    cells = tuple(replace(row.entries[-1], best=False) for row in rows)
    return Row(rows[0].method, cells, rows[0].seeds, rows[0].source)


# Costs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What one method took: means over seeds, after the last task. Overhead is in bits."""

    method: str
    parameters: float
    training: float
    inference: float
    epochs: float
    seconds: float
    kept: float
    tasks: int
    transfer: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        """A row under the header `COSTS`."""
        return (
            _title(self.method),
            f"{self.parameters:,.0f}",
            size(self.training),
            size(self.inference),
            f"{self.epochs:.0f}",
            f"{self.seconds:.1f}",
            f"{self.kept:g} of {self.tasks} tasks",
            "–" if self.transfer is None else signed(self.transfer),
        )


@dataclass(frozen=True)
class CostTable:
    """The costs of the methods that stand in one table."""

    title: str
    rows: tuple[Cost, ...]


COSTS = ("Method", "parameters", "overhead training", "inference", "epochs", "seconds", "bits kept", "transfer")


def costs(group: Sequence[Results]) -> CostTable:
    """What each method of one table took.

    "bits kept": how many tasks' logits are bit-equal to those right after learning. "transfer": forward transfer,
    where the runs hold a method `alone` with the same seed, and every task was learned in its turn.
    """
    alone = {r.seed: r.learned for r in group if r.method == "alone"}
    rows = tuple(_cost(runs, alone) for runs in by_method(group))
    return CostTable(f"{group[0].scenario} · {group[0].network}", rows)


def _cost(runs: Sequence[Results], alone: dict[int, list[float]]) -> Cost:
    method = runs[0].method
    fit = [r for r in runs if r.seed in alone and method != "alone" and len(r.tasks) > 1 and all(r.trained)]
    transfers = [100 * r.forward_transfer(alone[r.seed]) for r in fit]
    return Cost(
        method,
        parameters=mean([r.parameters[-1] for r in runs]),
        training=mean([r.overhead[-1]["training"] for r in runs]),
        inference=mean([r.overhead[-1]["inference"] for r in runs]),
        epochs=mean([sum(r.epochs) for r in runs]),
        seconds=mean([sum(r.seconds) for r in runs]),
        kept=mean([sum(r.unchanged) for r in runs]),
        tasks=len(runs[0].tasks),
        transfer=mean(transfers) if transfers else None,
    )


def size(bits: float) -> str:
    """Bits as bytes that people read."""
    value, unit = bits / 8, "B"
    for larger in ("kB", "MB", "GB"):
        if round(value, unit != "B") < 1000:  # as it is printed
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
