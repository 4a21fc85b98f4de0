"""What tasks may be called: as people write in any language, and so that it can name a folder on any system."""

from __future__ import annotations

import re
import unicodedata

from zeroforget.data.readers.folder import composed
from zeroforget.store.errors import ModelError

_MOST = 64
_BYTES = 200
"""A folder's name may have 255, and a number, '.undone-' and a process may come before the task's."""
_PLAIN = re.compile(r"\w[\w .-]*")
_VIRAMA = 9
_LETTER = "a"


def kept_name(name: str) -> str:
    """A name as it is kept: letters with accents are composed, and nothing is around it."""
    return composed(name.strip())


def task_name(name: str) -> str:
    """A task's name as it is kept; it must be able to name a folder on any system."""
    if not isinstance(name, str):
        raise ModelError(f"a task needs a name, not {name!r}")
    name = kept_name(name)
    if (size := len(name.encode(errors="replace"))) > _BYTES:
        raise ModelError(f"'{name}' cannot name a task: it has {size} bytes in UTF-8, and {_BYTES} are the most")
    if not is_task_name(name):
        raise ModelError(
            f"'{name}' cannot name a task: use letters, digits, spaces, '-', '_' and '.', at most {_MOST} of them, "
            "the first a letter or digit"
        )
    return name


def is_task_name(name: str) -> bool:
    """Whether these are letters (of any script, with the marks that belong to them), digits, spaces and '-_.', as a
    name is kept."""
    if name != kept_name(name) or len(name.encode(errors="replace")) > _BYTES:
        return False
    shown = ""
    for place, sign in enumerate(name[: _MOST + 1]):
        before, after = name[place - 1 : place], name[place + 1 : place + 2]
        marks = unicodedata.category(sign) in {"Mn", "Mc"} or _joins(sign, before, after)
        shown += _LETTER if marks and re.fullmatch(r"\w", shown[-1:]) else sign
    return len(shown) <= _MOST and _PLAIN.fullmatch(shown) is not None


def _joins(sign: str, before: str, after: str) -> bool:
    """The two joiners, which show nothing themselves, where a language writes them: after a virama (Indic scripts), or,
    of the two the one that parts, between Arabic letters (Persian)."""
    if sign not in {"\u200c", "\u200d"} or not before:
        return False
    if unicodedata.combining(before) == _VIRAMA:
        return True
    arabic = unicodedata.bidirectional(before) in {"AL", "NSM"} and bool(after)
    return sign == "\u200c" and arabic and unicodedata.bidirectional(after) == "AL"


def folder_name(number: int, name: str) -> str:
    """The name of a task's folder."""
    return f"{number:03d}-{name.replace(' ', '_')}"
