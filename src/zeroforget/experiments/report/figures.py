"""The same charts as files for a paper: SVG, PNG or PDF, in light colours, each with its legend."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroforget.experiments.disk import room_for
from zeroforget.experiments.report import charts
from zeroforget.experiments.report import grouping as gather
from zeroforget.experiments.report.charts import vegalite_version
from zeroforget.experiments.report.grouping import Group, Row
from zeroforget.experiments.report.growth import Drawing, Growth
from zeroforget.experiments.report.theme import Theme, resolve, theme
from zeroforget.experiments.results import Results

FORMATS = ("svg", "png", "pdf")
_PNG_SCALE = 3.0
_COLUMNS = 3


@dataclass(frozen=True)
class Figure:
    """A name for its file, and the picture as SVG text."""

    name: str
    svg: str

    def data(self, kind: str) -> bytes:
        """The picture as a file of this format."""
        convert = charts.need("vl_convert")
        if kind == "svg":
            return self.svg.encode()
        made: bytes = convert.svg_to_png(self.svg, scale=_PNG_SCALE) if kind == "png" else convert.svg_to_pdf(self.svg)
        return made


def write_figures(runs: Sequence[Results], folder: Path, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Write every chart of the report as files; returns their paths."""
    formats = known_formats(formats)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in figures(runs):
        for kind in formats:
            path = folder / f"{figure.name}.{kind}"
            with room_for(path):
                path.write_bytes(figure.data(kind))
            paths.append(path)
    return paths


def known_formats(names: Sequence[str]) -> list[str]:
    """The names of formats, cleaned; ValueError for one that does not exist."""
    formats = [name.strip().lower() for name in names]
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"no figure format '{unknown[0]}'; there are {', '.join(FORMATS)}")
    return formats


def figures(runs: Sequence[Results]) -> Iterator[Figure]:
    """Every chart of the report, one at a time."""
    found = gather.groups(runs)
    style = charts.Style(tuple(gather.labels(found)), standalone=True)
    taken: set[str] = set()
    for group in found:
        colours = theme(births=len(group.tasks))
        for name, svg in _of_group(group, style, colours):
            slug = _slug(f"{group.title}-{name}")
            while slug in taken:
                slug += "-2"
            taken.add(slug)
            yield Figure(slug, svg)


def _of_group(group: Group, style: charts.Style, colours: Theme) -> Iterator[tuple[str, str]]:
    where = group.title

    def svg(chart: Any, rows: Sequence[Row], title: str) -> str:
        return _svg(chart, rows, f"{title} · {where}", colours)

    count = len(group.tasks)
    rows = gather.averages(group)
    yield "accuracy", svg(charts.accuracy(style, count, gather.lowest([rows])), rows, "Average accuracy")
    each = [gather.of_task(group, k) for k in range(count)]
    small = charts.accuracy(style, count, gather.lowest(each), height=130, y_title="accuracy (%)")
    yield "tasks", _panels(small, each, group, f"Accuracy on each task · {where}", colours)
    for entry in group.entries:
        heat = charts.matrix(style, count)
        yield f"matrix-{entry.label}", svg(heat, gather.matrix(group, entry), f"Accuracy of {entry.label}")
    for kind, title in (("inference", "Overhead to serve"), ("training", "Overhead to learn")):
        if rows := gather.overheads(group, kind):
            yield f"overhead-{kind}", svg(charts.overhead(style, rows, count, gather.network_bytes(group)), rows, title)
    for label, widths in gather.grown(group):
        growth = Growth(widths, group.tasks)
        yield f"growth-{label}", Drawing(growth, "g").figure(colours, f"Growth of {label} · {where}")
        bars = charts.layers(style, list(widths), count)
        yield f"layers-{label}", svg(bars, growth.rows(), f"Layers of {label}")
    for quantity, title in charts.QUANTITIES.items():
        each = [gather.curves(group, k, quantity) for k in range(count)]
        if any(each):
            name = f"curves-{quantity.replace('_', '-')}"
            yield (
                name,
                _panels(
                    charts.curves(style, quantity, gather.lowest(each)),
                    each,
                    group,
                    f"{title.capitalize()} · {where}",
                    colours,
                ),
            )


def _svg(chart: Any, rows: Sequence[Row], title: str, colours: Theme) -> str:
    convert = charts.need("vl_convert")
    spec = resolve(charts.described(chart, title), colours | {"font": "sans-serif"})
    spec["datasets"] = spec.get("datasets", {}) | {charts.ROWS: list(rows)}
    made: str = convert.vegalite_to_svg(spec, vl_version=vegalite_version())
    return made


def _panels(chart: Any, each: Sequence[Sequence[Row]], group: Group, title: str, colours: Theme) -> str:
    """One small chart for each task, side by side in one picture."""
    alt = charts.need("altair")
    names = [f"{k + 1} {task}" for k, task in enumerate(group.tasks)]
    rows = [row | {"panel": name} for name, part in zip(names, each, strict=True) for row in part]
    panel = alt.Facet("panel:N", sort=names, title=None)
    faceted = chart.properties(width=200).facet(facet=panel, columns=_COLUMNS)
    return _svg(faceted, rows, title, colours)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
