"""Where data sets and decoded images are kept on this disk: decoded once, then opened as one memory-mapped array."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zeroforget.data.decode import Damage, Item, decode_all
from zeroforget.data.values import DataError, Listing, OnRead, Treatment
from zeroforget.files.atomic import place, sync_file
from zeroforget.files.hashes import Digest, hash_of_file
from zeroforget.files.locks import locked_if_possible
from zeroforget.files.paths import as_path, read_regular

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


FORMAT = 1
SINCE_PLAIN = 3
"""The format of entries with files other than JPEG: 16-bit, floating and transparent pictures were once decoded
differently."""
NAMED = 10
SUM = "sha256"


def decoded(
    name: str, listing: Listing, treatment: Treatment, progress: OnRead | None = None, *, official: bool = True
) -> Tensor:
    """The images of a listing as bytes `(count, 3, size, size)`, decoded now or long ago.

    An official data set is the same wherever it lies. Other folders may agree in all names, sizes and times, and hold
    other pictures.
    """
    folder = cache_folder()
    entry = folder / f"{name}-{fingerprint(listing, treatment, official=official)}"
    if entry.is_dir() and not _whole(entry):
        if progress:
            progress(f"{entry} is damaged (its sha256 differs) and is not used; decoding its images again", 0, 0)
        shutil.rmtree(entry)
    if not entry.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with locked_if_possible(folder / f"{entry.name}.lock") as alone:
            if alone:
                _clear(entry)
            if not entry.is_dir():
                _write(entry, name, listing, treatment, progress)
    return mapped(entry / "images.npy")


def _whole(entry: Path) -> bool:
    """Whether the images are those that were written; earlier versions wrote no checksum."""
    try:
        about = json.loads(read_regular(entry / "about.json"))
        return about.get(SUM) in {None, hash_of_file(entry / "images.npy")}
    except (OSError, ValueError, AttributeError):
        return False


def mapped(path: Path) -> Tensor:
    """A tensor over a file of images, nothing read before it is used. Changes would stay in this process."""
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def fingerprint(listing: Listing, treatment: Treatment, *, official: bool = True) -> str:
    """Twenty hex digits that change whenever a file, a box or the treatment does; of what is not official, also with
    its place."""
    digest = Digest(f"({_format(listing)}, {_named(treatment)})".encode())
    if not official:
        digest.update(os.fsencode(listing.base.resolve()))
    base = str(listing.base)
    for name in listing.files:
        try:
            state = os.stat(f"{base}/{name}")  # noqa: PTH116 - a million times; Path costs thrice as much
        except OSError as error:
            raise DataError(f"{listing.base / name} is missing") from error
        digest.update(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode(errors="surrogateescape"))
    if treatment.boxes and listing.boxes is not None:
        digest.update(listing.boxes.tobytes())
    return digest.hexdigest()[:20]


def _named(treatment: Treatment) -> str:
    """As entries have been named since the first version, but for the treatment that came later."""
    known = f"size={treatment.size}, boxes={treatment.boxes}, trim={treatment.trim}, upright=False"
    return f"Treatment({known})" if treatment.fit == "stretch" else f"Treatment({known}, fit={treatment.fit!r})"


def _format(listing: Listing) -> int:
    """JPEG files have eight bits and no transparency: entries of them alone stay as good as they were."""
    return FORMAT if all(name.lower().endswith((".jpg", ".jpeg")) for name in listing.files) else SINCE_PLAIN


def _clear(entry: Path) -> None:
    """Remove what processes left behind that were killed while they wrote this entry."""
    for left in entry.parent.glob(f"{entry.name}.part-*"):
        shutil.rmtree(left, ignore_errors=True)


def _write(entry: Path, name: str, listing: Listing, treatment: Treatment, progress: OnRead | None) -> None:
    shape = (len(listing.files), 3, treatment.size, treatment.size)
    _enough_space(entry.parent, name, int(np.prod(shape, dtype=np.int64)))
    aside = Path(tempfile.mkdtemp(prefix=f"{entry.name}.part-", dir=entry.parent))
    try:
        np.lib.format.open_memmap(aside / "images.npy", mode="w+", dtype=np.uint8, shape=shape)
        _fill(aside / "images.npy", name, listing, treatment, progress)
        about = {"format": _format(listing), "data": name, "from": str(listing.base)}
        about |= {"images": shape[0], "size": shape[-1], SUM: hash_of_file(aside / "images.npy")}
        (aside / "about.json").write_text(json.dumps(about) + "\n")
        aside.chmod(0o755)
        sync_file(aside / "images.npy")
        try:
            place(aside, entry)
        except OSError:
            if not entry.is_dir():  # another process, where locks do not reach, was first
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fill(path: Path, name: str, listing: Listing, treatment: Treatment, progress: OnRead | None) -> None:
    boxes = listing.boxes.tolist() if treatment.boxes and listing.boxes is not None else None
    items: list[Item] = [
        (f"{listing.base}/{file}", boxes[row] if boxes else None) for row, file in enumerate(listing.files)
    ]

    def told(done: int, bad: list[Damage]) -> None:
        if progress:
            for file, reason in bad:
                progress(f"{file} {reason}", 0, 0)
            progress(f"decoding {name}", done, len(items))

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    damaged = decode_all(str(path), items, (treatment.size, treatment.trim, treatment.fit), workers, told)
    if damaged:
        shown = "; ".join(f"{file} {reason}" for file, reason in sorted(damaged)[:NAMED])
        more = f"; and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
        raise DataError(f"{len(damaged)} image(s) of '{name}' cannot be used: {shown}{more}")


def _enough_space(folder: Path, name: str, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"decoded, '{name}' takes {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB left; "
            "make room or set ZEROFORGET_CACHE to a folder on a larger disk"
        )
