"""Pictures for the docs, as SVG that is the same letter by letter for the same results, light or dark as its reader."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from zeroforget.experiments import costs as spending
from zeroforget.experiments import overheads as counted
from zeroforget.experiments import paper, tables
from zeroforget.experiments.report import growth as drawing
from zeroforget.experiments.report.theme import DARK, LIGHT, METHODS_DARK, METHODS_LIGHT, theme
from zeroforget.experiments.results import Results, mean

WIDTH = 720
ROW = 24
Runs = Sequence[Results]


class Lacking(ValueError):
    """The results do not hold what the picture is of."""


@dataclass(frozen=True)
class Scale:
    """From values to pixels, with round numbers to mark."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50) if (self.high - self.low) / s <= 8)
        first = math.ceil(self.low / step)
        return [step * k for k in range(first, math.floor(self.high / step) + 1)]


def fitted(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale that holds all values (per cent) with a little room."""
    low, high = min(values), max(values)
    room = max(1.0, 0.08 * (high - low))
    return Scale(max(0.0, low - room), min(100.0, high + room), start, end)


# The marks ---------------------------------------------------------------------------------------------------------


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words, in the middle of a line at y."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def dot(x: float, y: float, kind: str) -> str:
    """A filled circle."""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'


def ring(x: float, y: float) -> str:
    """A hollow diamond: the paper's figure."""
    return (
        f'<path class="theirs" d="M{x - 6:.1f} {y:.1f}L{x:.1f} {y - 6:.1f}L{x + 6:.1f} {y:.1f}L{x:.1f} {y + 6:.1f}Z"/>'
    )


def _style() -> str:
    def rules(theme: dict[str, str], hues: Sequence[str]) -> str:
        each = "".join(f".m{i}{{fill:{hue}}}.l{i}{{stroke:{hue}}}" for i, hue in enumerate(hues))
        return (
            f"text{{fill:{theme['ink']}}}.quiet{{fill:{theme['muted']}}}.grid{{stroke:{theme['grid']}}}"
            f".span{{stroke:{theme['muted']}}}.theirs{{fill:none;stroke:{theme['muted']};stroke-width:1.5}}"
            f".page{{fill:{theme['paper']}}}{each}"
        )

    shared = "text{font:13px system-ui,sans-serif}.strong{font-weight:700}.span{stroke-width:2}"
    curves = "polyline{fill:none;stroke-width:2}"
    dark = f"@media(prefers-color-scheme:dark){{{rules(DARK, METHODS_DARK)}}}"
    return f"<style>{shared}{curves}{rules(LIGHT, METHODS_LIGHT)}{dark}</style>"


def svg(height: float, title: str, marks: Sequence[str]) -> str:
    """A whole picture; the title is what a screen reader says."""
    box = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img"><title>{escape(title)}</title>'
    page = f'<rect class="page" width="{WIDTH}" height="{height:.0f}"/>'
    return "\n".join([head, _style(), page, *marks, "</svg>", ""])


def _across(scale: Scale, top: float, bottom: float) -> list[str]:
    """Upright lines at round values, with their figures below."""
    marks = []
    for tick in scale.ticks:
        marks += [line(scale(tick), top, scale(tick), bottom, "grid")]
        marks += [text(scale(tick), bottom + 14, f"{tick:g} %", "quiet", "middle")]
    return marks


# The pictures ------------------------------------------------------------------------------------------------------


def averages(runs: Runs) -> str:
    """The average accuracy of every method, best first, its spread over seeds, and the paper's figure if it has one."""
    (table,) = tables.tables(runs)
    printed = paper.comparable(runs[0].scenario, len(runs[0].tasks))
    rows = sorted(table.rows, key=lambda row: -row.average.accuracy)
    theirs = {row.method: row.average for row in printed.rows} if printed else {}
    values = [row.average.accuracy + side * (row.average.spread or 0) for row in rows for side in (-1, 1)]
    values += [theirs[row.method] for row in rows if row.method in theirs]
    scale = fitted(values, 190, WIDTH - 70)
    bottom = 10 + ROW * len(rows)
    marks = _across(scale, 10, bottom)
    for place, row in enumerate(rows):
        y, cell, x = 10 + ROW * (place + 0.5), row.average, scale(row.average.accuracy)
        ours = row.method.startswith("tfm")
        kind = "m1" if ours else "quiet" if row.method in tables.UPPER_BOUNDS else "m0"
        marks.append(text(180, y, row.title, "strong" if ours else "", "end"))
        if cell.spread:
            marks.append(line(scale(cell.accuracy - cell.spread), y, scale(cell.accuracy + cell.spread), y, "span"))
        if row.method in theirs:
            marks.append(ring(scale(theirs[row.method]), y))
        marks += [dot(x, y, kind), text(WIDTH - 60, y, f"{cell.accuracy:.1f}", "strong" if cell.best else "")]
    if any(row.method in theirs for row in rows):
        marks += [ring(196, bottom + 34), text(208, bottom + 34, "the paper's figure", "quiet")]
        bottom += 22
    return svg(bottom + 28, f"Average accuracy of each method on {runs[0].scenario}", marks)


def course(runs: Runs) -> str:
    """The mean accuracy over the tasks learned so far, after each task; methods that were not trained in turn are left
    out, and of more than eight those stay that the story needs."""
    (table,) = tables.tables(runs)
    found = [each for each in tables.by_method(runs) if all(each[0].trained)]
    story = ("tfm", "tfm-early-70", "joint", "packnet", "hat", "lwf", "ewc", "finetuning", "freezing")
    chosen = sorted(found, key=lambda each: story.index(each[0].method) if each[0].method in story else len(story))[:8]
    curves = {tables.TITLES.get(e[0].method, e[0].method): _mean_course(e) for e in chosen}
    count = len(table.tasks)
    scale = fitted([v for curve in curves.values() for v in curve], 330, 20)
    step = (WIDTH - 60 - 170) / max(1, count - 1)
    marks = [line(60, scale(t), WIDTH - 170, scale(t), "grid") for t in scale.ticks]
    marks += [text(52, scale(t), f"{t:g} %", "quiet", "end") for t in scale.ticks]
    marks += [text(60 + k * step, 350, str(k + 1), "quiet", "middle") for k in range(count)]
    marks.append(text(60 + (count - 1) * step / 2, 372, "tasks learned", "quiet", "middle"))
    ends = _apart([scale(curve[-1]) for curve in curves.values()])
    hues = [1, 0, *range(2, 8)]  # TFM, the first, has the hue that it has in every picture
    for number, (title, curve), end in zip(hues, curves.items(), ends, strict=False):
        points = [(60 + k * step, scale(value)) for k, value in enumerate(curve)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f'<polyline class="l{number}" points="{path}"/>')
        marks += [line(*points[-1], WIDTH - 146, end, f"l{number}"), dot(*points[-1], f"m{number}")]
        marks.append(text(WIDTH - 142, end, f"{title} {curve[-1]:.1f}"))
    return svg(386, f"Mean accuracy over the tasks so far on {runs[0].scenario}", marks)


def memory(runs: Runs) -> str:
    """Each task's accuracy from the day it was learned on: by the best TFM, and by fine-tuning, side by side."""
    found = {each[0].method: each for each in tables.by_method(runs)}
    growing = [method for method in found if method.startswith("tfm")]
    if not growing or "finetuning" not in found:
        raise Lacking(f"`{runs[0].experiment}` lacks {'fine-tuning' if growing else 'TFM'}")
    best = max(growing, key=lambda method: mean([run.average for run in found[method]]))
    titles = {best: "zeroforget: old tasks stay", "finetuning": "fine-tuning: old tasks fade"}
    marks, scale = [], Scale(0, 100, 330, 62)
    for place, (method, title) in enumerate(titles.items()):
        left, count = 60 + 340 * place, len(runs[0].tasks)
        step = 300 / max(1, count - 1)
        marks += [line(left, scale(t), left + 300, scale(t), "grid") for t in scale.ticks]
        marks += [text(left - 8, scale(t), f"{t:g} %", "quiet", "end") for t in scale.ticks if place == 0]
        marks += [text(left + k * step, 350, str(k + 1), "quiet", "middle") for k in range(count)]
        for task in range(count):
            values = [100 * mean([run.accuracy[k][task] for run in found[method]]) for k in range(task, count)]
            points = [(left + (task + k) * step, scale(value)) for k, value in enumerate(values)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            marks += [f'<polyline class="l{1 - place}" points="{path}"/>', dot(*points[0], f"m{1 - place}")]
        average = 100 * mean([run.average for run in found[method]])
        marks.append(text(left, 20, title, "strong"))
        marks.append(text(left, 40, f"{average:.1f} % on average after all {count} tasks", "quiet"))
        marks.append(text(left + 150, 372, "tasks learned", "quiet", "middle"))
    return svg(386, f"Accuracy of every task on {runs[0].scenario}, by zeroforget and by fine-tuning", marks)


def growth(runs: Runs) -> str:
    """Which features each task brought, and what they are connected with: the paper's figure S1."""
    growing = [run for run in runs if run.growth]
    run = next((run for run in growing if run.method == "tfm"), next(iter(growing), None))
    if run is None:
        raise Lacking(f"`{runs[0].experiment}` has no method whose network grows")
    title = f"How {run.network} grew on {run.scenario}, task by task"
    figure = drawing.Drawing(drawing.Growth(run.growth, [task["name"] for task in run.tasks]), "g").figure(
        theme(births=len(run.tasks)), title
    )
    return figure.replace("<style>", f"<title>{title}</title><style>", 1)


OVERHEADS = ("imm-mode", "ewc", "lwf", "packnet", "pnn", "lean", "hat", "tfm")
"""The methods of the picture of overheads: those whose curves differ."""


def overheads(network: str, tasks: int) -> str:
    """What methods keep beside a network while they learn, after each of so many tasks: the paper's Figure 1.

    Counted from shapes alone, without results.
    """
    found = {cost.method: cost for cost in counted.costs(network, tasks, methods=OVERHEADS)}
    curves = {  # a method that keeps nothing yet has no point
        name: {k: math.log10(bits / 8) for k, bits in enumerate(found[name].training) if bits} for name in OVERHEADS
    }
    size = math.log10(4 * counted.measured(network)[2].weights)
    values = [size, *(value for curve in curves.values() for value in curve.values())]
    upward = Scale(min(values) - 0.1, max(values) + 0.1, 330, 20)
    step = (WIDTH - 70 - 190) / max(1, tasks - 1)
    marks = []
    for power in range(math.ceil(upward.low), math.floor(upward.high) + 1):
        marks += [line(70, upward(power), WIDTH - 190, upward(power), "grid")]
        marks.append(text(62, upward(power), _unit(10.0**power, "B"), "quiet", "end"))
    marks += [
        line(70, upward(size), WIDTH - 190, upward(size), "span"),
        text(76, upward(size) + 10, "the network", "quiet"),
    ]
    marks += [text(70 + k * step, 350, str(k + 1), "quiet", "middle") for k in range(tasks)]
    marks.append(text(70 + (tasks - 1) * step / 2, 372, "tasks learned", "quiet", "middle"))
    ends = _apart([upward(curve[tasks - 1]) for curve in curves.values()])
    for hue, (name, curve), end in zip([0, 2, 3, 4, 5, 6, 7, 1], curves.items(), ends, strict=True):
        points = [(70 + k * step, upward(value)) for k, value in curve.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks += [f'<polyline class="l{hue}" points="{path}"/>', line(*points[-1], WIDTH - 166, end, f"l{hue}")]
        marks += [dot(*points[-1], f"m{hue}")]
        title = tables.TITLES.get(name, name)
        marks.append(text(WIDTH - 162, end, f"{title} {_unit(float(f'{10 ** curve[tasks - 1]:.2g}'), 'B')}"))
    return svg(386, f"Bytes kept beside {network} to learn the next task", marks)


def _mean_course(runs: Runs) -> list[float]:
    return [100 * mean(values) for values in zip(*(r.averages for r in runs), strict=True)]


def _apart(places: Sequence[float], least: float = 16.0) -> list[float]:
    """The same heights, moved down where two labels would lie upon each other, then up where they left the picture."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    out = list(places)
    for one, other in itertools.pairwise(order):
        out[other] = max(out[other], out[one] + least)
    limit = 344.0
    for one in reversed(order):
        out[one] = min(out[one], limit)
        limit = out[one] - least
    return out


def distance(*files: Runs) -> str:
    """How far zero forgetting is from joint training on all data, a row for each experiment."""
    rows = [(runs[0].experiment or runs[0].scenario, *_ends(runs)) for runs in files]
    scale = fitted([v for _, *pair in rows for v in pair], 250, WIDTH - 100)
    bottom = 10 + 34 * len(rows)
    marks = _across(scale, 10, bottom)
    for place, (name, ours, joint) in enumerate(rows):
        y = 10 + 34 * (place + 0.5)
        marks += [text(240, y, name, "", "end"), line(scale(ours), y, scale(joint), y, "span")]
        marks += [dot(scale(ours), y, "m1"), dot(scale(joint), y, "quiet")]
        marks.append(text(WIDTH - 90, y, f"{joint - ours:.1f} points", "strong"))
    legend = bottom + 34
    marks += [dot(256, legend, "m1"), text(268, legend, "TFM, zero forgetting", "quiet")]
    marks += [dot(420, legend, "quiet"), text(432, legend, "joint, all data", "quiet")]
    return svg(bottom + 50, "Distance from TFM to joint training", marks)


def _ends(runs: Runs) -> tuple[float, float]:
    """The best average of TFM and the best of joint training."""
    (table,) = tables.tables(runs)
    joint = [row.average.accuracy for row in table.rows if row.method in ("joint", "joint-scratch")]
    ours = [row.average.accuracy for row in table.rows if row.method.startswith("tfm")]
    if not joint or not ours:
        raise Lacking(f"`{runs[0].experiment or runs[0].scenario}` lacks {'TFM' if joint else 'joint training'}")
    return max(ours), max(joint)


def kept(runs: Runs) -> str:
    """Average accuracy against the bytes of all that must be kept."""
    costs = {cost.method: cost.everything / 8 for cost in spending.costs(runs).rows}
    return _against(runs, costs, "bytes kept: network, heads, and all that serving needs beside them", "B")


def work(runs: Runs) -> str:
    """Average accuracy against the operations of training."""
    costs = {cost.method: cost.learning for cost in spending.costs(runs).rows}
    if lacking := [method for method, cost in costs.items() if not cost]:
        raise Lacking(f"the operations of {', '.join(lacking)} were not counted")
    return _against(runs, {method: cost or 0.0 for method, cost in costs.items()}, "training operations", "")


def _against(runs: Runs, costs: dict[str, float], axis: str, unit: str) -> str:
    """Each method a point; costs on a scale of powers of ten."""
    (table,) = tables.tables(runs)
    points = [(row, math.log10(costs[row.method]), row.average.accuracy) for row in table.rows]
    low, high = (end(cost for _, cost, _ in points) for end in (min, max))
    across = Scale(low - 0.05 * (high - low) - 0.02, high + 0.25 * (high - low) + 0.08, 60, WIDTH - 20)
    upward = fitted([accuracy for *_, accuracy in points], 330, 20)
    marks = [line(60, upward(tick), WIDTH - 20, upward(tick), "grid") for tick in upward.ticks]
    marks += [text(52, upward(tick), f"{tick:g} %", "quiet", "end") for tick in upward.ticks]
    for value in _ticks(across):
        place = across(math.log10(value))
        marks += [line(place, 20, place, 330, "grid"), text(place, 350, _unit(value, unit), "quiet", "middle")]
    marks.append(text((60 + WIDTH - 20) / 2, 372, axis, "quiet", "middle"))
    labels = _apart([upward(accuracy) for *_, accuracy in points], 12.0)
    for (row, cost, accuracy), y in zip(points, labels, strict=True):
        ours = row.method.startswith("tfm")
        kind = "m1" if ours else "quiet" if row.method in tables.UPPER_BOUNDS else "m0"
        marks += [dot(across(cost), upward(accuracy), kind)]
        marks.append(text(across(cost) + 9, y, row.title, "strong" if ours else ""))
    return svg(386, f"Average accuracy against {axis.partition(':')[0]} on {runs[0].scenario}", marks)


def _ticks(scale: Scale) -> list[float]:
    """Round values on a scale of powers of ten: at least two, where fine steps give as many."""
    found: list[float] = []
    for tenths in ((10, 20, 50), range(10, 100, 10), range(10, 100, 2)):
        powers = range(math.floor(scale.low), math.ceil(scale.high) + 1)
        values = [tenth * 10.0**power / 10 for power in powers for tenth in tenths]
        found = [value for value in values if scale.low <= math.log10(value) <= scale.high]
        if len(found) > 1:
            break
    return found


def _unit(value: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g} {prefix}{unit}"
    return f"{value:g} {unit}"


PICTURES: dict[str, Callable[..., str]] = {
    **{"averages": averages, "course": course, "distance": distance},
    **{"growth": growth, "kept": kept, "memory": memory, "work": work},
}
