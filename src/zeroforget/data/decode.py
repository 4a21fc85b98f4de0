"""The one decoder of pictures, and its workers, which fill an array on disk in as many processes as there are cores.

The workers run this very file as a script, so it imports nothing of ours. They are processes because the work on one
small image is mostly Python's own: on two cores 10,000 images of 64x64 take 1.7 s in one process, 1.6 s in two threads
and 0.7 s in two processes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

Bytes = npt.NDArray[np.uint8]
Source = str | os.PathLike[str] | IO[bytes]
Item = tuple[str, Sequence[float] | None] | tuple[str, Sequence[float] | None, Sequence[int]]
"""A file and the box to cut out of it; for a picture inside a larger file also where it begins and how long it is."""
Manner = tuple[int | Sequence[int], int, str]
"""Size (or channels, height and width), rows to trim off, and how an image comes to its size: "stretch" or "cover"."""
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


FORMATS = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF", "PPM", "TGA", "JPEG2000", "HEIF", "JXL")
"""The formats that are pixels and nothing else; PostScript, for one, would start a program. And that tell their size
before they are decoded: an icon of 16×16 may hold a picture of 13000×13000."""
PLUGINS = {"heic": "pillow-heif", "heif": "pillow-heif", "jxl": "pillow-jxl-plugin"}
"""Endings of formats that Pillow reads once a package is installed."""
ENDINGS = frozenset(
    f".{ending}"
    for ending in "jpg jpeg jpe jfif png gif webp avif bmp tif tiff ppm pgm pbm tga ico jp2 mpo heic heif jxl".split()  # noqa: SIM905
)
"""Of pictures, also of formats that are not read without a plugin: such a file is named, others are left out."""
MOST_PIXELS = 80_000_000
"""Larger pictures are refused before they are decoded: a small file can claim to be enormous."""
MOST_SCANS = 100
"""A progressive JPEG has about ten; each costs a pass over all of its pixels."""
MOST_FRAMES = 1000
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each of Exif's orientations."""
_ODD_NOTES = (SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, OSError, struct.error)
"""What Pillow raises where Exif cannot be read."""


class TooLarge(ValueError):
    """A picture has more pixels than are decoded."""


@cache
def formats() -> list[str]:
    """The formats that can be read here, out of `FORMATS`."""
    Image.init()
    with contextlib.suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()
    with contextlib.suppress(ImportError):
        importlib.import_module("pillow_jxl")
    return [name for name in FORMATS if name in Image.OPEN]


def needs(path: str) -> str | None:
    """What to install for a file of this name, if its format is read by a plugin that is not there."""
    ending = path.rpartition(".")[2].lower()
    if ending not in PLUGINS or ("JXL" if ending == "jxl" else "HEIF") in formats():
        return None
    return f"is {'JPEG XL' if ending == 'jxl' else 'HEIC'}, which needs a plugin: pip install {PLUGINS[ending]}"


@cache
def _simplejpeg() -> Any:
    """The quicker decoder of JPEG, where it is installed. Its bits are Pillow's: both use libjpeg-turbo."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _swift(source: Source, size: tuple[int, int], smallest: tuple[int, int] | None = None) -> Bytes | None:
    """A JPEG's pixels by the quicker decoder, four bytes each (three if it has this size already); None where Pillow is
    needed, for whatever reason.

    With `smallest` (height, width) the picture is to be turned upright, and may be decoded smaller, both of which
    Pillow does.
    """
    quick = _simplejpeg()
    if quick is None:
        return None
    data = _content(source)
    if not data.startswith(b"\xff\xd8\xff") or (smallest and b"Exif" in data[:65536]):
        return None
    try:
        height, width, colours, _ = quick.decode_jpeg_header(data)
        if colours not in {"YCbCr", "Gray"} or width * height > MOST_PIXELS:
            return None
        if smallest and min(height // (2 * smallest[0]), width // (2 * smallest[1])) > 1:
            return None
        pixels: Bytes = quick.decode_jpeg(data, "RGB" if (height, width) == size else "RGBX")
    except ValueError:  # a damaged file: Pillow says what is wrong
        return None
    return pixels


def _content(source: Source) -> bytes:
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as file:  # noqa: PTH123 - a million times
            return file.read() if file.read(3) == b"\xff\xd8\xff" and not file.seek(0) else b""
    content = source.read()
    source.seek(0)
    return content


def decode(
    path: Source, size: int | Sequence[int], box: Sequence[float] | None = None, trim: int = 0, fit: str = "stretch"
) -> Bytes:
    """One image as bytes `(3, size, size)`, or of the shape given. "stretch" is for official data sets: cut to the box,
    or `trim` rows off its foot, then resized. "cover" is for people's own: see `covering`."""
    channels, tall, wide = (3, size, size) if isinstance(size, int) else size
    if fit == "cover":
        return covering(path, (channels, tall, wide))
    pixels = _swift(path, (tall, wide)) if channels == 3 else None
    if pixels is not None and pixels.shape[2] == 3 and box is None and not trim:
        return pixels.transpose(2, 0, 1)
    if pixels is not None:
        image = _picture(pixels)
    else:
        with Image.open(path, formats=formats()) as opened:
            image = plain(opened, opened.format).convert("RGB" if channels == 3 else "L")
    width, height = image.size
    left, top, right, bottom = (round(edge) for edge in box or (0, 0, width, height - trim))
    region = (max(left, 0), max(top, 0), min(right, width), min(bottom, height))
    if region[2] <= region[0] or region[3] <= region[1]:
        raise ValueError(f"its box {region} is empty; the image is {width}x{height}")
    if region != (0, 0, width, height):
        image = image.crop(region)  # resize's own box would let what lies around it shine in
    if image.size != (wide, tall):
        image = image.resize((wide, tall), Image.Resampling.BILINEAR)
    return np.asarray(image)[..., :3].transpose(2, 0, 1) if channels == 3 else np.asarray(image)[None]


def _picture(pixels: Bytes) -> Image.Image:
    """Pixels for Pillow, which copies none that have four bytes."""
    if pixels.shape[2] == 3:
        return Image.fromarray(pixels)
    return Image.frombuffer("RGBX", pixels.shape[1::-1], pixels, "raw", "RGBX", 0, 1)


def covering(source: Source, shape: tuple[int, int, int], most: int = MOST_PIXELS) -> Bytes:
    """A picture as bytes of this shape: turned upright, its shorter side scaled to fit, its centre cut out."""
    if shape[0] == 3 and most == MOST_PIXELS and (pixels := _swift(source, shape[1:], shape[1:])) is not None:
        return pixels.transpose(2, 0, 1) if pixels.shape[2] == 3 else _fitted(_picture(pixels), shape)
    with Image.open(source, formats=formats()) as picture:
        width, height = picture.size
        if width * height > most:
            raise TooLarge(f"has {width}×{height} pixels; at most {most:,} are decoded")
        _check_cost(picture)
        picture.draft("RGB", (2 * shape[2], 2 * shape[1]))  # a JPEG can be decoded small; others ignore this
        return fitted(picture, shape)


def _check_cost(picture: ImageFile.ImageFile) -> None:
    """ValueError for a file that is made to cost far more than its pixels."""
    if picture.format in {"JPEG", "MPO"} and picture.fp is not None:
        picture.fp.seek(0)
        if (scans := picture.fp.read().count(b"\xff\xda")) > MOST_SCANS:
            raise ValueError(f"it has {scans:,} scans; at most {MOST_SCANS} are decoded")
    elif (frames := getattr(picture, "n_frames", 1)) > MOST_FRAMES:
        raise ValueError(f"it has {frames:,} frames; at most {MOST_FRAMES:,} are read")


def fitted(picture: Image.Image, shape: tuple[int, int, int]) -> Bytes:
    """An opened picture, as `covering` gives it; transparency is white."""
    picture = plain(_upright(picture), picture.format)
    mode = "L" if shape[0] == 1 else "RGB"
    return _fitted(picture if picture.mode == mode else picture.convert(mode), shape)


def _fitted(picture: Image.Image, shape: tuple[int, int, int]) -> Bytes:
    channels, height, width = shape
    if picture.size != (width, height):
        scale = max(width / picture.width, height / picture.height)
        left, top = (picture.width - width / scale) / 2, (picture.height - height / scale) / 2
        box = (max(0.0, left), max(0.0, top), picture.width - max(0.0, left), picture.height - max(0.0, top))
        picture = picture.resize((width, height), Image.Resampling.BILINEAR, box=box)
    array = np.array(picture, dtype=np.uint8)
    return array[None] if channels == 1 else np.ascontiguousarray(array[..., :3].transpose(2, 0, 1))


def _upright(picture: Image.Image) -> Image.Image:
    """Turned as its notes say. Pillow's own function writes the other notes anew, and fails on odd ones."""
    picture.load()  # first the pixels, which must be whole
    try:
        turn = _UPRIGHT.get(picture.getexif().get(_ORIENTATION, 1))
    except _ODD_NOTES:  # they say nothing, and the pixels are there
        return picture
    return picture if turn is None else picture.transpose(turn)


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
    size, trim, fit = manner
    for row, (path, box, *span) in enumerate(items, first):
        try:
            target[row] = decode(_part(path, *span[0]) if span else path, size, box, trim, fit)
        except FileNotFoundError:
            damaged.append((path, "is missing"))
        except Exception as error:  # decoders fail in many ways on damaged files
            damaged.append((path, needs(path) or f"cannot be decoded: {error}"))
    return damaged


def _part(path: str, start: int, length: int) -> IO[bytes]:
    """So many bytes of a file, from one of them on."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        os.lseek(handle, start, os.SEEK_SET)
        content = os.read(handle, length)
    finally:
        os.close(handle)
    if len(content) < length:
        raise ValueError(f"its file ends after {len(content)} of its {length} bytes")
    return io.BytesIO(content)


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
    processes = [worker() for _ in range(min(workers, len(chunks)))]
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


def worker() -> subprocess.Popen[str]:
    """A process that decodes what `ask` asks it to; it ends with this one."""
    return script(__file__)


def script(*words: str) -> subprocess.Popen[str]:
    """A process of Python that hears lines, answers each with one, and ends with this one."""
    # Memory that one picture gave back is for the next one: to ask the system for it anew took a third of the time.
    keeping = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**28))
    environment = {**os.environ, **keeping, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    return subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", *words],
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
            answers.put((len(items), ask(process, *setting, first, items)))
    except queue.Empty:
        pass
    except (OSError, ValueError) as error:
        answers.put(error)


def ask(process: subprocess.Popen[str], array: str, manner: Manner, first: int, items: Sequence[Item]) -> list[Damage]:
    """Let a worker do what `decode_chunk` does, into this array file."""
    return [(path, reason) for path, reason in answered(process, [array, manner, first, items])]


def answered(process: subprocess.Popen[str], question: Any) -> Any:
    """What such a process answers."""
    answer = ""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(question), file=process.stdin, flush=True)
        answer = process.stdout.readline() if process.stdout else ""
    if not answer:
        raise OSError("a process that decodes images died; is there enough memory?")
    return json.loads(answer)


def _serve() -> None:
    targets: dict[str, Any] = {}
    for line in sys.stdin:
        array, manner, first, items = json.loads(line)
        if array not in targets:
            targets[array] = np.load(array, mmap_mode="r+")
        print(json.dumps(decode_chunk(targets[array], first, items, manner)), flush=True)


if __name__ == "__main__":
    _serve()
