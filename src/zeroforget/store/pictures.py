"""A folder of class folders as a task: its pictures, what is wrong with them, and the part that is held out."""

from __future__ import annotations

import io
import math
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from zeroforget.data import DataError, Images, Preparation, Split, Task
from zeroforget.data.decode import MOST_PIXELS, TooLarge, covering, fitted, needs
from zeroforget.data.readers.folders import ClassFiles, class_files, folders
from zeroforget.data.shards import INDEX, PARTS, Index, InShards, open_index
from zeroforget.data.values import Treatment
from zeroforget.files.hashes import Digest, sha256
from zeroforget.files.text import has_hidden, visible
from zeroforget.nets import Shape
from zeroforget.store.errors import ModelError, TooManyPixels, Unreadable
from zeroforget.store.folder import Folder
from zeroforget.store.schema import MOST_CLASSES, DataFacts, Preprocessing
from zeroforget.training.seeding import generator

IN_MEMORY = 2**30
"""Above so many bytes, decoded pictures lie in a temporary file that is mapped into memory."""

Source = str | os.PathLike[str] | bytes | Image.Image
SOURCES = (str, os.PathLike, bytes, Image.Image)
"""The same kinds, for `isinstance`."""
Told = Callable[[int, int], None]


def decode(source: Source, shape: Shape, most: int = MOST_PIXELS) -> Tensor:
    """One picture as bytes of this shape: upright, covering the shape, cut in the middle; transparency is white."""
    try:
        if isinstance(source, Image.Image):
            return torch.from_numpy(fitted(source, shape))
        if not isinstance(source, bytes) and not stat.S_ISREG(mode := Path(source).stat().st_mode):
            if stat.S_ISDIR(mode):
                raise Unreadable("is a folder; pass the pictures in it, such as sorted(Path(folder).rglob('*.png'))")
            raise Unreadable("is no regular file")  # to open a pipe would wait for whoever writes into it
        return torch.from_numpy(covering(io.BytesIO(source) if isinstance(source, bytes) else source, shape, most))
    except Unreadable:
        raise
    except TooLarge as error:
        raise TooManyPixels(str(error)) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise TooManyPixels(f"has too many pixels; at most {most:,} are decoded") from None
    except FileNotFoundError:
        raise Unreadable("is missing") from None
    except PermissionError:
        raise Unreadable("may not be read by this user") from None
    except UnidentifiedImageError:
        name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
        empty = bool(name) and Path(name).stat().st_size == 0
        raise Unreadable(
            "is empty" if empty else needs(name) or "is no picture of a format that is read here"
        ) from None
    except Exception as error:  # decoders raise all kinds; whatever it is, the picture cannot be had
        raise Unreadable(f"cannot be decoded: {str(error) or type(error).__name__}") from None


def decode_all(files: Sequence[Path], shape: Shape, told: Told | None = None) -> tuple[Tensor, dict[int, str]]:
    """All pictures as one tensor of bytes, and what is wrong with those that cannot be used (they are left black)."""
    size = (len(files), *shape)
    images = np.zeros(size, np.uint8) if np.prod(size, dtype=np.int64) <= IN_MEMORY else _mapped(size)
    wrong: dict[int, str] = {}

    def one(row: int) -> None:
        try:
            images[row] = decode(files[row], shape).numpy()
        except Unreadable as error:
            wrong[row] = str(error)

    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata; what matters is whether the pixels came
        for done, _ in enumerate(pool.map(one, range(len(files))), 1):
            if told is not None:
                told(done, len(files))
    return torch.from_numpy(images), wrong


def _mapped(size: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    with TemporaryFile() as file:
        return np.memmap(file, np.uint8, "w+", shape=size)


SIDE, ALIKE, EVEN = 16, 2.5, 8.0
"""Of thumbnails: pixels of a side; two are near copies if their pixels differ by less than this (of 255, root mean
square) and vary by more than this."""
SAMPLE = 10_000
"""So many images in shards tell the mean and the spread of all."""
FEW = 10
"""A class with fewer pictures than this is named."""
MOST_UNREADABLE = 0.05
NAMED = 5
"""So many unreadable pictures are named where a task is refused for them."""
_PARTS = {"train", "val", "valid", "validation", "test"}


@dataclass(frozen=True)
class ClassFolders(ClassFiles):
    """The pictures of a folder of class folders, and the folder."""

    folder: Path = Path()
    index: Index | None = None
    """Of shards: what lies where; then there are no files."""


def list_pictures(folder: Path, classes: Sequence[str] | None = None) -> ClassFolders:
    """Every picture below every class folder, in the order of the classes: by name, or as given; the folders must then
    be among them."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give one that holds a folder of pictures for each class")
    if (folder / INDEX).is_file():
        return _in_shards(folder, classes)
    try:
        names = folders(folder)
        if "train" in names and set(names) <= _PARTS:
            rest = " and ".join(str(folder / name) for name in names if name != "train")
            raise ModelError(
                f"{folder} holds parts ({', '.join(names)}), not classes: learn from {folder / 'train'}, and measure "
                f"on {rest} with 'zeroforget verify --data'"
            )
        found = class_files(folder, classes)
    except DataError as error:
        raise ModelError(str(error)) from error
    _check_names(folder, found.classes)
    if len(names) > MOST_CLASSES:
        raise ModelError(f"{folder} holds {len(names):,} class folders; {MOST_CLASSES:,} are the most")
    if not found.files:
        raise ModelError(_nothing(folder, names, found.loose))
    return ClassFolders(**vars(found), folder=folder)


def _check_names(folder: Path, classes: Sequence[str]) -> None:
    if strange := next(filter(has_hidden, classes), None):
        raise ModelError(
            f"{folder}: the name of the class folder '{visible(strange)}' has signs that are not shown, or that turn "
            "the direction of a text; rename it"
        )


def _in_shards(folder: Path, classes: Sequence[str] | None) -> ClassFolders:
    """Pictures in shards; a test part that the data name is left alone."""
    try:
        index = open_index(str(folder))
    except DataError as error:
        raise ModelError(str(error)) from error
    _check_names(folder, index.classes)
    names = index.classes if classes is None else tuple(classes)
    if strange := [name for name in index.classes if name not in names]:
        raise ModelError(f"{strange[0]} is no class of this task; its classes are {', '.join(names)}")
    if len(names) > MOST_CLASSES:
        raise ModelError(f"{folder} holds {len(names):,} classes; {MOST_CLASSES:,} are the most")
    test = np.zeros(len(index.rows), bool) if index.drawn else index.rows.part == PARTS.index("test")
    rows = index.rows.chosen((~test).nonzero()[0])
    place = np.array([names.index(name) for name in index.classes], np.int32)
    index = replace(index, classes=names, rows=replace(rows, label=place[rows.label]))
    return ClassFolders(names, (), (), folder=folder, index=index)


def _nothing(folder: Path, names: Sequence[str], loose: int) -> str:
    if not loose:
        return f"{folder} holds no pictures; it should hold a folder of pictures for each class"
    what = "no pictures in its class folders" if names else "no class folders"
    return f"{folder} holds {counted(loose, 'picture')} but {what}; put each class's pictures into a folder of its own"


def check_apart(model: Path, folder: Path) -> None:
    """Refuse a model in the place of the pictures, and one among them: it would be taken for a class, or for pictures
    of one."""
    given = Folder(folder)
    if given.exists() and given.entries():
        raise ModelError(f"{folder} is a model, not pictures: name the model first, then the pictures")
    place, pictures = model.resolve(), folder.resolve()
    if place.is_relative_to(pictures) and not any(p.startswith(".") for p in place.relative_to(pictures).parts):
        raise ModelError(f"{model} is among the pictures; name a folder for the model that is not in {folder}")


@dataclass(frozen=True)
class Pictures:
    """Decoded pictures, and what could not be."""

    listing: ClassFolders
    images: Tensor | Images
    labels: Tensor
    unreadable: dict[Path, str]
    """Files that should be pictures, and why they are not."""

    @property
    def streamed(self) -> bool:
        """Whether they are read from shards again and again, since they are too many to be decoded once."""
        return isinstance(self.images, Images)

    @property
    def files(self) -> tuple[Path, ...]:
        """Where each picture lies."""
        if (index := self.listing.index) is not None:
            places = zip(index.rows.shard.tolist(), index.rows.start.tolist(), strict=True)
            return tuple(self.listing.folder / index.shards[shard].file / f"byte {start}" for shard, start in places)
        return tuple(file for file in self.listing.files if file not in self.unreadable)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many pictures each class has."""
        return tuple(torch.bincount(self.labels, minlength=len(self.listing.classes)).tolist())


def read_pictures(listing: ClassFolders, shape: Shape, *, told: Told | None = None) -> Pictures:
    """Decode a listing; the unreadable are set aside."""
    if listing.index is not None:
        treatment = Treatment(shape[1], fit="cover")
        held = InShards(listing.index, str(listing.folder), shape, treatment)
        known = torch.from_numpy(listing.index.rows.label).long()
        return Pictures(listing, held if math.prod(held.shape) > IN_MEMORY else held[:], known, {})
    images, wrong = decode_all(listing.files, shape, told)
    good = torch.tensor([row not in wrong for row in range(len(listing.files))])
    labels = torch.tensor(listing.labels)
    unreadable = {listing.files[row]: why for row, why in sorted(wrong.items())}
    return Pictures(listing, images if not wrong else images[good], labels[good], unreadable)


def check(pictures: Pictures, *, strict: bool, unreadable: float = MOST_UNREADABLE) -> list[str]:
    """What a person should know before training; ModelError if it cannot begin. `unreadable`: the share of pictures
    that may be."""
    listing, counts = pictures.listing, pictures.counts
    bad, total = pictures.unreadable, len(pictures.labels) + len(pictures.unreadable)
    notes = [f"{file} {why}" for file, why in list(bad.items())[:20]]
    if len(bad) > 20:
        notes.append(f"and {len(bad) - 20} more that cannot be read")
    if bad and (strict or len(bad) > unreadable * total):
        limit = "strict was asked for" if strict else f"more than {unreadable:.0%}; --unreadable 0.5 would allow half"
        named = [*notes[:NAMED], *([f"and {len(bad) - NAMED} more"] if len(bad) > NAMED else [])]
        raise ModelError(
            f"{len(bad)} of {total} pictures below {listing.folder} cannot be read ({limit}): {'; '.join(named)}"
        )
    if bad:
        notes.append(f"{len(bad)} of {total} pictures cannot be read and are skipped")
    if listing.ignored:
        notes.append(left_out(len(listing.ignored)))
    if listing.loose:
        notes.append(f"left out: {counted(listing.loose, 'picture')} beside the class folders")
    if len(listing.classes) < 2:
        raise ModelError(f"{listing.folder} holds one class, '{listing.classes[0]}'; a task needs at least two")
    lone = [name for name, n in zip(listing.classes, counts, strict=True) if n < 2]
    if lone:
        raise ModelError(
            f"{listing.folder}: class '{lone[0]}' has {counts[listing.classes.index(lone[0])]} readable picture(s); "
            "each class needs at least 2, one to learn from and one to judge by. Add some or remove the folder"
        )
    few = [f"{name} ({n})" for name, n in zip(listing.classes, counts, strict=True) if n < FEW]
    if few:
        notes.append(f"few pictures to learn from: {', '.join(few[:10])}{' …' if len(few) > 10 else ''}")
    if few and strict:
        raise ModelError(f"{listing.folder}: {notes[-1]} (strict was asked for)")
    if not pictures.streamed and (same := in_two_classes(pictures)):
        shown = "; ".join(f"{one} = {other}" for one, other in same[:5]) + ("; …" if same[5:] else "")
        notes.append(f"the same picture under two classes, {counted(len(same), 'time')}: {shown}")
        if strict:
            raise ModelError(f"{notes[-1]} (strict was asked for)")
    if max(counts) > 3 * min(counts):
        most, least = (listing.classes[counts.index(n)] for n in (max(counts), min(counts)))
        notes.append(f"uneven classes: {most} has {max(counts)} pictures, {least} has {min(counts)}")
    return notes


def in_two_classes(pictures: Pictures) -> list[tuple[Path, Path]]:
    """Pictures that are the same, pixel for pixel, and lie under two classes."""
    first: dict[str, int] = {}
    found, files, labels = [], pictures.files, pictures.labels.tolist()
    for row, image in enumerate(pictures.images[:]):
        other = first.setdefault(sha256(image.numpy().tobytes()), row)
        if labels[other] != labels[row]:
            found.append((files[other], files[row]))
    return found


def left_out(count: int) -> str:
    """What is said of files that never were pictures."""
    return f"{'1 file that is no picture is' if count == 1 else f'{count} files that are no pictures are'} left out"


def counted(number: int, thing: str, things: str = "") -> str:
    """So many things, in words: 1 file, 2 files."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def held_out(labels: Tensor, share: float, seed: int) -> Tensor:
    """Which pictures are held out: this share of each class, at least one and never all, drawn by the seed."""
    out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(int(labels.max()) + 1):
        rows = (labels == label).nonzero().squeeze(1)
        if len(rows) >= 2:
            count = min(max(1, round(share * len(rows))), len(rows) - 1)
            out[rows[torch.randperm(len(rows), generator=generator("held out", seed, label))[:count]]] = True
    return out


@dataclass(frozen=True)
class Lesson:
    """A task ready to be learned, with what is written down about it."""

    task: Task
    preprocessing: Preprocessing
    data: DataFacts
    notes: tuple[str, ...] = ()
    """What a person should know about its parts."""

    @property
    def selected(self) -> int:
        """How many pictures choose; none if training chooses by the pictures it learns from."""
        return 0 if self.task.val is self.task.train else len(self.task.val)


def lesson(
    name: str,
    pictures: Pictures,
    *,
    share: float,
    seed: int,
    flip: bool,
    shift: int,
    selection: float = 0.15,
    test: Pictures | None = None,
    normalized: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Lesson:
    """The task out of decoded pictures: three parts, and normalization by the statistics of what is learned from.

    `test` brings a test part of its own, `normalized` a mean and a std.
    """
    labels = pictures.labels
    aside = torch.zeros(len(labels), dtype=torch.bool) if test else held_out(labels, share, seed)
    measured = Split(test.images, test.labels) if test else _part(pictures, aside)
    learned, notes = _without_twins(pictures, ~aside, test or pictures, None if test else aside)
    choosing = selected(labels, learned, selection, seed)
    if choosing.any():
        fitted, more = _without_twins(pictures, learned & ~choosing, pictures, choosing, "selection")
        learned, notes = fitted | choosing, notes + more
    train = _part(pictures, learned & ~choosing)
    mean, std = normalized or statistics(pictures.images, (learned & ~choosing).nonzero().squeeze(1))
    mean, std = tuple(mean), tuple(std)
    val = _part(pictures, choosing) if choosing.any() else train
    channels, height, width = pictures.images.shape[1:]
    return Lesson(
        Task(name, pictures.listing.classes, train, val, measured, Preparation(mean, std, pad=shift, flip=flip)),
        Preprocessing("RGB" if channels == 3 else "L", (height, width), mean, std),
        DataFacts(
            pixels(measured), pictures.counts, len(pictures.unreadable), len(measured), 1.0 if test else share, seed
        ),
        notes,
    )  # fmt: skip


def _part(pictures: Pictures, chosen: Tensor) -> Split:
    rows = chosen.nonzero().squeeze(1)
    return Split(pictures.images, pictures.labels[rows], rows)


def selected(labels: Tensor, learned: Tensor, share: float, seed: int) -> Tensor:
    """Which of the pictures that are not for testing choose: a share of each class that has three of them or more."""
    out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        rows = ((labels == label) & learned).nonzero().squeeze(1)
        if len(rows) >= 3:
            count = max(1, round(share * len(rows)))
            out[rows[torch.randperm(len(rows), generator=generator("selection", seed, label))[:count]]] = True
    return out


def _without_twins(
    pictures: Pictures, learned: Tensor, others: Pictures, aside: Tensor | None, part: str = "test"
) -> tuple[Tensor, tuple[str, ...]]:
    """What is learned from without near copies of another part's pictures, which would flatter its figures."""
    if pictures.streamed or others.streamed:
        said = "pictures in two classes, and near copies of test pictures, are not looked for in so many"
        return learned, (said,) if part == "test" else ()
    tests = torch.arange(len(others.labels)) if aside is None else aside.nonzero().squeeze(1)
    rows = learned.nonzero().squeeze(1)
    pairs = near_copies(pictures.images, rows, others.images, tests)
    kept = learned.clone()
    kept[[row for row, _ in pairs]] = False
    emptied = [
        name for label, name in enumerate(pictures.listing.classes) if not (kept & (pictures.labels == label)).any()
    ]
    if not pairs:
        return learned, ()
    files, tested = pictures.files, others.files
    shown = "; ".join(f"{files[row]} ~ {tested[other]}" for row, other in pairs[:3]) + ("; …" if pairs[3:] else "")
    if emptied:
        return learned, (f"near copies of {part} pictures are learned from, so its accuracy flatters: {shown}",)
    return kept, (f"not learned from: {counted(len(pairs), 'near copy', 'near copies')} of {part} pictures: {shown}",)


def near_copies(images: Tensor | Images, rows: Tensor, others: Tensor | Images, tests: Tensor) -> list[tuple[int, int]]:
    """Pictures that look like one of the tests (resized or saved again), each with that one. Even ones do not count."""
    ours, theirs = thumbnails(images, rows), thumbnails(others, tests)
    found = []
    for start in range(0, len(rows), 1024):
        part = ours[start : start + 1024]
        away, nearest = torch.cdist(part, theirs).min(1)
        close = (away < ALIKE * SIDE) & (part.std(1) > EVEN)
        found += [
            (int(rows[start + place]), int(tests[nearest[place]])) for place in close.nonzero().squeeze(1).tolist()
        ]
    return found


def thumbnails(images: Tensor | Images, rows: Tensor) -> Tensor:
    """Of pictures: gray, small, one row of numbers each."""
    parts = [images[part].float().mean(1, keepdim=True) for part in rows.split(512)]
    return torch.cat([F.adaptive_avg_pool2d(part, SIDE).flatten(1) for part in parts])


def pixels(split: Split) -> str:
    """sha256 of a split's images and labels, in order; of a shard's images, what its index says of them."""
    digest = Digest()
    if isinstance(split.images, Images):
        digest.update(split.images.identity(torch.arange(len(split)) if split.rows is None else split.rows))
        digest.update(split.labels.numpy().tobytes())
        return digest.hexdigest()
    for rows in torch.arange(len(split)).split(512):
        images, labels = split.batch(rows)
        digest.update(images.numpy().tobytes())
        digest.update(labels.numpy().tobytes())
    return digest.hexdigest()


def statistics(images: Tensor | Images, rows: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, in [0, 1]; a constant channel gets 1/255. Of images in shards some
    are looked at, evenly spread."""
    if isinstance(images, Images) and len(rows) > SAMPLE:
        rows = rows[torch.linspace(0, len(rows) - 1, SAMPLE).long()]
    total = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for part in rows.split(512):
        values = images[part].double() / 255
        total += torch.stack([values.mean((2, 3)).sum(0), values.square().mean((2, 3)).sum(0)])
    mean, square = total / len(rows)
    std = (square - mean.square()).clamp_min(0).sqrt().clamp_min(1 / 255)
    return tuple(round(v, 6) for v in mean.tolist()), tuple(round(v, 6) for v in std.tolist())
