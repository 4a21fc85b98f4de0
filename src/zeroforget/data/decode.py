"""Decodes image files into one array on disk, in as many processes as there are cores.

The workers run this very file as a script, so it imports nothing of ours. They are processes because the work on one
small image is mostly Python's own: on two cores 10,000 images of 64x64 take 1.7 s in one process, 1.6 s in two threads
and 0.7 s in two processes.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

Bytes = npt.NDArray[np.uint8]
Item = tuple[str, Sequence[float] | None]
"""A file and the box to cut out of it."""
Manner = tuple[int, int, bool]
"""Size, rows to trim off, and whether to turn images upright."""
Damage = tuple[str, str]
"""A file and what is wrong with it."""

CHUNK = 128
ALONE = 512
"""Fewer images than this are decoded right here: starting workers would take longer."""
BAND = 2**20
"""So many values of a picture are scaled at a time."""
OVERSHOOT = 1.5
"""So many times white is still white, a little too bright: resampling makes such values at edges."""
ENOUGH = 100
"""So many damaged files mean that something is wrong with all of them."""


def decode(path: str, size: int, box: Sequence[float] | None = None, trim: int = 0, upright: bool = False) -> Bytes:
    """One image as bytes `(3, size, size)`: turned upright if asked, cut to the box, or `trim` rows off its foot, then
    resized."""
    with Image.open(path) as opened:
        if upright:
            ImageOps.exif_transpose(opened, in_place=True)
        image = plain(opened, opened.format).convert("RGB")
    width, height = image.size
    left, top, right, bottom = (round(edge) for edge in box or (0, 0, width, height - trim))
    region = (max(left, 0), max(top, 0), min(right, width), min(bottom, height))
    if region[2] <= region[0] or region[3] <= region[1]:
        raise ValueError(f"its box {region} is empty; the image is {width}x{height}")
    if region != (0, 0, width, height):
        image = image.crop(region)  # resize's own box would let what lies around it shine in
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


def plain(picture: Image.Image, form: str | None) -> Image.Image:
    """Eight bits a channel: larger and floating values are scaled, what is transparent is white. `form`: its format."""
    if picture.mode.startswith(("I", "F")):
        values = np.asarray(picture)
        finite = np.isfinite(values)
        if not finite.any():
            raise ValueError("none of its pixels is a finite number")
        largest = float(values.max(initial=0, where=finite))
        return Image.fromarray(_to_bytes(values, _brightest(picture.mode, form, largest)))
    if picture.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return picture


def _brightest(mode: str, form: str | None, largest: float) -> float:
    """The value that stands for white. Files do not say it for every mode: then the values themselves decide."""
    if mode == "F" and largest <= OVERSHOOT:
        return 1.0
    sixteen = mode.startswith("I;16") or (mode == "I" and form in {"PPM", "PNG"})
    return 65535.0 if sixteen or largest > OVERSHOOT * 255 else 255.0


def _to_bytes(values: npt.NDArray[Any], top: float) -> Bytes:
    """From 0 to `top` onto 0 to 255, a few rows at a time: float64 has eight times the bytes of the result."""
    out = np.empty(values.shape, np.uint8)
    rows = max(1, BAND // values.shape[1])
    for start in range(0, len(values), rows):
        part = values[start : start + rows].astype(np.float64)
        out[start : start + rows] = (np.nan_to_num(part).clip(0, top) / top * 255).round()
    return out


def decode_chunk(target: Bytes, first: int, items: Sequence[Item], manner: Manner) -> list[Damage]:
    """Decode into the rows of `target` from `first` on; what cannot be decoded is named and left black."""
    damaged = []
    size, trim, upright = manner
    for row, (path, box) in enumerate(items, first):
        try:
            target[row] = decode(path, size, box, trim, upright)
        except FileNotFoundError:
            damaged.append((path, "is missing"))
        except Exception as error:  # decoders fail in many ways on damaged files
            damaged.append((path, f"cannot be decoded: {error}"))
    return damaged


def decode_all(
    array: str, items: Sequence[Item], manner: Manner, workers: int, told: Callable[[int, list[Damage]], None]
) -> list[Damage]:
    """Fill the array file with all images, in order. `told` hears after each chunk how many are done and what was
    found damaged. Gives up early when a hundred are."""
    chunks = [(start, items[start : start + CHUNK]) for start in range(0, len(items), CHUNK)]
    alone = workers < 2 or len(items) < ALONE
    done, damaged = 0, []
    for count, bad in _here(array, chunks, manner) if alone else _there(array, chunks, manner, workers):
        done += count
        damaged += bad
        told(done, bad)
        if len(damaged) >= ENOUGH:
            break
    return damaged


Chunks = list[tuple[int, Sequence[Item]]]


def _here(array: str, chunks: Chunks, manner: Manner) -> Iterator[tuple[int, list[Damage]]]:
    target = np.load(array, mmap_mode="r+")
    for first, items in chunks:
        yield len(items), decode_chunk(target, first, items, manner)
    target.flush()


def _there(array: str, chunks: Chunks, manner: Manner, workers: int) -> Iterator[tuple[int, list[Damage]]]:
    """Each worker process has a thread here that hands it chunks and passes its answers on."""
    work: queue.SimpleQueue[tuple[int, Sequence[Item]]] = queue.SimpleQueue()
    for chunk in chunks:
        work.put(chunk)
    answers: queue.SimpleQueue[tuple[int, list[Damage]] | Exception] = queue.SimpleQueue()
    processes = [_worker() for _ in range(min(workers, len(chunks)))]
    feeders = [
        threading.Thread(target=_feed, args=(process, work, answers, (array, manner)), daemon=True)
        for process in processes
    ]
    for feeder in feeders:
        feeder.start()
    try:
        for _ in chunks:
            answer = answers.get()
            if isinstance(answer, Exception):
                raise answer
            yield answer
    finally:
        for process, feeder in zip(processes, feeders, strict=True):
            process.kill()
            feeder.join()
            process.communicate()


def _worker() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", __file__],
        stdin=subprocess.PIPE,  # its end, when this process dies, ends the worker
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # an interrupt from the keyboard is for this process alone
    )


def _feed(
    process: subprocess.Popen[str],
    work: queue.SimpleQueue[tuple[int, Sequence[Item]]],
    answers: queue.SimpleQueue[tuple[int, list[Damage]] | Exception],
    setting: tuple[str, Manner],
) -> None:
    try:
        while not work.empty():
            first, items = work.get_nowait()
            print(json.dumps([*setting, first, items]), file=process.stdin, flush=True)
            answer = process.stdout.readline() if process.stdout else ""
            if not answer:
                raise OSError("a process that decodes images died; is there enough memory?")
            answers.put((len(items), [(path, reason) for path, reason in json.loads(answer)]))
    except queue.Empty:
        pass
    except (OSError, ValueError) as error:
        answers.put(error)


def _serve() -> None:
    targets: dict[str, Any] = {}
    for line in sys.stdin:
        array, manner, first, items = json.loads(line)
        if array not in targets:
            targets[array] = np.load(array, mmap_mode="r+")
        print(json.dumps(decode_chunk(targets[array], first, items, manner)), flush=True)


if __name__ == "__main__":
    _serve()
