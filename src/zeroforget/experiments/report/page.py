"""The report: one HTML page that holds everything it shows, and asks nothing of a network."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from zeroforget._version import __version__
from zeroforget.experiments.disk import beginning, write_text
from zeroforget.experiments.report import grouping as gather
from zeroforget.experiments.report import html_tables
from zeroforget.experiments.report.chart_bundle import Book, escaped
from zeroforget.experiments.report.charts import Style
from zeroforget.experiments.report.grouping import Entry, Group
from zeroforget.experiments.report.sections import Section, sections
from zeroforget.experiments.report.theme import theme, variables
from zeroforget.experiments.results import Results

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
        f'<button type="button" aria-pressed="true" data-method="{escaped(label)}">'
        f"{html_tables.swatch(i)}{escaped(label)}</button>"
        for i, label in enumerate(methods)
    )
    return f'<div class="key" role="group" aria-label="Methods shown in the charts"><span>Show</span>{buttons}</div>'


def _group(group: Group, members: Sequence[Section], *, alone: bool) -> str:
    where = "" if alone else f'<span class="sub">{escaped(group.title)}</span>'
    return "".join(f'<section id="{s.id}"><h2>{where}{s.title}</h2>{s.html}</section>' for s in members)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
