"""Tables of the page: the paper's format (accuracy, forgetting in brackets), and what each method cost and proved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from zeroforget.experiments.report.chart_bundle import escaped
from zeroforget.experiments.report.grouping import Entry, Group, proof
from zeroforget.experiments.report.theme import DASHES, METHODS_LIGHT, SHAPES
from zeroforget.experiments.results import Results
from zeroforget.experiments.tables import Cell, signed, tables

_PATHS = {
    "circle": "M8 8m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "square": "M4.4 4.4h7.2v7.2h-7.2z",
    "triangle-up": "M8 3.5l4.6 8.2h-9.2z",
    "diamond": "M8 3l4 5l-4 5l-4-5z",
    "triangle-down": "M8 12.5l4.6-8.2h-9.2z",
    "cross": "M6.4 3.6h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2v-2.8h-2.8v-3.2h2.8z",
    "triangle-right": "M12.5 8l-8.2 4.6v-9.2z",
}


def swatch(index: int) -> str:
    """The line and mark of the report's method number `index`, as the charts draw them."""
    colour = f"var(--method-{index % len(METHODS_LIGHT)})"
    dashes = " ".join(map(str, DASHES[index // len(METHODS_LIGHT) % len(DASHES)]))
    return (
        f'<svg class="swatch" width="26" height="16" viewBox="-5 0 26 16" aria-hidden="true">'
        f'<path d="M-5 8h26" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        f'<path d="{_PATHS[SHAPES[index % len(SHAPES)]]}" fill="{colour}"/></svg>'
    )


def results_table(group: Group, methods: Sequence[str]) -> str:
    """Accuracy (forgetting) of each task after the last one, and the average: the paper's table, best in bold."""
    named = {entry.key: entry for entry in group.entries}
    runs = [replace(run, method=key) for key, entry in named.items() for run in entry.runs]
    (table,) = tables(runs)
    head = ["Method"] + [f'Task {k + 1}<span class="sub">{escaped(n)}</span>' for k, n in enumerate(table.tasks)]
    rows = [[_method(named[row.method], methods), *map(_cell, row.cells), _cell(row.average)] for row in table.rows]
    said = "Accuracy in % after the last task; in brackets, what changed since the task was learned"
    said += " (mean over seeds ± one standard deviation)." if any(row.seeds > 1 for row in table.rows) else "."
    if any(row.average.best for row in table.rows):
        said += " The best average is bold; methods that see old data or keep a network a task do not compete."
    said = " ".join([said, *table.notes])
    return _table([*head, table.header[-1]], rows, said, f"Accuracy on {group.scenario}")


def cost_table(group: Group, methods: Sequence[str]) -> str:
    """What each method needs: parameters, memory beside them, epochs and time."""
    head = ["Method", "Logits unchanged", "Parameters", "Overhead, serving", "Overhead, learning", "Epochs", "Time"]
    rows = [
        [
            _method(entry, methods),
            _unchanged(entry),
            f"{_mean(entry, lambda run: run.parameters[-1]):,.0f}",
            in_bytes(_mean(entry, lambda run: run.overhead[-1]["inference"]) / 8),
            in_bytes(_mean(entry, lambda run: max(o["training"] for o in run.overhead)) / 8),
            f"{_mean(entry, lambda run: sum(run.epochs)):,.0f}",
            in_time(_mean(entry, lambda run: sum(run.seconds))),
        ]
        for entry in group.entries
    ]
    said = (
        "Logits: of how many earlier tasks (times seeds) every logit on the test images is, to the last bit, what it "
        "was right after learning. Parameters: network and heads after the last task. Overhead: kept beside them. "
        "Epochs: of the trainings that were kept. Time: of all, trials of a search included. Both are of all tasks, "
        "the mean over seeds."
    )
    return _table(head, rows, said, f"Cost of each method on {group.scenario}")


def growth_table(rows: Iterable[Sequence[str]], name: str) -> str:
    """What each task added to the network."""
    head = ["Task", "New features", "New connections", "Features in all"]
    return _table(head, rows, "Connections are pairs of features in consecutive layers.", name)


def in_bytes(size: float) -> str:
    """1234567.0 → '1.23 MB'."""
    if size <= 0:
        return "none"
    power = 0
    while power < 4 and float(f"{size / 1000**power:.3g}") >= 1000:  # as it is printed: 999.6 is 1 of the next unit
        power += 1
    return f"{size / 1000**power:.3g} {['B', 'kB', 'MB', 'GB', 'TB'][power]}"


def in_time(seconds: float) -> str:
    """3725.0 → '1 h 2 min'."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str, name: str) -> str:
    """Cells are HTML already. The box scrolls, and so can be reached by keyboard; the page does not."""
    titles = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(name)}"><table>'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="note">{escaped(caption)}</p>'
    )


def _method(entry: Entry, methods: Sequence[str]) -> str:
    return f"{swatch(methods.index(entry.label))} {escaped(entry.label)}"


def _cell(cell: Cell) -> str:
    text = f"{cell.accuracy:.1f}" if math.isfinite(cell.accuracy) else "–"
    spread = "" if cell.spread is None else f" ± {cell.spread:.1f}"
    lost = "" if cell.forgetting is None else f" ({signed(cell.forgetting)})"
    more = f'<span class="f">{spread}{lost}</span>' if spread or lost else ""
    return f"<b>{text}</b>{more}" if cell.best else text + more


def _unchanged(entry: Entry) -> str:
    same, checked = proof(entry)
    return f"{same} of {checked}" if checked else "not checked"


def _mean(entry: Entry, figure: Callable[[Results], float]) -> float:
    return entry.over_seeds(figure)[0]
