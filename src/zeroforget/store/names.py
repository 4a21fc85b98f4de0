"""What tasks may be called: as people write in any language, and so that it can name a folder on any system."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from zeroforget.files.text import composed
from zeroforget.store.errors import ModelError

_MOST = 64
_BYTES = 200
"""A folder's name may have 255, and a number, '.undone-' and a process may come before the task's."""
_PLAIN = re.compile(r"\w[\w .-]*")
_VIRAMA = 9
_LETTER = "a"
_VERSIONED = re.compile(r"(.+)@([1-9]\d{0,3})", re.DOTALL | re.ASCII)
"""A task that was learned again: dogs@2."""


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
    if not _is_plain(name):
        raise ModelError(
            f"'{name}' cannot name a task: use letters, digits, spaces, '-', '_' and '.', at most {_MOST} of them, "
            "the first a letter or digit"
        )
    return name


def version_of(name: str) -> tuple[str, int | None]:
    """A task's name without its version, and that, if it has one: dogs@2 is the second of dogs."""
    found = _VERSIONED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, None)


def exact(name: str) -> str:
    """A name that means this version and no newer one."""
    return name if version_of(name)[1] else f"{name}@1"


def means(asked: str, name: str) -> bool:
    """Whether who asks for `asked` may mean the task `name`: dogs means any version of dogs, dogs@1 the first alone."""
    base, version = version_of(asked)
    own = version_of(exact(name))
    return base == own[0] and version in (None, own[1])


def next_version(name: str, names: Iterable[str]) -> str:
    """What a task is called that is learned again."""
    there = [version_of(exact(each))[1] or 1 for each in names if means(name, each)]
    if not there:
        raise ModelError(f"there is no task '{name}' to learn again; leave out --again (again=True) to learn it")
    again = f"{name}@{max(there) + 1}"
    if not is_task_name(again):
        raise ModelError(f"'{again}' cannot name a task: at most {_MOST} signs; learn it under another name")
    return again


def is_task_name(name: str) -> bool:
    """Whether this may name a task on disk: a name as people give it, or one with a version behind it."""
    base, version = version_of(name)
    return len(name) <= _MOST and version != 1 and _is_plain(base) if version else _is_plain(name)


def _is_plain(name: str) -> bool:
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
