"""Text for people: hidden signs shown as escapes, the word that was probably meant, and small tables."""

from __future__ import annotations

import difflib
import html
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BIDIRECTIONAL = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_HIDDEN = re.compile(f"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff{_BIDIRECTIONAL}]")
_IN_JSON = re.compile(_HIDDEN.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))
LINES = "\n"
"""The only control sign in what is printed."""
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The last four are full-width ones, which some spreadsheets take for the same."""


def visible(text: str, keep: str = "") -> str:
    """A text whose hidden signs are escaped as JSON escapes them, but for those to `keep` (line ends, say)."""
    return _HIDDEN.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def visible_json(text: str) -> str:
    """JSON text whose hidden signs are escaped: the same values, since these stand in its strings alone."""
    return _IN_JSON.sub(lambda found: _escape(found[0]), text)


def has_hidden(text: str) -> bool:
    """Whether there is such a sign in it."""
    return _HIDDEN.search(text) is not None


def safe_cell(text: str) -> str:
    """A text as a cell of a table that a spreadsheet may open: it begins no formula there."""
    shown = visible(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def _escape(sign: str) -> str:
    code = ord(sign)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def composed(name: str) -> str:
    """A name with each accent in its letter, where there is such a letter (NFC)."""
    return unicodedata.normalize("NFC", name)


def nearest(word: str, known: Iterable[str]) -> str:
    """For the message about a word that is not known: the one that was probably meant, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


class WrongOption(ValueError):
    """The value of an option is not one that it can have. Whoever tells it may name the option as it was typed."""

    def __init__(self, option: str, what: str) -> None:
        super().__init__(f"{option} {what}")
        self.option, self.what = option, what


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
