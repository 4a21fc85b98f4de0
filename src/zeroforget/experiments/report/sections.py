"""What the page says about one group of runs: tables first, then the charts, from the result to its causes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroforget.experiments.report import charts, html_tables
from zeroforget.experiments.report import grouping as gather
from zeroforget.experiments.report.chart_bundle import Book, escaped
from zeroforget.experiments.report.grouping import Entry, Group
from zeroforget.experiments.report.growth import Drawing, Growth


@dataclass(frozen=True)
class Section:
    """A heading that the page's navigation names, and what stands below it."""

    id: str
    title: str
    html: str


def sections(group: Group, book: Book, prefix: str) -> list[Section]:
    """Everything about one group; `prefix` keeps ids apart."""
    makers: list[tuple[str, str, Callable[[Group, Book, str], str]]] = [
        ("results", "Results", _results),
        ("over-tasks", "Accuracy over tasks", _over_tasks),
        ("matrices", "Accuracy matrices", _matrices),
        ("overhead", "Memory overhead", _overhead),
        ("growth", "Growth of the network", _growth),
        ("curves", "Training curves", _curves),
    ]
    made = [Section(f"{prefix}{name}", title, make(group, book, f"{prefix}{name}")) for name, title, make in makers]
    return [section for section in made if section.html]


def _results(group: Group, book: Book, _: str) -> str:
    methods = book.style.methods
    return html_tables.results_table(group, methods) + html_tables.cost_table(group, methods)


def _over_tasks(group: Group, book: Book, _: str) -> str:
    rows = gather.averages(group)
    last = [row for row in rows if row["after"] == len(group.tasks)]
    told = "; ".join(f"{row['method']} {row['value']:.1f} %" for row in last)
    name = book.add(
        charts.accuracy(book.style, len(group.tasks), gather.lowest([rows])),
        rows,
        f"Line chart: average accuracy over the tasks learned so far, after each task. At the end: {told}",
    )
    wait = [entry.label for entry in group.entries if len(entry.learned) < len(group.tasks)]
    note = f"Drawn from where its training begins, for it waits for later tasks: {', '.join(wait)}." if wait else ""
    html = _figure(book.box(name, 300), "Average accuracy over the tasks learned so far", note)
    html += "<h3>Each task, as later ones are learned</h3><p class='note'>A level line is a task that is kept.</p>"
    each = [gather.of_task(group, k) for k in range(len(group.tasks))]
    small = charts.accuracy(book.style, len(each), gather.lowest(each), height=150, y_title="accuracy (%)")
    cells = []
    for k, task in enumerate(group.tasks):
        said = f"Line chart: accuracy on task {k + 1}, {task}, after it and each later task was learned"
        cells.append(_figure(book.box(book.add(small, each[k], said), 150), f"{k + 1} · {task}", ""))
    return f'{html}<div class="grid small">{"".join(cells)}</div>'


def _matrices(group: Group, book: Book, _: str) -> str:
    chart = charts.matrix(book.style, len(group.tasks))
    cells = []
    for entry in group.entries:
        said = f"Heat map: accuracy of {entry.label} in percent on each task (columns) after each task (rows)"
        box = book.box(book.add(chart, gather.matrix(group, entry), said), 24 * len(group.tasks))
        cells.append(_figure(box, entry.label, "", html_tables.swatch(book.style.methods.index(entry.label))))
    intro = "Accuracy in % on each task (columns) after each task was learned (rows). Does a column fade downwards?"
    return f'<p class="note">{intro}</p><div class="grid heat">{"".join(cells)}</div>'


def _overhead(group: Group, book: Book, _: str) -> str:
    kinds = {"inference": "To serve every task", "training": "While a task is learned"}
    rows = {kind: gather.overheads(group, kind) for kind in kinds}
    if not any(rows.values()):
        return '<p class="note">None of these methods keeps anything beside the network.</p>'
    both = [row for kind in kinds for row in rows[kind]]
    chart = charts.overhead(book.style, both, len(group.tasks), gather.network_bytes(group))
    cells = []
    for kind, title in kinds.items():
        drawn = {row["method"] for row in rows[kind]}
        none = [entry.label for entry in group.entries if entry.label not in drawn]
        note = f"No overhead, so not drawn: {', '.join(none)}." if none else ""
        said = f"Line chart in log scale: memory kept beside the network {title.lower()}, by number of tasks. {note}"
        cells.append(_figure(book.box(book.add(chart, rows[kind], said), 280), title, note))
    note = "What a method keeps beside the network and its heads. Dashed: the network itself, in 32-bit floats."
    return f'<p class="note">{note}</p><div class="grid pair">{"".join(cells)}</div>'


def _growth(group: Group, book: Book, prefix: str) -> str:
    grown = gather.grown(group)
    if not grown:
        return ""
    dots = "".join(
        f'<li><i style="background:var(--birth-{t})"></i>{t + 1} {escaped(task)}</li>'
        for t, task in enumerate(group.tasks)
    )
    intro = (
        "Dots are features, coloured by the task they were born with. Coloured lines are connections that this task "
        "learns; grey ones it finds and leaves as they are. Dashed dots do not exist yet. "
        "The figure below each column is the width of the layer."
    )
    html = f'<p class="note">{intro}</p><ul class="births" aria-label="Task of birth">{dots}</ul>'
    for number, (label, widths) in enumerate(grown):
        html += _grown(label, Growth(widths, group.tasks), book, f"{prefix}-{number}")
    return html


def _grown(label: str, growth: Growth, book: Book, name: str) -> str:
    drawing = Drawing(growth, name)
    # What may scroll must be reached by keyboard; what never does would only be one more stop.
    reach = ' tabindex="0" role="group" aria-label="Growth"' if drawing.width > 280 else ""
    panels = "".join(
        f'<figure><h4>{t + 1} · {escaped(task)}</h4><div class="panel"{reach}>{drawing.svg(t)}</div>'
        f"<figcaption>{drawing.told(t)}</figcaption></figure>"
        for t, task in enumerate(growth.tasks)
    )
    several = growth.scale()
    note = f"Wide layers, {several}." if several else ""
    bars = book.add(
        charts.layers(book.style, list(growth.widths), len(growth.tasks)),
        growth.rows(),
        f"Stacked bars: width of each layer of {label}, by the task its features were born with",
    )
    return (
        f"<h3>{escaped(label)}</h3>"
        f'<div class="grid" style="--cell:{drawing.width}px">{panels}</div><p class="note">{escaped(note)}</p>'
        + _figure(book.box(bars, 22 * len(growth.widths)), "Width of each layer, by birth", "")
        + html_tables.growth_table(_growth_rows(growth), f"Growth of {label}")
    )


def _growth_rows(growth: Growth) -> list[list[str]]:
    return [
        [
            f"{t + 1} {escaped(task)}",
            f"{growth.features(t):,}",
            f"{growth.connections(t):,}",
            f"{sum(sizes[t] for sizes in growth.widths.values()):,}",
        ]
        for t, task in enumerate(growth.tasks)
    ]


def _curves(group: Group, book: Book, prefix: str) -> str:
    rows = {q: [gather.curves(group, k, q) for k in range(len(group.tasks))] for q in charts.QUANTITIES}
    if not any(each for parts in rows.values() for each in parts):
        return ""
    shapes = {q: charts.curves(book.style, q, gather.lowest(each)) for q, each in rows.items()}
    cells = []
    for k, task in enumerate(group.tasks):
        names = {}
        for quantity, title in charts.QUANTITIES.items():
            said = f"Line chart: {title} over the epochs of task {k + 1}, {task}"
            names[quantity] = book.add(shapes[quantity], rows[quantity][k], said)
        first = next(iter(names.values()))
        box = book.box(first, 190).replace("></div>", f' data-curves="{escaped(json.dumps(names))}"></div>')
        cells.append(_figure(box, f"{k + 1} · {task}", ""))
    return _quantities(prefix, group.entries) + f'<div class="grid small">{"".join(cells)}</div>'


def _quantities(prefix: str, entries: Sequence[Entry]) -> str:
    radios = "".join(
        f'<label><input type="radio" name="{prefix}" data-quantity="{quantity}"{"" if i else " checked"}>'
        f"{title.removesuffix(' (%)')}</label>"
        for i, (quantity, title) in enumerate(charts.QUANTITIES.items())
    )
    seeds = " The first seed of each method." if any(len(entry.runs) > 1 for entry in entries) else ""
    return (
        f"<fieldset><legend>Show</legend>{radios}</fieldset>"
        f'<p class="note">A mark stands at the epoch whose weights were kept.{seeds}</p>'
    )


def _figure(box: str, title: str, note: str, mark: str = "") -> str:
    caption = f"<figcaption>{escaped(note)}</figcaption>" if note else ""
    return f"<figure><h4>{mark}{escaped(title)}</h4>{box}{caption}</figure>"
