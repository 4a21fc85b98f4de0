"""From a data set's name to its images: finds it on this disk, reads it, decodes it through the cache."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch

from zeroforget.data.cache import data_roots, decoded
from zeroforget.data.readers.folders import check_parts, read_folder
from zeroforget.data.shards import load_shards
from zeroforget.data.sources import FLIPPED, SOURCES, Source
from zeroforget.data.values import Collection, DataError, Listing, OnRead, Pixels, Treatment
from zeroforget.files.paths import as_path

Root = str | PathLike[str] | None


def source(name: str) -> Source:
    """The entry of the table of data sets with this name."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise DataError(f"no data set '{name}'{hint} (`zeroforget data` lists all)")
    return SOURCES[name]


def find(entry: Source, root: Root = None) -> Path | None:
    """The folder that holds a data set, or None. What comes inside the package is always found."""
    if not entry.needs:
        return Path()
    for base in data_roots(root):
        for folder in (*(base / name for name in entry.folders), base):
            if all(_exists(folder / need) for need in entry.needs):
                return folder
    return None


def _exists(path: Path) -> bool:
    """IDX files may be gzipped, and some copies write a dot in their names."""
    if path.exists() or not path.name.endswith("-ubyte"):
        return path.exists()
    dotted = path.with_name(path.name.replace("-idx", ".idx"))
    return any(other.exists() for other in (path.with_name(f"{path.name}.gz"), dotted, Path(f"{dotted}.gz")))


def lacking(entry: Source, folder: Path) -> list[str]:
    """What of a data set is not in a folder."""
    return [need for need in entry.needs if not _exists(folder / need)]


def remedy(entry: Source) -> str:
    """What to do about missing or damaged files."""
    get = f"`zeroforget data {entry.name} --download` gets it"
    if entry.by_hand:
        get = f"{entry.by_hand} (`zeroforget data {entry.name}` says which files)"
    return f"{get}; a copy elsewhere is named by --data-root or ZEROFORGET_DATA"


def load(name: str, root: Root = None, progress: OnRead | None = None, size: int = 224) -> Collection:
    """A data set by name, `folder:PATH` for any folder of class folders (its images resized to `size`), or
    `shards:ADDRESS` for shards with an index."""
    if name.startswith("folder:"):
        return load_folder(name.removeprefix("folder:"), size, progress)
    if name.startswith("shards:"):
        return load_shards(name.removeprefix("shards:"), size)
    entry = source(name)
    folder = _there(entry, root)
    with _remedied(entry, folder):
        return _collected(entry, folder, progress)


def listed(name: str, root: Root = None, size: int = 224) -> tuple[Source, Path, Listing | Pixels]:
    """What `load` would decode: the data set's entry (one is made for a folder), where it lies, and its files."""
    if not name.startswith("folder:") and (name in SOURCES or not Path(name).expanduser().is_dir()):
        entry = source(name)
        folder = _there(entry, root)
        with _remedied(entry, folder):
            return entry, folder, entry.read(folder)
    entry, folder = _own(name.removeprefix("folder:"), size, None)
    return entry, folder, entry.read(folder)


def _there(entry: Source, root: Root) -> Path:
    folder = find(entry, root)
    if folder is None:
        places = ", ".join(str(base / entry.folders[0]) for base in data_roots(root))
        raise DataError(f"data set '{entry.name}' is not on this disk (looked in {places}); {remedy(entry)}")
    return folder


@contextmanager
def _remedied(entry: Source, folder: Path) -> Iterator[None]:
    """What is wrong with an official data set is told with its remedy."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}; {remedy(entry)}") from error
    except (ValueError, IndexError, KeyError) as error:
        raise DataError(f"data set '{entry.name}' in {folder} is damaged: {error}; {remedy(entry)}") from error


def load_folder(
    path: str | PathLike[str], size: int = 224, progress: OnRead | None = None, name: str | None = None
) -> Collection:
    """A folder of class folders (or of `train`, `test` and perhaps `val` with class folders in them), resized to `size`
    square."""
    entry, folder = _own(path, size, name)
    try:
        return _collected(entry, folder, progress, official=False)
    except DataError as error:
        raise DataError(f"{error}; repair or remove it") from error


def _own(path: str | PathLike[str], size: int, name: str | None) -> tuple[Source, Path]:
    """The entry of a folder of one's own, and the folder."""
    folder = as_path(path).expanduser()
    if not folder.is_dir():
        raise DataError(_no_folder(folder))
    check_parts(folder)
    shown = name or folder.resolve().name
    return Source(shown, "", 0, 0, 0, read_folder, FLIPPED, Treatment(size, fit="cover")), folder


def _no_folder(folder: Path) -> str:
    what = f"{folder.absolute()} is {'no folder' if folder.exists() else 'missing'}"
    if folder.is_absolute():
        return f"{what}; name a folder of class folders"
    return f"{what}; '{folder}' is relative to the folder where the command is given, in an experiment's file too"


def _collected(entry: Source, folder: Path, progress: OnRead | None, *, official: bool = True) -> Collection:
    read = entry.read(folder)
    if isinstance(read, Listing):
        if entry.treatment is None:
            raise ValueError(f"data set '{entry.name}' is listed as files but says not how to treat them")
        images, codes = decoded(entry.name, read, entry.treatment, progress, official=official), read.codes
        val = None if read.val is None else torch.from_numpy(read.val)
    else:
        images, codes, val = torch.from_numpy(read.images), (), None
    labels, test = torch.from_numpy(read.labels), torch.from_numpy(read.test)
    return Collection(entry.name, read.classes, images, labels, test, entry.prepare, codes, val)
