"""The growth of a network drawn as in the paper's figure S1: which features were born with each task, and which
connections between them are new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from zeroforget.experiments.report.grouping import Row
from zeroforget.experiments.report.theme import Theme

DOTS = 12
"""About how many dots a layer has at most; in wide layers a dot stands for several features."""
PITCH, RADIUS, TOP = 11, 4, 8

# The page's stylesheet has the same rules with variables for the colours.
RULES = (
    ".g-old{{stroke:{muted};stroke-width:.5;stroke-opacity:.3;fill:none}}.g-new{{stroke-width:.8;stroke-opacity:.75;fill:none}}"
    ".g-later{{fill:none;stroke:{muted};stroke-width:.8;stroke-dasharray:1.5 1.5}}"
    "text{{fill:{ink};font:10px sans-serif}}.g-count{{font-weight:600}}.g-head{{font-size:13px;font-weight:600}}"
)


@dataclass(frozen=True)
class Growth:
    """The widths of every layer after each task, layers in the network's order."""

    widths: Mapping[str, Sequence[int]]
    tasks: Sequence[str]

    def born(self, axis: str, t: int) -> int:
        """How many features of a layer were born with task t."""
        sizes = self.widths[axis]
        return sizes[t] - (sizes[t - 1] if t else 0)

    def features(self, t: int) -> int:
        """How many features were born with task t, over all layers."""
        return sum(self.born(axis, t) for axis in self.widths)

    def connections(self, t: int) -> int:
        """How many pairs of features in consecutive layers became connected with task t."""
        sizes = list(self.widths.values())
        pairs = list(pairwise(sizes))
        return sum(a[t] * b[t] - (a[t - 1] * b[t - 1] if t else 0) for a, b in pairs)

    def scale(self) -> str:
        """Which layers have dots for several features, and for how many; empty if none has."""
        several = [f"{count} in {axis}" for axis in self.widths if (count := self.per_dot(axis)) > 1]
        return f"features that a dot stands for: {', '.join(several)}" if several else ""

    def rows(self) -> list[Row]:
        """Layer, birth and number of features, for the chart of widths."""
        return [
            {"axis": axis, "birth": t + 1, "task": name, "features": self.born(axis, t)}
            for axis in self.widths
            for t, name in enumerate(self.tasks)
            if self.born(axis, t)
        ]

    def per_dot(self, axis: str) -> int:
        """How many features of this layer a dot stands for."""
        return max(1, -(-self.widths[axis][-1] // DOTS))

    def dots(self, axis: str) -> list[int]:
        """The birth of each dot, in order. Every birth that brought features has one at least."""
        count = self.per_dot(axis)
        born = [self.born(axis, t) for t in range(len(self.tasks))]
        return [t for t, features in enumerate(born) if features for _ in range(max(1, round(features / count)))]


@dataclass(frozen=True)
class Drawing:
    """One panel for each task. Lines and dots are written once, by birth, and used again by later panels."""

    growth: Growth
    name: str
    """Unique on the page: the prefix of the drawing's ids."""

    @property
    def columns(self) -> dict[str, list[int]]:
        """Layer → births of its dots."""
        return {axis: self.growth.dots(axis) for axis in self.growth.widths}

    @property
    def width(self) -> int:
        """Of one panel."""
        return self.left + 30 + self.step * (len(self.growth.widths) - 1)

    @property
    def _longest(self) -> int:
        return max(len(_short(axis)) for axis in self.growth.widths)

    @property
    def left(self) -> int:
        """Room left of the first column for its name, written aslant."""
        return max(24, round(4.3 * self._longest))

    @property
    def step(self) -> int:
        """From one layer to the next: few layers stand wide apart."""
        return min(80, max(40, 220 // max(1, len(self.growth.widths) - 1)))

    @property
    def foot(self) -> int:
        """Room below the dots for the longest name."""
        return 34 + round(4.3 * self._longest)

    @property
    def height(self) -> int:
        """Of one panel."""
        return TOP + PITCH * max(len(births) for births in self.columns.values()) + self.foot

    def panel(self, t: int) -> str:
        """The network while task t is learned: what existed in grey lines, what is new in its colour."""
        old = "".join(f'<use href="#{self.name}l{b}" class="g-old"/>' for b in range(t))
        new = f'<path id="{self.name}l{t}" d="{self._lines(t)}"/>'
        newborn = f'<g class="g-new g-s{t}">{new}</g>'
        dots = "".join(f'<use href="#{self.name}d{b}" class="g-f{b}"/>' for b in range(t))
        dots += f'<g class="g-f{t}"><g id="{self.name}d{t}">{self._dots(t)}</g></g>'
        later = "".join(self._dots(b) for b in range(t + 1, len(self.growth.tasks)))
        return f'{old}{newborn}<g class="g-later">{later}</g>{dots}{self._labels(t)}'

    def svg(self, t: int) -> str:
        """The panel as an element of the page."""
        said = f"Task {t + 1}, {self.growth.tasks[t]}: {self.told(t)}"
        return (
            f'<svg class="growth" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(said)}">{self.panel(t)}</svg>'
        )

    def told(self, t: int) -> str:
        """What task t added, in words."""
        return f"{self.growth.features(t):,} new features, {self.growth.connections(t):,} new connections"

    def figure(self, colours: Theme, title: str, across: int = 3) -> str:
        """All panels in one standalone SVG."""
        count = len(self.growth.tasks)
        across = min(across, count)
        wide, high = max(self.width, 230) + 24, self.height + 44
        births = "".join(
            f".g-f{b}{{fill:{colours[f'birth-{b}']}}}.g-s{b}{{stroke:{colours[f'birth-{b}']}}}" for b in range(count)
        )
        several = self.growth.scale()
        top = 52 if several else 36
        panels = "".join(
            f'<g transform="translate({12 + t % across * wide} {top + t // across * high})">'
            f'<text class="g-head" y="8">{t + 1} {escape(self.growth.tasks[t])}</text>'
            f'<text y="24">{self.told(t)}</text><g transform="translate(0 36)">{self.panel(t)}</g></g>'
            for t in range(count)
        )
        size = f'width="{across * wide}" height="{top + -(-count // across) * high}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{RULES.format(**colours)}{births}</style>'
            f'<rect width="100%" height="100%" fill="{colours["paper"]}"/>'
            f'<text class="g-head" x="12" y="20">{escape(title)}</text><text x="12" y="36">{escape(several)}</text>'
            f"{panels}</svg>"
        )

    def _spots(self, column: int, births: Sequence[int], birth: int) -> list[tuple[int, int]]:
        return [(self.left + self.step * column, TOP + PITCH * place) for place, b in enumerate(births) if b == birth]

    def _dots(self, birth: int) -> str:
        spots = [s for c, births in enumerate(self.columns.values()) for s in self._spots(c, births, birth)]
        return "".join(f'<circle cx="{x}" cy="{y}" r="{RADIUS}"/>' for x, y in spots)

    def _lines(self, birth: int) -> str:
        """The connections born with a task: birth(W[i, j]) = max(birth of i, birth of j)."""
        columns = list(self.columns.values())
        parts = []
        for c in range(len(columns) - 1):
            for i, a in enumerate(columns[c]):
                ends = [j for j, b in enumerate(columns[c + 1]) if max(a, b) == birth]
                x, y = self.left + self.step * c, TOP + PITCH * i
                parts += [f"M{x} {y}l{self.step} {PITCH * (j - i)}" for j in ends]
        return "".join(parts)

    def _labels(self, t: int) -> str:
        """Below each column how wide the layer is now, and its name."""
        y = self.height - self.foot + 10
        parts = []
        for c, (axis, sizes) in enumerate(self.growth.widths.items()):
            x = self.left + self.step * c
            name = escape(_short(axis))
            parts.append(
                f'<text class="g-count" x="{x}" y="{y}" text-anchor="middle">{sizes[t]:,}</text>'
                f'<text transform="translate({x + 4} {y + 11}) rotate(-45)" text-anchor="end">'
                f"<title>{escape(axis)}</title>{name}</text>"
            )
        return "".join(parts)


def _short(axis: str) -> str:
    return axis if len(axis) <= 14 else "…" + axis[-13:]
