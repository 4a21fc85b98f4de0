"""Folders of pictures: any folder of class folders (the one lister), and what readers of published layouts share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zeroforget.data.decode import ENDINGS
from zeroforget.data.values import DataError, Listing, set_apart
from zeroforget.files.text import composed

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


VALIDATION_NAMES = ("val", "valid", "validation")
JUNK = {"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found", "Thumbs.db", "desktop.ini"}
"""What file managers and archives leave beside pictures."""
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP", b"\0\0\0\x0cJXL")


@dataclass(frozen=True)
class ClassFiles:
    """The pictures of a folder of class folders, in order: class by class, in each by path."""

    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: tuple[int, ...]
    ignored: tuple[Path, ...] = ()
    """Files in class folders that are no pictures."""
    loose: int = 0
    """Pictures beside the class folders, which belong to no class."""


def class_files(folder: Path, classes: Sequence[str] | None = None) -> ClassFiles:
    """Every picture below every class folder. Classes come by name, or as given: the folders must then be among them.

    A picture is a file with a picture's ending, or one whose first bytes are a picture's.
    """
    places = class_folders(folder)
    labels = {composed(name): label for label, name in enumerate(sorted(places) if classes is None else classes)}
    if strange := [name for name in places if name not in labels]:
        raise DataError(f"{strange[0]} is no class of this task; its classes are {', '.join(classes or ())}")
    found = [(file, labels[name]) for name in labels if name in places for file in files_below(places[name])]
    pictures = [(file, label) for file, label in found if is_picture(file)]
    taken = {file for file, _ in pictures}
    return ClassFiles(
        tuple(sorted(places)) if classes is None else tuple(classes),
        tuple(file for file, _ in pictures),
        tuple(label for _, label in pictures),
        tuple(file for file, _ in found if file not in taken),
        sum(
            entry.suffix.lower() in ENDINGS and entry.is_file() and not _left_out(entry.name)
            for entry in folder.iterdir()
        ),
    )


def class_folders(folder: Path) -> dict[str, Path]:
    """Class → its folder. Some systems take accents off their letters in names; they are put back here."""
    names = [name for name in folders(folder) if not _left_out(name)]
    places: dict[str, Path] = {}
    for name in names:
        place = places.setdefault(composed(name), folder / name)
        if place.name != name:
            raise DataError(
                f"{folder} holds two class folders that read '{composed(name)}', their accents composed in two ways "
                f"({place.name!a} and {name!a}); put their pictures into one"
            )
    if len(names) == 1 and len(inner := [n for n in folders(folder / names[0]) if not _left_out(n)]) > 1:
        shown = ", ".join(inner[:3]) + (", …" if inner[3:] else "")
        raise DataError(
            f"{folder} holds one folder, '{names[0]}', which holds {len(inner)} ({shown}): did you mean "
            f"{folder / names[0]}?"
        )
    return places


def files_below(folder: Path) -> list[Path]:
    """Every file in a folder and those below it, but for what is hidden and what others leave."""
    found = []
    for base, below, names in os.walk(folder, onerror=_unread):
        below[:] = [name for name in below if not _left_out(name)]
        found += [Path(base) / name for name in names if not _left_out(name)]
    return sorted(found)


def is_picture(file: Path) -> bool:
    """Whether a file is meant to be a picture, by its name or its first bytes."""
    if file.suffix.lower() in ENDINGS:
        return True
    if not file.is_file():  # to open a pipe would wait for whoever writes into it
        return False
    try:
        with file.open("rb") as opened:
            start = opened.read(12)
    except OSError:
        return False
    return start.startswith(_BEGINNINGS) or start[8:] == b"WEBP" or start[4:] in {b"ftypavif", b"ftypheic", b"ftypmif1"}


def _left_out(name: str) -> bool:
    return name.startswith(".") or name in JUNK


def _unread(error: OSError) -> None:
    """Pictures that cannot be reached are not left out in silence."""
    why = (error.strerror or str(error)).lower()
    raise DataError(f"the folder {error.filename} cannot be read ({why}); let it be read, or take it away") from error


def read_folder(folder: Path) -> Listing:
    """`train/<class>`, `test/<class>` and perhaps `val/<class>`; without `test`, `val` is for testing. Or `<class>`
    alone: then a fifth of each class is for testing."""
    names = folders(folder)
    if (part := part_for_testing(names)) is None:
        classes = sorted(class_folders(folder))
        found = listing(folder, _rows(folder, folder, classes, False), classes)
        return replace(found, test=set_apart(found.labels))
    classes = sorted(class_folders(folder / "train"))
    rows = _rows(folder, folder / "train", classes, False) + _part(folder, part, classes, True)
    validation = next((name for name in VALIDATION_NAMES if name in names and name != part), None)
    if validation is None:
        return listing(folder, rows, classes)
    held = _part(folder, validation, classes, False)
    if not held:
        raise DataError(f"{folder / validation} holds no images in class folders")
    return replace(listing(folder, rows + held, classes), val=np.arange(len(rows) + len(held)) >= len(rows))


def check_parts(folder: Path) -> None:
    """Refuse two folders for validation: which one is meant cannot be known."""
    names = folders(folder)
    several = [name for name in VALIDATION_NAMES if name in names and "train" in names]
    if len(several) > 1:
        raise DataError(
            f"{folder} holds {' and '.join(several)}, which are names of one part, the validation images; keep one of "
            "them (images for testing belong in 'test')"
        )


def part_for_testing(names: list[str]) -> str | None:
    """Of folders beside one called `train`, the one that is for testing."""
    return next((name for name in ("test", *VALIDATION_NAMES) if name in names and "train" in names), None)


def stands_alone(folder: Path, name: str) -> bool | None:
    """Whether a folder inside another is a data set of its own. None: it may be, and the outer one may be meant too.

    A class of the outer one holds pictures, not folders.
    """
    inner = folder / name
    if not inner.is_dir() or not folders(inner):
        return False
    return None if images(inner) or part_for_testing(folders(folder)) else True


def _part(folder: Path, part: str, classes: list[str], test: bool) -> list[tuple[str, int, bool]]:
    """The images of a part other than `train`, which may lack classes of it but has no others."""
    if strange := sorted(set(class_folders(folder / part)) - set(classes)):
        raise DataError(f"{folder / part / strange[0]} is a class that {folder / 'train'} does not have")
    return _rows(folder, folder / part, classes, test)


def _rows(base: Path, folder: Path, classes: list[str], test: bool) -> list[tuple[str, int, bool]]:
    found = class_files(folder, classes)
    return [
        (file.relative_to(base).as_posix(), label, test) for file, label in zip(found.files, found.labels, strict=True)
    ]
