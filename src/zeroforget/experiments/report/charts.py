"""The charts, described once with altair: a page draws them from one bundle, in which nothing can break out of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from zeroforget.experiments.report.grouping import Row
from zeroforget.experiments.report.theme import SHAPES, dash, method_token, token

ROWS = "rows"
"""The name of a chart's data set: descriptions are shared between charts, data are not."""
FIGURE_WIDTH = 420
HEAT_TURN = 200 / 3
"""Above this percentage, text on a heat map changes its colour."""
QUANTITIES = {
    "val_accuracy": "validation accuracy (%)",
    "val_loss": "validation loss",
    "loss": "training loss",
}


def need(name: str) -> ModuleType:
    """An optional module, or an error that says how to get it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"reports and figures need '{name}', the extra 'report' of zeroforget: pip install altair vl-convert-python"
        ) from error


@dataclass(frozen=True)
class Style:
    """What all charts of a report share: its methods in order, and whether a chart carries its own legend and size."""

    methods: tuple[str, ...]
    standalone: bool = False

    @property
    def size(self) -> int | str:
        """A figure has a width; on the page, the box decides."""
        return FIGURE_WIDTH if self.standalone else "container"

    def method(self, shown: str) -> Any:
        """The encoding of the method as 'color', 'shape' or 'strokeDash'."""
        alt = need("altair")
        numbers = range(len(self.methods))
        channel, values = {
            "color": (alt.Color, [method_token(i) for i in numbers]),
            "shape": (alt.Shape, [SHAPES[i % len(SHAPES)] for i in numbers]),
            "strokeDash": (alt.StrokeDash, [dash(i) for i in numbers]),
        }[shown]
        legend = alt.Legend(title="method", symbolSize=70, labelLimit=260) if self.standalone else None
        scale = alt.Scale(domain=list(self.methods), range=values)
        return channel("method:N", sort=None, scale=scale, legend=legend)


def accuracy(
    style: Style, tasks: int, lowest: float, *, height: int = 260, y_title: str = "average accuracy (%)"
) -> Any:
    """Lines over the number of tasks learned, with the seeds' standard deviation as a band."""
    alt = need("altair")
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(x=_after(alt, tasks))
    scale = _percent_scale(alt, lowest)
    y = _y(alt, "value:Q", y_title, scale, ticks=height // 40)
    low = alt.Y("low:Q", scale=scale, title=y_title)
    band = base.mark_area(opacity=0.18, clip=True).encode(y=low, y2="high:Q", color=style.method("color"))
    line, points = _lines(base, style, y, [*_who(alt), *_percent(alt)])
    return _finish(alt.layer(band, line, points), style, height)


def matrix(style: Style, tasks: int) -> Any:
    """A heat map: the accuracy on each task (columns) after each task (rows)."""
    alt = need("altair")
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(
        x=alt.X("k:O", title="accuracy on task", axis=alt.Axis(labelAngle=0, domain=False, ticks=False)),
        y=alt.Y("t:O", title="after task", axis=alt.Axis(domain=False, ticks=False, titlePadding=10)),
        tooltip=[
            alt.Tooltip("task:N", title="accuracy on"),
            alt.Tooltip("after:N", title="after"),
            alt.Tooltip("value:Q", title="%", format=".2f"),
        ],
    )
    ramp = alt.Scale(domain=[0, 100], range=[token(f"heat-{i}") for i in range(4)])
    legend = alt.Legend(title="%", gradientLength=120) if style.standalone else None
    cells = base.mark_rect(stroke=token("paper"), strokeWidth=1).encode(
        color=alt.Color("value:Q", scale=ramp, legend=legend)
    )
    ink = alt.condition(
        f"datum.value > {HEAT_TURN}", alt.value(token("heat-ink-high")), alt.value(token("heat-ink-low"))
    )
    size, digits = (11, ".1f") if tasks <= 6 else (10, ".0f")
    texts = base.mark_text(fontSize=size).encode(text=alt.Text("value:Q", format=digits), color=ink)
    layers = [cells, texts] if tasks <= 12 else [cells]
    chart = alt.layer(*layers)
    return _finish(chart, style, max(24 * tasks, 120), width=30 * tasks + 60 if style.standalone else None)


def overhead(style: Style, rows: Sequence[Row], tasks: int, network: float) -> Any:
    """Bytes beside the network over the number of tasks, in log scale, with the network's own size as a rule."""
    alt = need("altair")
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(x=_after(alt, tasks))
    sizes = [row["value"] for row in rows] + [network]
    powers = [10**p for p in range(math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes))) + 1)]
    axis = alt.Axis(values=powers, labelExpr=r"replace(format(datum.value, '~s'), /([kMGT]?)$/, ' $1B')")
    scale = alt.Scale(type="log", domain=[powers[0], powers[-1]])
    y = alt.Y("value:Q", title="memory overhead (bytes, log scale)", scale=scale, axis=axis)
    shown = alt.Tooltip("value:Q", title="bytes", format=",.0f")
    line, points = _lines(base, style, y, [*_who(alt), shown])
    itself = alt.Chart(alt.InlineData(values=[{"value": network, "text": "the network itself"}])).encode(y="value:Q")
    rule = itself.mark_rule(strokeDash=[4, 4], color=token("muted"))
    text = itself.mark_text(align="left", x=6, dy=-7, fontSize=11, color=token("muted")).encode(text="text:N")
    return _finish(alt.layer(rule, text, line, points), style, 280)


def curves(style: Style, quantity: str, lowest: float) -> Any:
    """One quantity over the epochs of one task; a mark where the weights were kept."""
    alt = need("altair")
    epoch = alt.X("epoch:Q", title="epoch", axis=alt.Axis(tickMinStep=1, format="d", grid=False))
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(x=epoch)
    scale = _percent_scale(alt, lowest) if quantity == "val_accuracy" else alt.Scale(zero=False)
    y = _y(alt, "value:Q", QUANTITIES[quantity], scale)
    tooltip = [
        alt.Tooltip("method:N"),
        alt.Tooltip("epoch:Q", title="kept epoch"),
        alt.Tooltip("value:Q", title=QUANTITIES[quantity], format=".4~f"),
    ]
    line, points = _lines(base, style, y, tooltip)
    return _finish(alt.layer(line, points.transform_filter("datum.kept")), style, 190)


def layers(style: Style, axes: Sequence[str], tasks: int) -> Any:
    """The width of each layer, in blocks coloured by the task that its features were born with."""
    alt = need("altair")
    ramp = alt.Scale(domain=list(range(1, tasks + 1)), range=[token(f"birth-{i}") for i in range(tasks)])
    legend = alt.Legend(title="born with task") if style.standalone else None
    chart = (
        alt.Chart(alt.NamedData(name=ROWS))
        .mark_bar(stroke=token("paper"), strokeWidth=0.6)
        .encode(
            x=alt.X("features:Q", title="features", axis=alt.Axis(tickMinStep=1, tickCount=6)),
            y=alt.Y("axis:N", title=None, sort=list(axes), axis=alt.Axis(labelLimit=110, ticks=False)),
            color=alt.Color("birth:O", scale=ramp, legend=legend),
            order="birth:Q",
            tooltip=[
                alt.Tooltip("axis:N", title="layer"),
                alt.Tooltip("task:N", title="born with"),
                alt.Tooltip("features:Q", title="features", format=",d"),
            ],
        )
    )
    return _finish(chart, style, max(22 * len(axes), 70))


# Parts ---------------------------------------------------------------------------------------------------------


def _after(alt: ModuleType, tasks: int) -> Any:
    scale = alt.Scale(domain=list(range(1, tasks + 1)))
    return alt.X("after:O", title="tasks learned", scale=scale, axis=alt.Axis(labelAngle=0, grid=False))


def _percent_scale(alt: ModuleType, lowest: float) -> Any:
    """From the tens below the lowest value to 100: charts side by side get one scale, and use their height."""
    return alt.Scale(domain=[max(0, 10 * math.floor(min(lowest, 90) / 10)), 100])


def _y(alt: ModuleType, field: str, title: str, scale: Any, ticks: int = 5) -> Any:
    return alt.Y(field, title=title, scale=scale, axis=alt.Axis(tickCount=ticks))


def _who(alt: ModuleType) -> list[Any]:
    return [alt.Tooltip("method:N"), alt.Tooltip("name:N", title="after task")]


def _percent(alt: ModuleType) -> list[Any]:
    return [alt.Tooltip("value:Q", title="accuracy (%)", format=".2f"), alt.Tooltip("seeds:Q", title="seeds")]


def _lines(base: Any, style: Style, y: Any, tooltip: list[Any]) -> tuple[Any, Any]:
    line = base.mark_line(strokeWidth=2).encode(y=y, color=style.method("color"), strokeDash=style.method("strokeDash"))
    points = base.mark_point(filled=True, size=46, opacity=1).encode(
        y=y, color=style.method("color"), shape=style.method("shape"), tooltip=tooltip
    )
    return line, points


def _finish(chart: Any, style: Style, height: int, width: int | None = None) -> Any:
    return chart.properties(width=width or style.size, height=height)


def described(chart: Any, title: str = "") -> dict[str, Any]:
    """The chart as Vega-Lite, in the report's type and colours (still as tokens)."""
    ink, muted, grid = token("ink"), token("muted"), token("grid")
    titled = chart.properties(title=title) if title else chart
    spec: dict[str, Any] = titled.to_dict()
    spec["autosize"] = {"type": "fit-x", "contains": "padding"} if not title else {"type": "pad"}
    spec["config"] = {
        "background": token("paper") if title else None,
        "font": token("font"),
        "view": {"stroke": None},
        "title": {"color": ink, "fontSize": 14, "anchor": "start"},
        "header": {"labelColor": ink, "titleColor": ink},
        "axis": {
            "labelColor": muted,
            "titleColor": ink,
            "titleFontWeight": "normal",
            "labelFontSize": 11,
            "titleFontSize": 12,
            "gridColor": grid,
            "domainColor": muted,
            "tickColor": muted,
        },
        "legend": {"labelColor": ink, "titleColor": ink, "titleFontWeight": "normal", "symbolOpacity": 1},
    }
    return spec


def vegalite_version() -> str:
    """The Vega-Lite that the installed altair speaks, if vl-convert has it."""
    alt, convert = need("altair"), need("vl_convert")
    wanted = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    known = convert.get_vegalite_versions()
    return wanted if wanted in known else str(known[-1])


@dataclass
class Book:
    """Every chart that a page shows. `add` returns the element that will hold it."""

    style: Style
    specs: list[dict[str, Any]] = field(default_factory=list)
    charts: dict[str, dict[str, Any]] = field(default_factory=dict)
    _known: dict[str, int] = field(default_factory=dict)
    _made: list[tuple[Any, int]] = field(default_factory=list)

    def add(self, chart: Any, rows: Sequence[Row], description: str) -> str:
        """Keep a chart under a name of its own, which is returned."""
        name = f"c{len(self.charts)}"
        self.charts[name] = {"spec": self._spec(chart), "description": description, "data": packed(rows)}
        return name

    def box(self, name: str, height: int = 260) -> str:
        """The element in which the chart is drawn."""
        return f'<div class="chart" style="--h:{height}px" data-chart="{name}"></div>'

    def _spec(self, chart: Any) -> int:
        for known, number in self._made:  # small multiples share a chart, and altair's checks are slow
            if known is chart:
                return number
        spec = described(chart)
        text = json.dumps(spec, sort_keys=True)
        if text not in self._known:
            self._known[text] = len(self.specs)
            self.specs.append(spec)
        self._made.append((chart, self._known[text]))
        return self._known[text]

    def script(self) -> str:
        """Data, the drawing library (once) and nothing that has to be fetched."""
        data = in_script({"specs": self.specs, "charts": self.charts})
        library = _library(vegalite_version())
        return f'<script type="application/json" id="report">{data}</script>\n<script type="module">{library}</script>'


@cache
def _library(version: str) -> str:
    made: str = need("vl_convert").javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return made.replace("</script", "<\\/script")


def packed(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows as columns: figures to five digits, words once with the place of each row's word among them."""
    return {name: _column([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, str) for value in values):
        return [_short(value) for value in values]
    words = {word: place for place, word in enumerate(dict.fromkeys(values))}
    return {"words": list(words), "places": [words[value] for value in values]}


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def in_script(values: Any) -> str:
    """JSON that no name inside it can break out of: '</script>', '<!--' and line separators are escaped."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)  # pure ASCII, so U+2028 is escaped already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
