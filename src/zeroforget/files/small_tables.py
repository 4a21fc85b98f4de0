"""Small tables as plain text and as HTML: what `print` and a notebook show of a network, a model and its tasks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from zeroforget.files.signs import visible


@dataclass(frozen=True)
class SmallTable:
    """A title, a heading for each column and rows of text; all columns but the first are set to the right."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [tuple(map(visible, line)) for line in (self.headings, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        out = [visible(self.title)] if self.title else []
        for first, *others in lines if self.rows else ():
            cells = [
                first.ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
            ]
            out.append("  ".join(cells).rstrip())
        return "\n".join(out)

    def to_html(self) -> str:
        """A table for a notebook; names are escaped."""
        head = "".join(f"<th>{_safe(cell)}</th>" for cell in self.headings)
        body = "".join(f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        caption = f"<caption>{_safe(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _safe(text: str) -> str:
    return html.escape(visible(text))
