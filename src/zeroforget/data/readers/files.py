"""What the readers share: text files, MATLAB files and folders whose errors name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zeroforget.data.values import DataError, Listing

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")


def lines(path: Path) -> list[str]:
    """The lines of a text file that say anything."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is damaged: it is not a text file") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def pairs(path: Path) -> Iterator[tuple[str, str]]:
    """The first word of each line and what follows it."""
    for number, line in enumerate(lines(path), 1):
        first, _, rest = line.partition(" ")
        if not rest.strip():
            raise DataError(f"{path}, line {number}: '{line}' should hold two things with a space between")
        yield first, rest.strip()


def numbers(path: Path, count: int) -> dict[str, list[float]]:
    """The first word of each line to the `count` numbers that follow it."""
    table = {}
    for name, rest in pairs(path):
        try:
            table[name] = [float(part) for part in rest.split()]
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}, after '{name}'") from error
        if len(table[name]) != count:
            raise DataError(f"{path} is damaged: '{name}' is followed by {len(table[name])} numbers, not {count}")
    return table


def matlab(path: Path, *names: str) -> tuple[Any, ...]:
    """Variables of a MATLAB file, without their dimensions of size one."""
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"{path} is missing")
    try:
        content = loadmat(path, squeeze_me=True)
    except Exception as error:  # the parser fails in many ways on a damaged file
        raise DataError(f"{path} is damaged: {error}") from error
    for name in names:
        if name not in content:
            raise DataError(f"{path} is damaged: it has no variable '{name}'")
    return tuple(content[name] for name in names)


def folders(path: Path) -> list[str]:
    """Names of the folders in a folder, sorted. They are names of classes, so they must be text."""
    if not path.is_dir():
        raise DataError(f"{path} is missing")
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    for name in names:
        if any("\udc80" <= sign <= "\udcff" for sign in name):  # how Python writes bytes that are no text
            readable = os.fsencode(name).decode(errors="backslashreplace")
            raise DataError(f"the folder {path}/{readable} has a name that is not UTF-8: rename it")
    return names


def images(path: Path) -> list[str]:
    """Names of the image files in a folder, sorted."""
    if not path.is_dir():
        raise DataError(f"{path} is missing")
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    return [name for name in names if name.lower().endswith(IMAGE_ENDINGS)]


def listing(
    base: Path,
    rows: Sequence[tuple[str, int, bool]],
    classes: Sequence[str],
    codes: Sequence[str] = (),
    boxes: Sequence[Sequence[float]] | None = None,
) -> Listing:
    """A listing out of rows of file, label and test mark."""
    if not rows:
        raise DataError(f"{base} lists no images")
    labels = np.array([row[1] for row in rows], dtype=np.int64)
    if not 0 <= labels.min() <= labels.max() < len(classes):
        raise DataError(
            f"{base}: labels run from {labels.min()} to {labels.max()} but there are {len(classes)} classes"
        )
    return Listing(
        base,
        tuple(row[0] for row in rows),
        labels,
        np.array([row[2] for row in rows], dtype=bool),
        tuple(classes),
        tuple(codes),
        None if boxes is None else np.array(boxes, dtype=np.float64),
    )
