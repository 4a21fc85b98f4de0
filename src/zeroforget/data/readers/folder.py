"""Any folder of class folders, with or without parts for testing and for validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from zeroforget.data.collection import DataError, Listing, set_apart
from zeroforget.data.readers.files import folders, images, listing

VALIDATION_NAMES = ("val", "valid", "validation")


def read_folder(folder: Path) -> Listing:
    """`train/<class>`, `test/<class>` and perhaps `val/<class>`; without `test`, `val` is for testing. Or `<class>`
    alone: then a fifth of each class is for testing."""
    names = folders(folder)
    if (part := part_for_testing(names)) is None:
        found = listing(folder, _rows(folder, "", names, False), names)
        return replace(found, test=set_apart(found.labels))
    classes = folders(folder / "train")
    rows = _rows(folder, "train/", classes, False) + _part(folder, part, classes, True)
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
    names = folders(folder / part)
    if strange := sorted(set(names) - set(classes)):
        raise DataError(f"{folder / part / strange[0]} is a class that {folder / 'train'} does not have")
    return _rows(folder, f"{part}/", names, test, classes)


def _rows(
    folder: Path, prefix: str, names: list[str], test: bool, classes: list[str] | None = None
) -> list[tuple[str, int, bool]]:
    number = {name: index for index, name in enumerate(classes or names)}
    return [
        (f"{prefix}{name}/{image}", number[name], test) for name in names for image in images(folder / prefix / name)
    ]
