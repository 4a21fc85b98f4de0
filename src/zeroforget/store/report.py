"""What a model tells people: its report, one page of how it learned and errs, and its card, Markdown for model hubs."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from zeroforget._version import __version__
from zeroforget.files import atomic
from zeroforget.files.text import visible
from zeroforget.store.confusions import Mistake, Seen, recorded, seen
from zeroforget.store.errors import ModelError, Unreadable
from zeroforget.store.frozen_features import Found
from zeroforget.store.model import Model
from zeroforget.store.pictures import decode
from zeroforget.store.schema import TaskFacts, accuracy_of
from zeroforget.store.verify import Report, verify

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
TITLE = " · zeroforget report</title>"
MOST_IN_MATRIX = 30
"""Of more classes the most frequent confusions are listed instead."""
MOST_ROWS = 60
SIDE = 144
"""Pixels of a side of a picture on the page."""
_STYLE = """
:root{--paper:#fff;--panel:#f5f7f9;--ink:#1b2127;--muted:#525d69;--grid:#d9dfe5;--link:#0b5cad;--good:#0b6b3a;
--bad:#a3341c;--one:#316ea4;--two:#d36203}
@media(prefers-color-scheme:dark){:root{--paper:#15181d;--panel:#1e2329;--ink:#e8ecf0;--muted:#a6b1bc;--grid:#39424c;
--link:#7fbcff;--good:#6fd39b;--bad:#ff9c85;--one:#6eaff5;--two:#f2741f}}
*{box-sizing:border-box}html{color-scheme:light dark}
body{margin:0 auto;max-width:68rem;padding:2rem 1.25rem;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .4rem}h2{font-size:1.4rem;margin:2.6rem 0 .5rem;padding-top:1.2rem;
border-top:1px solid var(--grid)}h3{font-size:1.05rem;margin:1.6rem 0 .4rem}p{max-width:46rem;margin:.3rem 0 .8rem}
.muted,figcaption{color:var(--muted)}a{color:var(--link)}code{font:.88em ui-monospace,monospace}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.92rem}
th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid var(--grid);font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}th{font-weight:600}
.proof{list-style:none;padding:0}.held::before{content:"✓ ";color:var(--good);font-weight:700}
.moved::before{content:"✗ ";color:var(--bad);font-weight:700}
.matrix td{text-align:center;min-width:2.4rem;border:1px solid var(--grid);padding:.25rem}
.matrix th.up{writing-mode:vertical-rl;text-align:left;vertical-align:bottom;padding:.4rem .2rem}
.pictures{display:flex;flex-wrap:wrap;gap:1rem;margin:.5rem 0}figure{margin:0;width:144px;font-size:.85rem}
figure img{width:144px;height:144px;object-fit:cover;border-radius:6px;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--muted)}svg{max-width:100%;height:auto}
.bar{fill:var(--one)}.mean{stroke:var(--ink);stroke-width:2}.axis{stroke:var(--grid)}
polyline{fill:none;stroke-width:2}.one{stroke:var(--one)}.two{stroke:var(--two)}
"""


def write_report(model: Model, path: Path, data: Mapping[str, Path] | None = None, *, command: str = "") -> None:
    """Write the page of a model. `data`: for some tasks a folder of class folders, whose pictures are then shown."""
    atomic.write_bytes(path, page(model, data, command=command).encode())


def page(
    model: Model, data: Mapping[str, Path] | None = None, *, command: str = "", made: datetime | None = None
) -> str:
    """The report of a model as HTML."""
    data = data or {}
    tasks = tuple(model.tasks)
    if not tasks:
        raise ModelError(f"{model.path} has no task yet; there is nothing to report")
    for name in data:
        model.task(name)  # a misspelt one is told before anything is measured
    report = verify(model.folder)
    if not report.holds:
        data = {}  # what a damaged model answers means nothing
    found = {
        facts.name: seen(facts, model.dense(facts.name), data[facts.name]) if facts.name in data else recorded(facts)
        for facts in tasks
    }
    title = _text(model.path.resolve().name)
    when = (made or datetime.now().astimezone()).strftime("%Y-%m-%d %H:%M %Z").strip()
    asked = f" by <code>{_text(command)}</code>" if command else ""
    body = "".join(_task(place, facts, found[facts.name]) for place, facts in enumerate(tasks, 1))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{title}{TITLE}",
            f"<style>{_STYLE}</style></head><body>",
            f"<header><h1>{title}</h1><p>{_lead(model)}</p>",
            f'<p class="muted">Made {when}{asked}, version {_text(__version__)}.</p></header>',
            f"<main>{_proofs(report)}{_overview(tasks)}{_growth(tasks)}{body}</main>",
            '<footer><p class="muted">This page is one file and fetches nothing.</p></footer></body></html>',
        ]
    )


def _lead(model: Model) -> str:
    count = len(model.tasks)
    tasks = "1 task" if count == 1 else f"{count} tasks, one after another; none changed an earlier one by a bit"
    return (
        f"It classifies {model.backbone.takes} and has learned {tasks}. It grew from "
        f"<code>{_text(model.backbone.network)}</code> and takes {model.bytes:,} bytes."
    )


def _proofs(report: Report) -> str:
    rows = "".join(
        f'<li class="{"held" if one.holds else "moved"}">{_text(one.title)}: {_text(one.found)}'
        + "".join(f"<br>{_text(moved)}" for moved in one.moved)
        + "</li>"
        for one in report.proofs
    )
    head = f"<p>The model is <code>{_text(report.head)}</code>.</p>" if report.head else ""
    return f'<section id="proofs"><h2>Proofs</h2><ul class="proof">{rows}</ul>{head}</section>'


# All tasks ---------------------------------------------------------------------------------------------------------


def _overview(tasks: Sequence[TaskFacts]) -> str:
    heads = ("task", "classes", "accuracy", "95 % interval", "test pictures", "learned")
    rows = [
        (
            f'<a href="#task-{place}">{_text(one.name)}</a>', str(len(one.classes)),
            _percent(one.accuracy) if one.measured else "not measured",
            _between(one.interval) if one.measured else "–", f"{one.data.held_out:,}", _text(one.learned[:10]),
        )
        for place, one in enumerate(tasks, 1)
    ]  # fmt: skip
    note = "<p>Accuracy is that of the test part, which chose nothing.</p>"
    return f'<section id="accuracy"><h2>Accuracy</h2>{note}{_table(heads, rows)}{_intervals(tasks)}</section>'


def _intervals(tasks: Sequence[TaskFacts]) -> str:
    """A bar for each task from 0 to 100 %, with a line over its interval."""
    tasks = [one for one in tasks if one.measured]
    left, width, row = 160, 460, 26
    marks = [
        f'<line class="axis" x1="{left + width * n / 4:.0f}" y1="0" x2="{left + width * n / 4:.0f}" '
        f'y2="{row * len(tasks)}"/><text x="{left + width * n / 4:.0f}" y="{row * len(tasks) + 16}" '
        f'text-anchor="middle">{25 * n} %</text>'
        for n in range(5)
    ]
    for place, one in enumerate(tasks):
        y, (low, high) = row * place + 13, (left + width * bound for bound in one.interval)
        marks.append(
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{_text(_short(one.name))}</text>'
            f'<rect class="bar" x="{left}" y="{y - 7}" width="{width * one.accuracy:.1f}" height="14"/>'
            f'<line class="mean" x1="{low:.1f}" y1="{y}" x2="{high:.1f}" y2="{y}"/>'
        )
    return _svg(left + width + 40, row * len(tasks) + 24, "Accuracy of each task with its interval", marks)


def _growth(tasks: Sequence[TaskFacts]) -> str:
    heads = ("task", "new features", "features", "bytes", "bytes in all", "operations a picture", "growth", "rank")
    rows, features, size = [], 0, 0
    for one in tasks:
        added = sum(one.born.values())
        features, size = features + added, size + one.bytes
        growth = f"{one.growth:g}" if isinstance(one.growth, (int, float)) else "by axis"
        rank = f"{one.rank:g}" if isinstance(one.rank, (int, float)) else "by weight"
        rows.append(
            (
                _text(one.name), f"+{added:,}", f"{features:,}", f"+{one.bytes:,}", f"{size:,}",
                f"{one.operations:,}", growth, rank,
            )
        )  # fmt: skip
    return f'<section id="growth"><h2>Growth and bytes</h2>{_table(heads, rows)}</section>'


# One task ----------------------------------------------------------------------------------------------------------


def _task(place: int, facts: TaskFacts, found: Seen | None) -> str:
    low, high = facts.interval
    lead = (
        f"<p><strong>{_percent(facts.accuracy)}</strong> of {facts.data.held_out:,} test pictures right "
        f"(95 % interval: {100 * low:.0f} to {100 * high:.0f} %). {_ending(facts)}</p>"
        if facts.measured
        else "<p>It was adopted without pictures, so its accuracy is not measured.</p>"
    )
    if (crossed := Found.of(facts.training)) is not None:
        lead += f"<p>Cross-validation: {crossed}.</p>"
    if found is None:
        return (
            f'<section id="task-{place}"><h2>{_text(facts.name)}</h2>{lead}{_curves(facts)}<p>Where it errs was not '
            "written down; <code>--data TASK=FOLDER</code> measures it on pictures.</p></section>"
        )
    which = "the test part" if found.of_test_part else "all pictures of the folder that was given"
    told = (
        f'<p class="muted">What follows is of {which}: {sum(found.totals):,} pictures, '
        f"{_percent(found.accuracy)} right ({_between(found.interval)}).</p>"
    )
    parts = [lead, _curves(facts), told, _matrix(found), _classes(found), _mistakes(found)]
    return f'<section id="task-{place}"><h2>{_text(facts.name)}</h2>{"".join(parts)}</section>'


def _ending(facts: TaskFacts) -> str:
    about = facts.training
    epochs, kept, stopped = (about.get(name) for name in ("epochs", "kept", "stopped"))
    if not isinstance(epochs, int) or not isinstance(kept, int) or not stopped:
        return ""
    epoch = f"Epoch {kept + 1} of {epochs} was kept. " if epochs > 1 else ""
    return f"{epoch}Training stopped because: {_text(str(stopped))}."


def _curves(facts: TaskFacts) -> str:
    """Loss on the pictures learned from and on those that select, and the accuracy on the latter, epoch by epoch."""
    rows = facts.training.get("curve")
    if not isinstance(rows, list) or len(rows) < 2:
        return ""
    if not all(isinstance(row, list) and len(row) == 3 and all(map(_plain, row)) for row in rows):
        return ""
    losses = [row[:2] for row in rows]
    most = max(max(pair) for pair in losses) or 1.0
    left, gap, width, height = 44, 70, 300, 150
    right = left + width + gap

    def line(values: Sequence[float], x: float, kind: str) -> str:
        step = width / (len(values) - 1)
        points = " ".join(f"{x + step * n:.1f},{10 + height * (1 - value):.1f}" for n, value in enumerate(values))
        return f'<polyline class="{kind}" points="{points}"/>'

    marks = []
    for x, top in ((left, f"{most:.2g}"), (right, "100 %")):
        marks += [
            f'<line class="axis" x1="{x}" y1="{y}" x2="{x + width}" y2="{y}"/>'
            for y in (10, 10 + height / 2, 10 + height)
        ]
        marks.append(f'<text x="{x - 6}" y="14" text-anchor="end">{top}</text>')
        marks.append(f'<text x="{x - 6}" y="{14 + height}" text-anchor="end">0</text>')
        marks.append(f'<text x="{x + width}" y="{height + 28}" text-anchor="end">epoch {len(rows)}</text>')
    marks += [line([pair[0] / most for pair in losses], left, "one"), line([p[1] / most for p in losses], left, "two")]
    marks.append(line([row[2] for row in rows], right, "two"))
    marks.append(f'<text x="{left}" y="{height + 28}">loss: learning, selection</text>')
    marks.append(f'<text x="{right}" y="{height + 28}">accuracy on the selection part</text>')
    return f"<h3>Training</h3>{_svg(right + width + 10, height + 40, 'Loss and accuracy by epoch', marks)}"


def _plain(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9


def _matrix(found: Seen) -> str:
    """What is shown down, what it was taken for across; or, of many classes, the most frequent confusions."""
    names = [_text(name) for name in found.classes]
    if len(names) > MOST_IN_MATRIX:
        most = sorted(found.wrong.items(), key=lambda one: -one[1])[:MOST_ROWS]
        rows = [(names[shows], names[taken], str(count)) for (shows, taken), count in most]
        return f"<h3>Most frequent confusions</h3>{_table(('shows', 'taken for', 'times'), rows)}"
    right = found.right
    lines = []
    for shows, name in enumerate(names):
        total = max(1, found.totals[shows])
        cells = [right[shows] if taken == shows else found.wrong.get((shows, taken), 0) for taken in range(len(names))]
        lines.append(
            f'<tr><th scope="row">{name}</th>'
            + "".join(_cell(n, n / total, taken == shows) for taken, n in enumerate(cells))
            + "</tr>"
        )
    heads = "".join(f'<th class="up" scope="col">{name}</th>' for name in names)
    note = '<p class="muted">A row is what pictures show, a column what they were taken for.</p>'
    return (
        f'<h3>Confusion matrix</h3>{note}<div class="wide"><table class="matrix"><tr><td></td>{heads}</tr>'
        f"{''.join(lines)}</table></div>"
    )


def _cell(count: int, share: float, right: bool) -> str:
    colour = "var(--good)" if right else "var(--bad)"
    shade = f' style="background:color-mix(in srgb,{colour} {55 * share:.0f}%,transparent)"' if count else ""
    return f"<td{shade}>{count or ''}</td>"


def _classes(found: Seen) -> str:
    rows = []
    for name, right, total in zip(found.classes, found.right, found.totals, strict=True):
        share = right / total if total else 0.0
        rows.append((share, (_text(name), _percent(share) if total else "–", f"{right} of {total}")))
    rows.sort(key=lambda row: row[0])
    shown = [row for _, row in rows[:MOST_ROWS]]
    left = f'<p class="muted">and {len(rows) - MOST_ROWS} more</p>' if len(rows) > MOST_ROWS else ""
    return f"<h3>Each class, the hardest first</h3>{_table(('class', 'right', 'pictures'), shown)}{left}"


def _mistakes(found: Seen) -> str:
    if not found.mistakes:
        more = "" if not found.wrong else " <code>--data TASK=FOLDER</code> shows them: a model keeps no pictures."
        return f'<h3>The surest mistakes</h3><p class="muted">{"None." if not found.wrong else ""}{more}</p>'
    return f'<h3>The surest mistakes</h3><div class="pictures">{"".join(map(_figure, found.mistakes))}</div>'


def _figure(one: Mistake) -> str:
    try:
        pixels = decode(one.file, (3, SIDE, SIDE)).permute(1, 2, 0).numpy()
    except Unreadable:
        return ""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    source = base64.b64encode(file.getvalue()).decode()
    name = _text(one.file.name)
    return (
        f'<figure><img alt="{name}" src="data:image/jpeg;base64,{source}"><figcaption>{name}: shows '
        f"<strong>{_text(one.shows)}</strong>, taken for {_text(one.taken_for)} ({_percent(one.sure)} sure)"
        "</figcaption></figure>"
    )


# Marks -------------------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{lines}</table></div>'


def _svg(width: int, height: float, title: str, marks: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" role="img">'
        f"<title>{title}</title>{''.join(marks)}</svg>"
    )


def _text(text: str) -> str:
    return escape(visible(text))


def _short(text: str) -> str:
    return text if len(text) <= 22 else f"{text[:21]}…"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _between(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:.0f} to {100 * interval[1]:.0f} %"


_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&])")


def card(model: Model, licence: str | None = None) -> str:
    """The text of a README.md for the folder of a model. Names of tasks and classes are text in it, never markup."""
    return f"---\n{_card_front(model, licence)}\n---\n\n{_card_body(model, licence)}"


def _card_front(model: Model, licence: str | None) -> str:
    """YAML by way of JSON values, which YAML reads: no name can end a value or begin a key."""
    fields: dict[str, Any] = {"license": licence} if licence else {}
    fields |= {
        "library_name": "zeroforget",
        "pipeline_tag": "image-classification",
        "tags": ["continual-learning", "image-classification", "zeroforget"],
        "model-index": [{"name": model.path.resolve().name, "results": [_result(task) for task in model.tasks]}],
    }
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in fields.items())


def _result(task: TaskFacts) -> dict[str, Any]:
    return {
        "task": {"type": "image-classification", "name": visible(task.name)},
        "dataset": {"type": "imagefolder", "name": visible(task.name), "revision": task.data.pixels},
        "metrics": [{"type": "accuracy", "name": "accuracy on the test part", "value": task.accuracy}]
        if task.measured
        else [],
    }


def _card_body(model: Model, licence: str | None) -> str:
    backbone, names = model.backbone, f"`{model.tasks[-1].name}`" if model.tasks else ""
    rows = ["| task | classes | accuracy (95 % interval) | test pictures | learned |", "|---|--:|--:|--:|---|"]
    rows += [_card_row(task) for task in model.tasks]
    prints = [f"- {_unmarked(task.name)}: `{task.data.pixels}`" for task in model.tasks]
    classes = [f"- **{_unmarked(task.name)}**: {', '.join(map(_unmarked, task.classes))}" for task in model.tasks]
    parts = [
        f"# {_unmarked(model.path.resolve().name)}",
        f"This model classifies {backbone.takes}. It learned {_tasks_in_words(model.tasks)} one after "
        "another, and no task changed an earlier one by a bit. Its network is "
        f"`{backbone.network}`, grown by zeroforget {__version__}.",
        "## Tasks",
        "\n".join(rows),
        "Accuracy is that of a test part which chose nothing.",
        "## Classes",
        "\n".join(classes),
        "## Use",
        "```sh\npip install zeroforget\nzeroforget predict . --task TASK picture.jpg\n```",
        f"TASK is one of the names above{f', such as {names}' if re.fullmatch(r'`[-.A-Za-z0-9]+`', names) else ''}.",
        "## Proofs",
        f"```sh\nzeroforget verify . --is {model.head}\n```",
        "This checks every file by its hash, every task's answers bit for bit, and every number of every network.",
        "Fingerprints of the test pictures, as they were decoded:",
        "\n".join(prints),
        "## Licence",
        _unmarked(licence) if licence else "None is stated. Ask whoever gave you this model.",
    ]
    return "\n\n".join(parts) + "\n"


def _card_row(task: TaskFacts) -> str:
    cells = (
        _unmarked(task.name),
        str(len(task.classes)),
        accuracy_of(task),
        str(task.data.held_out),
        task.learned[:10],
    )
    return f"| {' | '.join(cells)} |"


def _tasks_in_words(tasks: Iterable[TaskFacts]) -> str:
    number = len(list(tasks))
    return "1 task" if number == 1 else f"{number} tasks"


def _unmarked(name: str) -> str:
    return _MARKUP.sub(r"\\\1", visible(name)).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")
