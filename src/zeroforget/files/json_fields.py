"""JSON that is checked field by field. A file is the exact text that `sealed` made, so any changed byte shows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zeroforget.files.hashes import sha256
from zeroforget.files.paths import NotRegular, open_regular

MOST_BYTES = 32 * 2**20
"""No JSON of ours is longer; a longer one is not read."""
HASH = re.compile(r"[0-9a-f]{64}")


class FieldError(ValueError):
    """A file, or a field of it, is not what it should be."""

    def __init__(self, where: object, why: str) -> None:
        self.where, self.why = where, why
        super().__init__(f"{where}: {why}")


def _text(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sealed(values: Mapping[str, Any]) -> bytes:
    """The file's bytes: the values and, last, the hash of the text without it."""
    text = _text(values)
    seal = f'"seal": "{sha256(text)}"\n}}\n'.encode()
    return text.removesuffix(b"\n}\n") + b",\n " + seal if values else b"{\n " + seal


def unsealed(
    content: bytes, where: object, check: Callable[[dict[str, Any]], None] = lambda values: None
) -> dict[str, Any]:
    """The values of a sealed file; FieldError unless every byte is as `sealed` wrote it.

    `check` sees the values before the seal is compared: a later version may seal otherwise.
    """
    try:
        values = json.loads(content, parse_constant=_no_constant)
    except RecursionError:
        raise FieldError(where, "it is nested too deeply") from None
    except ValueError as error:
        raise FieldError(where, _plain(error)) from None
    if not isinstance(values, dict):
        raise FieldError(where, "it does not hold an object")
    check(values)
    values.pop("seal", None)
    try:
        same = sealed(values) == content
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise FieldError(where, "its text does not match its seal; it was edited, or part of it was overwritten")
    return values


def read_bytes(path: Path, most: int) -> bytes:
    """A file's bytes, unless there are more than `most`."""
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        raise FieldError(path, "it is missing") from None
    except (IsADirectoryError, NotADirectoryError, NotRegular):
        raise FieldError(path, "it is not a file") from None
    if len(content) > most:
        raise FieldError(path, f"it is longer than the {most} bytes that it should have at most")
    return content


def _plain(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON (line {error.lineno}: {error.msg})"
    if isinstance(error, UnicodeError):
        return "it is not text"
    return str(error)


def _no_constant(name: str) -> float:
    raise ValueError(f"it holds {name}, which is no number")


class Fields:
    """An object of a JSON file, read field by field; every mistake names the file and the field."""

    def __init__(self, values: object, where: object, prefix: str = "") -> None:
        self.where, self.prefix = where, prefix
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        self.left = set(self.values)
        if not isinstance(values, dict):
            raise self.wrong("", "must be an object")

    def wrong(self, key: str, why: str) -> FieldError:
        """The error about a field."""
        name = f"{self.prefix}{key}" if key else self.prefix.rstrip(".") or "the whole"
        return FieldError(self.where, f"field '{name}' {why}")

    def any(self, key: str) -> Any:
        """Whatever the field holds."""
        if key not in self.values:
            raise self.wrong(key, "is missing")
        self.left.discard(key)
        return self.values[key]

    def text(self, key: str, *, most: int = 1000, like: re.Pattern[str] | None = None) -> str:
        """A string."""
        return self._text(key, self.any(key), most, like)

    def hash(self, key: str) -> str:
        """A sha256 in hex."""
        return self.text(key, most=64, like=HASH)

    def integer(self, key: str, low: int, high: int) -> int:
        """A whole number within bounds."""
        return self._integer(key, self.any(key), low, high)

    def number(self, key: str, low: float = -1e30, high: float = 1e30) -> float:
        """A finite number within bounds."""
        return self._number(key, self.any(key), low, high)

    def maybe(self, key: str, low: float, high: float) -> float | None:
        """A number or null."""
        return None if self.any(key) is None else self.number(key, low, high)

    def texts(self, key: str, *, least: int, most: int) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(self._text(key, v, 1000, None) for v in self._list(key, least, most))

    def numbers(self, key: str, *, least: int, most: int, low: float = -1e30, high: float = 1e30) -> tuple[float, ...]:
        """A list of numbers."""
        return tuple(self._number(key, v, low, high) for v in self._list(key, least, most))

    def integers(self, key: str, *, least: int, most: int, low: int = 0, high: int = 2**40) -> tuple[int, ...]:
        """A list of whole numbers."""
        return tuple(self._integer(key, v, low, high) for v in self._list(key, least, most))

    def counts(self, key: str, high: int = 2**24) -> dict[str, int]:
        """An object of whole numbers."""
        inner = self.group(key)
        return {name: inner.integer(name, 0, high) for name in list(inner.values)}

    def group(self, key: str) -> Fields:
        """An object inside this one."""
        return Fields(self.any(key), self.where, f"{self.prefix}{key}.")

    def done(self) -> None:
        """Nothing else may be there."""
        if self.left:
            raise self.wrong(min(self.left), "is not one that this version knows")

    def groups(self, key: str, *, least: int, most: int) -> list[Fields]:
        """A list of objects."""
        return [Fields(one, self.where, f"{self.prefix}{key}.") for one in self._list(key, least, most)]

    def _list(self, key: str, least: int, most: int) -> list[Any]:
        value = self.any(key)
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise self.wrong(key, f"must be a list of {least} to {most} entries")
        return value

    def _text(self, key: str, value: object, most: int, like: re.Pattern[str] | None) -> str:
        if not isinstance(value, str) or len(value) > most or (like is not None and not like.fullmatch(value)):
            raise self.wrong(key, f"must be a text of at most {most} characters in the form of its kind")
        return value

    def _integer(self, key: str, value: object, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(key, f"must be a whole number from {low} to {high}")
        return value

    def _number(self, key: str, value: object, low: float, high: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.wrong(key, f"must be a number from {low:g} to {high:g}")
        if not math.isfinite(value):
            raise self.wrong(key, "must be finite")
        return float(value)
