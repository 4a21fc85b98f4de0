"""A terminal that hidden signs cannot steer."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from zeroforget.files.text import LINES, visible


class Terminal(Console):
    """A console that shows hidden signs of whatever is printed as escapes, and passes only its own commands on."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """As the console does it, each text made visible."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(visible(one.text, keep=LINES), one.style)
