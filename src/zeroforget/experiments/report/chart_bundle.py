"""The charts of one page: descriptions shared, data packed, everything safe inside a script element."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from typing import Any

from zeroforget.experiments.report import charts
from zeroforget.experiments.report.grouping import Row


def vegalite_version() -> str:
    """The Vega-Lite that the installed altair speaks, if vl-convert has it."""
    alt, convert = charts.need("altair"), charts.need("vl_convert")
    wanted = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    known = convert.get_vegalite_versions()
    return wanted if wanted in known else str(known[-1])


@dataclass
class Book:
    """Every chart that a page shows. `add` returns the element that will hold it."""

    style: charts.Style
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
        described = charts.described(chart)
        text = json.dumps(described, sort_keys=True)
        if text not in self._known:
            self._known[text] = len(self.specs)
            self.specs.append(described)
        self._made.append((chart, self._known[text]))
        return self._known[text]

    def script(self) -> str:
        """Data, the drawing library (once) and nothing that has to be fetched."""
        data = in_script({"specs": self.specs, "charts": self.charts})
        library = _library(vegalite_version())
        return f'<script type="application/json" id="report">{data}</script>\n<script type="module">{library}</script>'


@cache
def _library(version: str) -> str:
    made: str = charts.need("vl_convert").javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
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


def escaped(value: Any) -> str:
    """Any value as text of the page."""
    return escape(str(value))
