"""Where data sets and decoded images are kept on this disk."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

from zeroforget.files.paths import as_path

DATA_VARIABLE = "ZEROFORGET_DATA"
CACHE_VARIABLE = "ZEROFORGET_CACHE"
SYSTEM = Path("/usr/share/datasets")  # where Debian's data packages lie


def data_roots(root: str | PathLike[str] | None = None) -> tuple[Path, ...]:
    """Folders to look for data sets in, the first of which downloads go to: the one given; else those of the variable
    ZEROFORGET_DATA (several with the path separator between); else the user's own and the system's."""
    if root is not None:
        return (as_path(root).expanduser(),)
    named = os.environ.get(DATA_VARIABLE)
    if named:
        return tuple(Path(part).expanduser() for part in named.split(os.pathsep) if part)
    return (_user_cache() / "data", SYSTEM)


def cache_folder() -> Path:
    """Where decoded images are kept: ZEROFORGET_CACHE, else the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else _user_cache() / "decoded"


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zeroforget"
