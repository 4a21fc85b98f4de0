"""Results as the papers' tables: accuracy (forgetting) of each task after all tasks, averages, what gaps are worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zeroforget.experiments import paper
from zeroforget.experiments.comparability import check_alike, other_code, unlike
from zeroforget.experiments.results import Results, deviation, mean
from zeroforget.files.text import nearest

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and how far its interval reaches to each side; infinitely far for one pair."""

    mean: float
    reach: float
    pairs: int

    @property
    def low(self) -> float:
        """Where the interval begins."""
        return self.mean - self.reach

    @property
    def high(self) -> float:
        """Where it ends."""
        return self.mean + self.reach

    def __str__(self) -> str:
        if self.pairs < 2:
            return f"{self.mean:+.1f}"
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Ours less theirs over the seeds that both have, with its 95 % interval; None where they share no seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    apart = [ours[seed] - theirs[seed] for seed in seeds]
    count = len(apart)
    reach = math.inf
    if count > 1:
        from scipy.special import stdtrit  # a quarter of a second, which most commands need not spend

        reach = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * deviation(apart) / math.sqrt(count)
    return Difference(mean(apart), reach, count)


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
    "packnet-50": "PackNet, gives back 50 %",
    "packnet-75": "PackNet, gives back 75 %",
    "wsn": "WSN",
    "wsn-30": "WSN, c = 30 %",
    "wsn-10": "WSN, c = 10 %",
    "wsn-5": "WSN, c = 5 %",
    "wsn-3": "WSN, c = 3 %",
    "supsup": "SupSup",
    "gpm": "GPM",
    "eft": "EFT",
    "tfm-nofn": "TFM w/o FN",
    "tfm": "TFM",
    "lean": "Lean",
    "lean-adam": "Lean, Adam",
    "adapters": "Adapters",
    "lwf-published": "LwF, as published",
    "hat-published": "HAT, N(0, 1)",
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
        if math.isnan(self.accuracy):
            return "–"
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
    more: tuple[str, ...] = ()
    """Words behind the entries, such as the difference from another row."""

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
        if self.source == "ours":
            return title_of(self.method)
        return f"  {self.source}" if self.source != "paper" else "  the paper"


@dataclass(frozen=True)
class Table:
    """Rows with a cell for each column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    """Headings behind the columns, for the rows' words there."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The columns before the last, which is the average."""
        return self.columns[:-1]

    @property
    def header(self) -> tuple[str, ...]:
        """The first line."""
        return ("Method", *self.columns, *self.more)

    def lines(self) -> list[tuple[str, ...]]:
        """The rows as text, without bold."""
        blank = ("",) * len(self.more)
        return [(row.title, *map(str, row.entries), *(row.more or blank)) for row in self.rows]


def title_of(method: str) -> str:
    """What a method is called in print."""
    return TITLES.get(method, method)


def signed(forgetting: float) -> str:
    """As the paper: 0.0 where nothing changed, else with a sign. What rounds to nothing keeps its sign: -0.0."""
    return "0.0" if forgetting == 0 else f"{forgetting:+.1f}"


def tables(
    runs: Iterable[Results], *, beside_paper: bool = False, published: bool = False, against: str | None = None
) -> list[Table]:
    """One table for each experiment, scenario and network among the runs.

    With `against`, each row tells its average less that of this method, paired by seed.
    """
    found = groups(runs)
    if against is not None and not any(each.method == against for group in found for each in group):
        labels = list(dict.fromkeys(each.method for group in found for each in group))
        hint = nearest(against, labels)
        raise ValueError(f"no run of '{against}' to compare with{hint} (there are {', '.join(labels)})")
    made = [_table(group, title, beside_paper) for group, title in zip(found, titles(found), strict=True)]
    if against is not None:
        made = [_against(table, group, against) for table, group in zip(made, found, strict=True)]
    return [
        _beside_published(table, group[0]) if published else table for table, group in zip(made, found, strict=True)
    ]


def _against(table: Table, group: Sequence[Results], label: str) -> Table:
    """A column behind the average: the paired difference from one row, with its 95 % interval."""
    averages = _by_seed(group, average_from(group[0]))
    if label not in averages:
        return table

    def words(row: Row) -> tuple[str, ...]:
        if row.source != "ours" or row.method == label:
            return ("",)
        difference = paired(averages[row.method], averages[label])
        return ("–" if difference is None else str(difference),)

    rows = tuple(replace(row, more=words(row)) for row in table.rows)
    return replace(table, rows=rows, more=(f"less {title_of(label)}",))


def average_from(results: Results) -> int:
    """The first task, counted from 1, that the average of its table counts."""
    printed = paper.comparable(results.scenario, len(results.tasks))
    return printed.average_from if printed is not None else 1


def _by_seed(group: Sequence[Results], start: int) -> dict[str, dict[int, float]]:
    """Each method's average in per cent, seed by seed."""
    found: dict[str, dict[int, float]] = {}
    for results in group:
        found.setdefault(results.method, {})[results.seed] = 100 * mean(results.final[start - 1 :])
    return found


def _beside_published(table: Table, first: Results) -> Table:
    """Below our rows what other papers print; of methods that we did not run, at the end."""
    found = paper.published(first.scenario)
    if found is None:
        return replace(table, notes=(*table.notes, f"No other paper's figures are kept for {first.scenario}."))
    blank = Cell(math.nan)
    theirs = {}
    for method, (average, capacity) in found.averages.items():
        words = "published" if capacity is None else f"published, capacity {capacity:g} %"
        theirs[method] = Row(method, (*(blank,) * len(table.tasks), Cell(average)), source=words)
    rows: list[Row] = []
    for row in table.rows:
        rows += [row, theirs.pop(row.method)] if row.source == "ours" and row.method in theirs else [row]
    rows += [replace(row, source=f"{title_of(row.method)}, {row.source}") for row in theirs.values()]
    return replace(table, rows=tuple(rows), notes=(*table.notes, f"Published: {found.source}."))


def titles(found: Sequence[Sequence[Results]]) -> list[str]:
    """Scenario and network of each table; where that is not enough to tell them apart, the experiment before it."""
    plain = [f"{group[0].scenario} · {group[0].network}" for group in found]
    names = [group[0].experiment for group in found]
    return [
        f"{name}: {title}" if name and plain.count(title) > 1 else title
        for name, title in zip(names, plain, strict=True)
    ]


def groups(runs: Iterable[Results]) -> list[list[Results]]:
    """The runs that stand in one table, together."""
    found: dict[tuple[str, str, str], list[Results]] = {}
    for results in runs:
        found.setdefault((results.experiment, results.scenario, results.network), []).append(results)
    return list(found.values())


def _table(group: Sequence[Results], title: str, beside_paper: bool) -> Table:
    first = group[0]
    _check_tasks(group)
    printed = paper.comparable(first.scenario, len(first.tasks))
    start = printed.average_from if printed is not None else 1
    methods = by_method(group)
    rows = _carried([_row(runs, start) for runs in methods], _by_seed(group, start))
    notes = _lacking(methods) + unlike(methods, [title_of(runs[0].method) for runs in methods]) + _changed(methods)
    if beside_paper and printed is not None:
        rows = _beside(rows, printed)
        notes += (f"The paper's figures: {printed.label} ({printed.title}).",)
    elif beside_paper and (other := paper.table_of(first.scenario)) is not None:
        notes += (f"The paper's table for {first.scenario} has {len(other.tasks)} tasks, not {len(first.tasks)}.",)
    elif beside_paper:
        notes += (f"The paper has no table for {first.scenario}.",)
    average = "Avg." if start == 1 else f"Avg. ({start}+)"
    return Table(title, (*first.names, average), tuple(rows), notes)


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
    left = {title_of(runs[0].method): [s for s in seeds if s not in {r.seed for r in runs}] for runs in methods}
    parts = [f"{title} lacks {', '.join(map(str, without))}" for title, without in left.items() if without]
    every = ", ".join(map(str, seeds))
    return (f"Not every method has a finished run with each seed ({every}): {'; '.join(parts)}.",) if parts else ()


def _changed(methods: Sequence[Sequence[Results]]) -> tuple[str, ...]:
    """Whose code was changed from seed to seed."""
    names = [title_of(runs[0].method) for runs in methods if other_code(runs)]
    return (f"The seeds are not all of the same code: {', '.join(names)}.",) if names else ()


def by_method(group: Sequence[Results]) -> list[list[Results]]:
    """The runs of each method together, methods in the paper's order; seeds must differ in nothing but the seed."""
    found: dict[str, list[Results]] = {}
    for results in group:
        found.setdefault(results.method, []).append(results)
    for method, runs in found.items():
        check_alike(method, runs)
    order = list(TITLES)
    return sorted(found.values(), key=lambda r: order.index(r[0].method) if r[0].method in order else len(order))


def _row(runs: Sequence[Results], start: int) -> Row:
    several = len(runs) > 1
    cells = []
    for k in range(len(runs[0].tasks)):
        accuracies = [100 * r.final[k] for r in runs]
        # A task that was not trained in its turn (joint from scratch) has nothing to compare with.
        forgotten = 100 * mean([r.forgetting[k] for r in runs]) if runs[0].trained[k] else None
        cells.append(Cell(mean(accuracies), forgotten, deviation(accuracies) if several else None))
    cells.append(_average(runs, start))
    return Row(runs[0].method, tuple(cells), len(runs))


def _average(runs: Sequence[Results], start: int) -> Cell:
    averages = [100 * mean(r.final[start - 1 :]) for r in runs]
    return Cell(mean(averages), None, deviation(averages) if len(runs) > 1 else None)


def _carried(rows: Sequence[Row], averages: Mapping[str, Mapping[int, float]]) -> list[Row]:
    """Mark the best average, if over the seeds its lead over every other is more than chance: the 95 % interval of each
    paired difference lies above 0. One seed carries nothing."""
    contest = [row.method for row in rows if row.method not in UPPER_BOUNDS]
    best = max(contest, key=lambda method: mean(list(averages[method].values())), default=None)
    if best is None or len(contest) < 2:
        return list(rows)
    leads = [paired(averages[best], averages[method]) for method in contest if method != best]
    if not all(lead is not None and lead.low > 0 for lead in leads):
        return list(rows)
    return [replace(row, entries=_marked(row.entries, -1)) if row.method == best else row for row in rows]


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
    made = tables(runs, beside_paper=beside_paper)
    found = [{(row.method, row.source): row for row in table.rows} for table in made]
    keys = [key for key in found[0] if all(key in other for other in found)]
    rows: list[Row] = []
    for source in ("ours", "paper"):
        part = [_last_cells([rows_of[key] for rows_of in found]) for key in keys if key[1] == source]
        for column in range(len(found) if source == "paper" else 0):
            part = _bold(part, column)
        rows += part
    rows.sort(key=lambda row: [key[0] for key in keys].index(row.method))  # stable: ours, then the paper's
    notes = tuple(dict.fromkeys(note for table in made for note in table.notes))
    others = dict.fromkeys(
        m for rows_of in found for m, source in rows_of if source == "ours" and (m, source) not in keys
    )
    if others:
        notes = (f"Not run on every scenario: {'; '.join(map(title_of, others))}.", *notes)
    return Table("Average accuracy", tuple(table.title for table in made), tuple(rows), notes)


def _last_cells(rows: Sequence[Row]) -> Row:
    ours = rows[0].source == "ours"  # whose seeds told what is best; the paper's is the best of the rows shown
    cells = tuple(replace(row.entries[-1], best=ours and row.entries[-1].best) for row in rows)
    return Row(rows[0].method, cells, rows[0].seeds, rows[0].source)
