"""Colours, once: charts name them as tokens, and the page (light or dark) or a figure's file puts values in."""

from __future__ import annotations

import json
import re
from typing import Any

Theme = dict[str, str]

LIGHT: Theme = {
    "paper": "#ffffff",
    "panel": "#f5f7f9",
    "ink": "#1b2127",
    "muted": "#525d69",
    "grid": "#d9dfe5",
    "link": "#0b5cad",
    "good": "#0b6b3a",
    "bad": "#a3341c",
    # Black and white are equally readable on heat-2: cells change the colour of their text there, at two thirds.
    "heat-0": "#f2f5f8",
    "heat-1": "#9dc3e2",
    "heat-2": "#3979b0",
    "heat-3": "#0b3c6b",
    "heat-ink-low": "#000000",
    "heat-ink-high": "#ffffff",
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif",
}
DARK: Theme = LIGHT | {
    "paper": "#15181d",
    "panel": "#1e2329",
    "ink": "#e8ecf0",
    "muted": "#a6b1bc",
    "grid": "#39424c",
    "link": "#7fbcff",
    "good": "#6fd39b",
    "bad": "#ff9c85",
    "heat-0": "#222a33",
    "heat-1": "#264c6e",
    "heat-2": "#3979b0",
    "heat-3": "#cfe8fb",
    "heat-ink-low": "#ffffff",
    "heat-ink-high": "#000000",
}

# Eight hues that stay apart (ΔE of 20 and more) for readers with protanopia, deuteranopia and tritanopia, each with a
# contrast of 3 or more to the paper. A ninth method starts again with the first hue, a dashed line and another shape.
METHODS_LIGHT = ("#316ea4", "#d36203", "#105733", "#823866", "#63490a", "#a46ce8", "#229bab", "#c36f70")
METHODS_DARK = ("#6eaff5", "#f2741f", "#458753", "#bb498f", "#f8e22a", "#8762ee", "#79f7fc", "#ffaea6")
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
DASHES = ([1, 0], [6, 3], [2, 3], [8, 3, 2, 3])

# Births are ordered, and so is the ramp that shows them (viridis, less the end that would vanish in the paper).
_VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")


def theme(*, dark: bool = False, births: int = 0) -> Theme:
    """Every token's value; `births` tasks have a colour each."""
    hues = METHODS_DARK if dark else METHODS_LIGHT
    low, high = (0.38, 1.0) if dark else (0.0, 0.72)
    ramp = [_ramp(low + (high - low) * i / max(1, births - 1)) for i in range(births)]
    tokens = {f"method-{i}": hue for i, hue in enumerate(hues)} | {f"birth-{i}": hue for i, hue in enumerate(ramp)}
    return (DARK if dark else LIGHT) | tokens


def token(name: str) -> str:
    """How a chart's description names a colour that the theme decides."""
    return f"theme({name})"


def method_token(index: int) -> str:
    """The colour of the report's method number `index`."""
    return token(f"method-{index % len(METHODS_LIGHT)}")


def dash(index: int) -> list[int]:
    """The dashes of the report's method number `index`: solid until hues repeat."""
    return list(DASHES[index // len(METHODS_LIGHT) % len(DASHES)])


def resolve(spec: dict[str, Any], values: Theme) -> dict[str, Any]:
    """The description with every token replaced by its value."""
    text = re.sub(r'"theme\(([a-z0-9-]+)\)"', lambda found: json.dumps(values[found[1]]), json.dumps(spec))
    resolved: dict[str, Any] = json.loads(text)
    return resolved


def variables(values: Theme) -> str:
    """The theme as CSS custom properties."""
    return "".join(f"--{name}:{value};" for name, value in values.items())


def _ramp(where: float) -> str:
    place = where * (len(_VIRIDIS) - 1)
    left = min(int(place), len(_VIRIDIS) - 2)
    share = place - left
    mixed = (
        round((1 - share) * int(_VIRIDIS[left][i : i + 2], 16) + share * int(_VIRIDIS[left + 1][i : i + 2], 16))
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)
