"""The report: one HTML page that holds everything it shows, and asks nothing of a network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from zeroforget._version import __version__
from zeroforget.experiments.disk import beginning, write_text
from zeroforget.experiments.report import charts
from zeroforget.experiments.report import grouping as gather
from zeroforget.experiments.report.charts import Book, Style
from zeroforget.experiments.report.grouping import Entry, Group, proof
from zeroforget.experiments.report.growth import Drawing, Growth
from zeroforget.experiments.report.theme import DASHES, METHODS_LIGHT, SHAPES, theme, variables
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
    return results_table(group, methods) + cost_table(group, methods)


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
        cells.append(_figure(box, entry.label, "", swatch(book.style.methods.index(entry.label))))
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
        + growth_table(_growth_rows(growth), f"Growth of {label}")
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


# The browser itself refuses every request; Vega makes functions of its expressions, hence 'unsafe-eval'.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
TITLE = " · zeroforget report</title>"
MOST_COMMANDS = 8


def write_report(runs: Sequence[Results], path: Path, *, command: str = "", made: datetime | None = None) -> None:
    """Write the report of these runs as one self-contained page."""
    write_text(path, page(runs, command=command, made=made))


def is_report(path: Path) -> bool:
    """Whether a file begins as reports do."""
    return TITLE in beginning(path)


def page(runs: Sequence[Results], *, command: str = "", made: datetime | None = None) -> str:
    """The report of these runs as HTML."""
    found = gather.groups(runs)
    methods = gather.labels(found)
    book = Book(Style(tuple(methods)))
    parts = [(group, sections(group, book, f"g{number}-")) for number, group in enumerate(found)]
    births = max(len(group.tasks) for group in found)
    title = found[0].title if len(found) == 1 else f"{len(found)} experiments"
    body = "".join(_group(group, part, alone=len(found) == 1) for group, part in parts)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{escaped(title)}{TITLE}",
            f"<style>{_style(births)}</style></head><body>",
            '<a class="skip" href="#content">Skip to the results</a>',
            f'<header class="top">{_header(found, title, command, made or datetime.now().astimezone())}',
            f"{_navigation(parts)}</header>",
            f'<main id="content">{_key(methods)}{body}</main>',
            f"<footer>Made by zeroforget {escaped(__version__)}. This page is one file and fetches nothing.</footer>",
            '<div id="tip" role="status" hidden></div>',
            "<noscript><p class='top'>Without scripts you see tables and growth, but no charts.</p></noscript>",
            book.script(),
            f'<script type="module">{_file("page.js")}</script></body></html>',
        ]
    )


def _file(name: str) -> str:
    return (files("zeroforget.experiments.report") / name).read_text(encoding="utf-8")


def _style(births: int) -> str:
    light, dark = (variables(theme(dark=dark, births=births)) for dark in (False, True))
    fills = "".join(f".g-f{b}{{fill:var(--birth-{b})}}.g-s{b}{{stroke:var(--birth-{b})}}" for b in range(births))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{_file('page.css')}{fills}"


def _header(found: Sequence[Group], title: str, command: str, made: datetime) -> str:
    runs = [run for group in found for run in group.runs]
    seeds = sorted({run.seed for run in runs})
    tasks = sorted({len(group.tasks) for group in found})
    facts = [
        ("Scenario", ", ".join(dict.fromkeys(group.scenario for group in found))),
        ("Network", ", ".join(dict.fromkeys(group.network for group in found))),
        ("Tasks", ", ".join(map(str, tasks))),
        ("Runs", f"{len(runs)} ({_count(len(seeds), 'seed')}: {', '.join(map(str, seeds))})"),
        ("Made", f"{made.strftime('%Y-%m-%d %H:%M %Z').strip()}, version {__version__}"),
    ]
    items = "".join(f"<div><dt>{name}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts)
    proofs = "".join(_proofs(group, alone=len(found) == 1) for group in found)
    items += f'<div class="wide"><dt>What was proved</dt><dd><ul class="proof">{proofs}</ul></dd></div>'
    items += _origin(runs, command)
    lead = '<p class="lead">What was learned, what was kept, and what it cost.</p>'
    return f'<h1>{escaped(title)}</h1>{lead}<dl class="facts">{items}</dl>'


def _origin(runs: Sequence[Results], command: str) -> str:
    """Where the figures come from: the machine of the first run, and the commands as they were typed."""
    told = {key: value for key, value in runs[0].environment.items() if value is not None}
    commands = list(dict.fromkeys(str(c) for run in runs if (c := run.environment.get("command"))))
    told.pop("command", None)
    lines = [("Run by", line, "code") for line in commands[:MOST_COMMANDS]]
    if (left := len(commands) - MOST_COMMANDS) > 0:
        lines.append(("And by", _count(left, "more command"), "span"))
    lines += [("Report by", command, "code")] if command else []
    lines += [("Ran on", ", ".join(f"{key} {value}" for key, value in told.items()), "span")] if told else []
    return "".join(
        f'<div class="wide"><dt>{name}</dt><dd><{tag}>{escaped(text)}</{tag}></dd></div>' for name, text, tag in lines
    )


def _proofs(group: Group, *, alone: bool) -> str:
    """What was proved, methods with the same outcome together: those that kept everything come first."""
    outcomes: dict[tuple[str, str], list[str]] = {}
    for entry in group.entries:
        outcomes.setdefault(_outcome(entry, len(group.tasks) - 1), []).append(entry.label)
    where = "" if alone else f" on {group.title}"
    return "".join(
        f'<li class="{kind}"><strong>{escaped(", ".join(names))}</strong>{escaped(where)}: {told}</li>'
        for (kind, told), names in sorted(outcomes.items())
    )


def _outcome(entry: Entry, earlier: int) -> tuple[str, str]:
    same, checked = gather.proof(entry)
    if not checked:
        return "unknown", "not checked"
    seeds = f", in each of {len(entry.runs)} seeds" if len(entry.runs) > 1 else ""
    if same == checked:
        tasks = _count(earlier, "earlier task")
        return "held", f"after the last task, every logit of the {tasks} is unchanged to the last bit{seeds}"
    if same == 0:
        return "moved", "the logits of every earlier task changed"
    return "moved", f"logits changed in {checked - same} of {checked} checks of an earlier task"


def _navigation(parts: Sequence[tuple[Group, Sequence[Section]]]) -> str:
    links = ""
    for group, members in parts:
        if len(parts) > 1:
            links += f"<p>{escaped(group.title)}</p>"
        links += "<ul>" + "".join(f'<li><a href="#{s.id}">{s.title}</a></li>' for s in members) + "</ul>"
    return f'<nav aria-label="Sections">{links}</nav>'


def _key(methods: Sequence[str]) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-method="{escaped(label)}">{swatch(i)}{escaped(label)}</button>'
        for i, label in enumerate(methods)
    )
    return f'<div class="key" role="group" aria-label="Methods shown in the charts"><span>Show</span>{buttons}</div>'


def _group(group: Group, members: Sequence[Section], *, alone: bool) -> str:
    where = "" if alone else f'<span class="sub">{escaped(group.title)}</span>'
    return "".join(f'<section id="{s.id}"><h2>{where}{s.title}</h2>{s.html}</section>' for s in members)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def escaped(value: Any) -> str:
    """Any value as text of the page."""
    return escape(str(value))
