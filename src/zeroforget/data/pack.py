"""Packing a data set into shards, and indexing shards that others wrote: in parallel, and resumed where it stopped."""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zeroforget.data import shard_worker
from zeroforget.data.cache import fingerprint
from zeroforget.data.loading import Root, listed
from zeroforget.data.shards import COLUMNS, INDEX, PARTS, Index, Rows
from zeroforget.data.sources import FLIPPED, Source
from zeroforget.data.stream import Shard
from zeroforget.data.values import DataError, Listing, OnRead, Pixels, Treatment, set_apart
from zeroforget.files.atomic import make_folder, replace, write_bytes
from zeroforget.files.hashes import sha256
from zeroforget.files.locks import locked_if_possible

TARGET = 128e6
"""About so many bytes are a shard: enough to be read in one go, few enough to be many."""
MOST_IN_ONE = 10_000
WORK = ".packing"
PLAN = "plan.json"


@dataclass(frozen=True)
class Packed:
    """What packing came to."""

    index: Index
    bytes: int


def pack(
    name: str,
    out: Path,
    *,
    jpeg: int | None = None,
    size: int = 224,
    per_shard: int | None = None,
    workers: int | None = None,
    root: Root = None,
    progress: OnRead = lambda what, done, total: None,
) -> Packed:
    """Write a data set, or a folder of class folders, as shards into the folder `out`.

    Files are packed as they are; what is no file, or is cut to a box, as PNG of the pixels. With `jpeg` each picture is
    brought to its size now (`size`, where the data set has none of its own) and stored as JPEG of that quality.
    """
    if jpeg is not None and not 1 <= jpeg <= 100:
        raise DataError(f"the quality of a JPEG is 1 to 100, not {jpeg}")
    if (out / INDEX).exists():
        raise DataError(f"{out} holds shards already; name another folder, or remove it")
    entry, base, read = listed(name, root, size)
    work = out / WORK
    make_folder(work)
    with locked_if_possible(work / "lock"):
        packing = _Packing(entry, base, read, out, jpeg, per_shard)
        packing.keep_to_plan()
        found = _in_parallel(packing.jobs(progress), workers, packing.keep)
        index = packing.index(dict(found))
        index.write(out)
    shutil.rmtree(work)
    return Packed(index, sum(shard.bytes for shard in index.shards))


class _Packing:
    """One data set on its way into shards."""

    def __init__(
        self, entry: Source, base: Path, read: Listing | Pixels, out: Path, jpeg: int | None, per_shard: int | None
    ) -> None:
        self.entry, self.read, self.out, self.work = entry, read, out, out / WORK
        treatment = entry.treatment
        arrays, boxed = isinstance(read, Pixels), treatment is not None and treatment.boxes
        if isinstance(read, Pixels):
            self.shape, trim, fit = read.images.shape[1:], 0, "stretch"
            if self.shape[1] != self.shape[2]:
                raise DataError(f"images of '{entry.name}' are {self.shape[1]}x{self.shape[2]}; shards are square")
        else:
            assert treatment is not None
            self.shape, trim, fit = (3, treatment.size, treatment.size), treatment.trim, treatment.fit
        self.form = "jpeg" if jpeg is not None else "png" if arrays or boxed else "as is"
        self.manner: list[Any] = [[int(n) for n in self.shape], trim, fit]
        self.quality = jpeg or 0
        self.per_shard = per_shard or self._images_of_a_shard()

    def _images_of_a_shard(self) -> int:
        each = float(np.prod(self.shape))
        if isinstance(self.read, Listing) and self.form == "as is":
            some = np.linspace(0, len(self.read.files) - 1, min(1000, len(self.read.files))).astype(int)
            sizes = [_size(f"{self.read.base}/{self.read.files[row]}") for row in some]
            each = max(1.0, sum(sizes) / len(sizes))
        elif self.form == "jpeg":
            each /= 8
        return int(min(MOST_IN_ONE, max(1, TARGET // (each + 2048))))

    def keep_to_plan(self) -> None:
        """What is there of an interrupted packing is of this one, or there is none."""
        if isinstance(self.read, Pixels):
            content = sha256(self.read.images.tobytes() + self.read.labels.tobytes() + self.read.test.tobytes())
        else:
            assert self.entry.treatment is not None
            content = fingerprint(self.read, self.entry.treatment, official=False)
        plan = {"content": content, "form": self.form, "quality": self.quality, "per_shard": self.per_shard}
        text = json.dumps(plan | {"manner": self.manner}).encode()
        path = self.work / PLAN
        if not path.exists():
            write_bytes(path, text)
        elif path.read_bytes() != text:
            raise DataError(
                f"{self.out} holds the beginning of another packing (the pictures or the options were others); remove "
                f"{self.work} and its shards to start over"
            )

    def _parts(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        val = None if isinstance(self.read, Pixels) else self.read.val
        parts = np.where(self.read.test, PARTS.index("test"), 0).astype(np.uint8)
        return parts if val is None else np.where(val, np.uint8(PARTS.index("val")), parts)

    def jobs(self, progress: OnRead) -> Iterator[tuple[str, shard_worker.Job | None, Any]]:
        """Each shard's name with what is to be done for it, or with what was found when it was written.

        The pictures of a shard are drawn at random, so that a few shards show something of every class.
        """
        parts, total, done = self._parts(), len(self.read.labels), 0
        for number, part in enumerate(PARTS):
            rows = np.random.RandomState([314, number]).permutation(np.flatnonzero(parts == number))
            for place in range(math.ceil(len(rows) / self.per_shard)):
                file = f"{part}-{place:06d}.tar"
                mine = rows[place * self.per_shard : (place + 1) * self.per_shard]
                kept = self._kept(file)
                yield file, None if kept else self._job(file, mine.tolist()), kept
                done += len(mine)
                progress(f"packing {self.entry.name}", done, total)

    def _kept(self, file: str) -> Any:
        """What was found when this shard was written, if it is there."""
        note = self.work / f"{file}.json"
        try:
            found = json.loads(note.read_bytes())
            return found if (self.out / file).stat().st_size == found["bytes"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _job(self, file: str, rows: Sequence[int]) -> shard_worker.Job:
        read, boxes = self.read, None
        if isinstance(read, Listing):
            assert self.entry.treatment is not None
            boxes = read.boxes if self.entry.treatment.boxes else None
        pictures = [
            [
                row,
                f"{read.base}/{read.files[row]}" if isinstance(read, Listing) else row,
                int(read.labels[row]),
                None if boxes is None else boxes[row].tolist(),
            ]
            for row in rows
        ]
        pixels = None
        if isinstance(read, Pixels):
            pixels = self.work / "pixels.npy"
            if not pixels.exists():
                np.save(self.work / "aside.npy", read.images)
                (self.work / "aside.npy").rename(pixels)
        return {
            "do": "write", "path": str(self.work / file), "pictures": pictures, "manner": self.manner,
            "form": self.form, "quality": self.quality, "pixels": None if pixels is None else str(pixels),
        }  # fmt: skip

    def keep(self, file: str, found: Any) -> None:
        """A shard is written: it gets its name, and then a note of what is in it."""
        replace(self.work / file, self.out / file)
        write_bytes(self.work / f"{file}.json", json.dumps(found).encode())

    def index(self, found: dict[str, Any]) -> Index:
        """The index of all shards, in the order of the listing."""
        files = sorted(file for file in found if found[file]["rows"])
        shards = tuple(_shard(file, found[file]) for file in files)
        rows = [[*row, place] for place, file in enumerate(files) for row in found[file]["rows"]]
        if not rows:
            raise DataError(f"none of the pictures of '{self.entry.name}' can be used")
        number, start, size, shard = np.array(sorted(rows), np.int64).T
        columns = {"start": start, "size": size, "shard": shard}
        columns |= {"label": self.read.labels[number], "part": self._parts()[number]}
        shape, trim, fit = self.manner
        fixed = self.form != "as is"
        treatment = Treatment(shape[1], trim=0 if fixed else trim, fit="stretch" if fixed else fit)
        codes = () if isinstance(self.read, Pixels) else self.read.codes
        return Index(
            self.entry.name, self.read.classes, codes, shape[0], treatment, fixed, self.entry.prepare, shards,
            Rows.of(columns), _left_out(found), bool((self.read.test == set_apart(self.read.labels)).all()),
        )  # fmt: skip


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0


def _shard(file: str, found: Any) -> Shard:
    return Shard(file, found["bytes"], found["sha256"], len(found["rows"]))


def _left_out(found: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(name), str(why)) for each in found.values() for name, why in each["bad"]))


# Shards that others wrote --------------------------------------------------------------------------------------------


def index_shards(
    folder: Path,
    *,
    classes: Sequence[str] | None = None,
    size: int = 224,
    workers: int | None = None,
    progress: OnRead = lambda what, done, total: None,
) -> Packed:
    """Index the tar files of a folder, written by WebDataset or another program.

    A tar with the word `test` in its name holds test images, one with `val` or `validation` those for validation, as in
    a folder: without `test`, the latter are for testing, and without either a fifth of each class is.
    """
    if not folder.is_dir():
        raise DataError(f"{folder.absolute()} is no folder; name one that holds tar files")
    files = sorted(file.relative_to(folder).as_posix() for file in folder.glob("**/*.tar") if file.is_file())
    if not files:
        raise DataError(f"{folder} holds no tar files")
    manner = [[3, size, size], 0, "cover"]

    def jobs() -> Iterator[tuple[str, shard_worker.Job | None, Any]]:
        for number, file in enumerate(files, 1):
            yield file, {"do": "read", "path": str(folder / file), "manner": manner}, None
            progress(f"indexing {folder.name}", number, len(files))

    found = dict(_in_parallel(jobs(), workers))
    if damaged := [each["damaged"] for each in found.values() if "damaged" in each]:
        raise DataError(f"{damaged[0]}; bring it back, or take it away")
    parts = _parts_by_name(files)
    rows = [[*row, place, parts[place]] for place, file in enumerate(files) for row in found[file]["rows"]]
    if not rows:
        raise DataError(f"no tar file in {folder} holds a picture with its label ('key.jpg' and 'key.cls')")
    label, start, size_, shard, part = np.array(rows, np.int64).T
    if drawn := "test" not in {PARTS[number] for number in parts}:
        part = np.where(set_apart(label), PARTS.index("test"), part)
    names = _names(classes, int(label.max()) + 1)
    columns = dict(zip(COLUMNS, (start, size_, label, shard, part), strict=True))
    index = Index(
        folder.resolve().name, names, (), 3, Treatment(size, fit="cover"), False, FLIPPED,
        tuple(_shard(file, found[file]) for file in files), Rows.of(columns), _left_out(found), drawn,
    )  # fmt: skip
    index.write(folder)
    return Packed(index, sum(shard.bytes for shard in index.shards))


def _names(classes: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if classes is None:
        return tuple(f"{number:0{len(str(count - 1))}d}" for number in range(max(2, count)))
    if len(classes) < count:
        raise DataError(f"labels run to {count - 1}, but {len(classes)} classes are named; there must be one for each")
    return tuple(classes)


def _parts_by_name(files: Sequence[str]) -> list[int]:
    words = [set("".join(sign if sign.isalpha() else " " for sign in file.lower()).split()) for file in files]
    held = [bool({"val", "valid", "validation"} & each) for each in words]
    tests = ["test" in each for each in words]
    if not any(tests):
        tests, held = held, [False] * len(files)
    return [
        PARTS.index("test") if test else PARTS.index("val") if val else 0 for test, val in zip(tests, held, strict=True)
    ]


# In parallel ---------------------------------------------------------------------------------------------------------


def _in_parallel(
    jobs: Iterator[tuple[str, shard_worker.Job | None, Any]], workers: int | None, keep: Any = lambda file, found: None
) -> Iterator[tuple[str, Any]]:
    """Each shard's name and what was found for it; `keep` is told of each that was done now, as soon as it is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = workers or cores
    idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
    processes: list[Any] = []
    room = threading.Semaphore(2 * count)  # a job is as long as its list of files: few wait at a time

    def one(file: str, job: shard_worker.Job) -> tuple[str, Any]:
        process = idle.get() if processes else None
        try:
            found = shard_worker.done(job) if process is None else shard_worker.ask(process, job)
            if "damaged" not in found:
                keep(file, found)
            return file, found
        finally:
            room.release()
            if process is not None:
                idle.put(process)

    if count > 1:
        processes = [shard_worker.worker() for _ in range(count)]
        for process in processes:
            idle.put(process)
    try:
        with ThreadPoolExecutor(count) as threads:
            waiting = []
            try:
                for file, job, kept in jobs:
                    if job is None:
                        yield file, kept
                        continue
                    room.acquire()
                    waiting.append(threads.submit(one, file, job))
                    if failed := next((each for each in waiting if each.done() and each.exception()), None):
                        failed.result()
                for each in as_completed(waiting):
                    yield each.result()
            except BaseException:
                for each in waiting:
                    each.cancel()
                for process in processes:
                    process.kill()
                raise
    finally:
        for process in processes:
            process.kill()
            process.communicate()
