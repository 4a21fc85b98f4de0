"""The small files that runs and reports are kept in: written aside and renamed, and named when something is wrong."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeroforget.files.atomic import write_bytes
from zeroforget.files.hashes import sha256
from zeroforget.files.paths import NotRegular, in_the_way, open_regular

_SEAL = "sha256"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file. ValueError names the file and the remedy if it holds none, or not the one that was
    written: where it has a seal, every value must be as it was."""
    try:
        with open_regular(path) as file:
            values = json.loads(file.read())
    except NotRegular:
        raise damaged(path, "it is not a file", remedy) from None
    except (ValueError, RecursionError) as error:  # no JSON, or not even text
        what = "it is empty" if not path.stat().st_size else str(error)
        raise damaged(path, what, remedy) from error
    if not isinstance(values, dict):
        raise damaged(path, f"it should hold a JSON object, and holds a {type(values).__name__}", remedy)
    if values.pop(_SEAL, None) not in {None, _sealing(values)}:
        raise damaged(path, "it is not as it was written (its seal differs)", remedy)
    return values


def damaged(path: Path, what: str, remedy: str) -> ValueError:
    """The error for a file that cannot be used."""
    return ValueError(f"{path} is damaged: {what}; {remedy}")


def write_json(path: Path, values: Any, *, seal: bool = False) -> None:
    """Write aside, sync, rename: a crash leaves the old file or the new one. A sealed object is compared when it is
    read."""
    if seal:
        values = {**values, _SEAL: _sealing(values)}
    write_text(path, json.dumps(values, indent=1, allow_nan=True) + "\n")


def _sealing(values: Any) -> str:
    """Of all values, however the file is laid out."""
    return sha256(json.dumps(json.loads(json.dumps(values))).encode())


def write_text(path: Path, text: str) -> None:
    """The same for any text."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    with room_for(path):
        write_bytes(path, text.encode())


def check_output(path: Path, what: str, is_one: Callable[[Path], bool]) -> None:
    """Refuse a place where nothing can be written, or where a file lies that is not of the kind to be written."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file to write")
    if (why := in_the_way(path, what, is_one)) is not None:
        raise ValueError(why)


def beginning(path: Path) -> str:
    """The first part of a file, whatever it holds."""
    with path.open("rb") as file:
        return file.read(2**16).decode(errors="replace")


@contextmanager
def room_for(path: Path, advice: str = "try again") -> Iterator[None]:
    """Inside, an error for a full disk names what was to be written and says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(f"cannot write {path}: {error.strerror}; make room and {advice}") from error
