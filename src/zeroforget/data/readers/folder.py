"""Any folder of class folders, with or without a part set aside for testing."""

from __future__ import annotations

from pathlib import Path

from zeroforget.data.collection import DataError, Listing, set_apart
from zeroforget.data.readers.files import folders, images, listing

TEST_NAMES = ("test", "val", "valid", "validation")


def read_folder(folder: Path) -> Listing:
    """`train/<class>` and `test/<class>` (or `val`), or `<class>` alone: then a fifth of each class is for testing."""
    names = folders(folder)
    if (part := part_for_testing(names)) is not None:
        classes = folders(folder / "train")
        strange = sorted(set(folders(folder / part)) - set(classes))
        if strange:
            raise DataError(f"{folder / part / strange[0]} is a class that {folder / 'train'} does not have")
        rows = _rows(folder, "train/", classes, False)
        rows += _rows(folder, f"{part}/", [name for name in classes if (folder / part / name).is_dir()], True, classes)
        return listing(folder, rows, classes)
    found = listing(folder, _rows(folder, "", names, False), names)
    return Listing(folder, found.files, found.labels, set_apart(found.labels), found.classes)


def part_for_testing(names: list[str]) -> str | None:
    """Of folders beside one called `train`, the one that is for testing."""
    return next((name for name in TEST_NAMES if name in names and "train" in names), None)


def stands_alone(folder: Path, name: str) -> bool | None:
    """Whether a folder inside another is a data set of its own. None: it may be, and the outer one may be meant too.

    A class of the outer one holds pictures, not folders.
    """
    inner = folder / name
    if not inner.is_dir() or not folders(inner):
        return False
    return None if images(inner) or part_for_testing(folders(folder)) else True


def _rows(
    folder: Path, prefix: str, names: list[str], test: bool, classes: list[str] | None = None
) -> list[tuple[str, int, bool]]:
    number = {name: index for index, name in enumerate(classes or names)}
    return [
        (f"{prefix}{name}/{image}", number[name], test) for name in names for image in images(folder / prefix / name)
    ]
