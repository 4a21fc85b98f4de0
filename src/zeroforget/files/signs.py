"""Signs that a reader does not see, or that make a terminal do something: they are shown as escapes, never as they are.

Control signs move the cursor, colour or rename a window; bidirectional ones show a text in another order than it has.
"""

from __future__ import annotations

import re
import unicodedata

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


def cell(text: str) -> str:
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
