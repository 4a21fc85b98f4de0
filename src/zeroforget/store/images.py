"""Pictures of any size, mode and common format as bytes of one shape. What cannot be used is named, never guessed."""

from __future__ import annotations

import io
import os
import stat
import struct
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from zeroforget.data.decode import plain
from zeroforget.store.errors import TooManyPixels, Unreadable

MOST_PIXELS = 80_000_000
"""Larger pictures are refused before they are decoded: a small file can claim to be enormous."""
IN_MEMORY = 2**30
"""Above so many bytes, decoded pictures lie in a temporary file that is mapped into memory."""
_FORMATS = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF", "PPM", "TGA", "ICO", "JPEG2000")
ENDINGS = frozenset(
    f".{ending}"
    for ending in "jpg jpeg jpe jfif png gif webp avif bmp tif tiff ppm pgm pbm tga ico jp2 mpo heic heif jxl".split()  # noqa: SIM905
)
"""Of pictures, also of formats that are not read here: such a file is told of, others are left out."""

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

Shape = tuple[int, int, int]
Source = str | os.PathLike[str] | bytes | Image.Image
SOURCES = (str, os.PathLike, bytes, Image.Image)
"""The same kinds, for `isinstance`."""
Told = Callable[[int, int], None]


@cache
def _formats() -> list[str]:
    """The formats that are pixels and nothing else; PostScript, for one, would run a program."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def decode(source: Source, shape: Shape, most: int = MOST_PIXELS) -> Tensor:
    """One picture as bytes of this shape: upright, covering the shape, cut in the middle; transparency is white."""
    try:
        if isinstance(source, Image.Image):
            return _fitted(source, shape)
        if not isinstance(source, bytes) and not stat.S_ISREG(mode := Path(source).stat().st_mode):
            if stat.S_ISDIR(mode):
                raise Unreadable("is a folder; pass the pictures in it, such as sorted(Path(folder).rglob('*.png'))")
            raise Unreadable("is no regular file")  # to open a pipe would wait for whoever writes into it
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_formats()) as picture:
            width, height = picture.size
            if width * height > most:
                raise TooManyPixels(f"has {width}×{height} pixels; at most {most:,} are decoded")
            picture.draft("RGB", (2 * shape[2], 2 * shape[1]))  # a JPEG can be decoded small; others ignore this
            return _fitted(picture, shape)
    except Unreadable:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise TooManyPixels(f"has too many pixels; at most {most:,} are decoded") from None
    except FileNotFoundError:
        raise Unreadable("is missing") from None
    except PermissionError:
        raise Unreadable("may not be read by this user") from None
    except UnidentifiedImageError:
        empty = isinstance(source, (str, os.PathLike)) and Path(source).stat().st_size == 0
        raise Unreadable("is empty" if empty else "is no picture of a format that is read here") from None
    except Exception as error:  # decoders raise all kinds; whatever it is, the picture cannot be had
        raise Unreadable(f"cannot be decoded: {str(error) or type(error).__name__}") from None


def _fitted(picture: Image.Image, shape: Shape) -> Tensor:
    channels, height, width = shape
    picture = plain(_upright(picture), picture.format)
    picture = picture.convert("L" if channels == 1 else "RGB")
    if picture.size != (width, height):
        scale = max(width / picture.width, height / picture.height)
        left, top = (picture.width - width / scale) / 2, (picture.height - height / scale) / 2
        box = (max(0.0, left), max(0.0, top), picture.width - max(0.0, left), picture.height - max(0.0, top))
        picture = picture.resize((width, height), Image.Resampling.BILINEAR, box=box)
    array = np.array(picture, dtype=np.uint8)
    return torch.from_numpy(array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1)))


def _upright(picture: Image.Image) -> Image.Image:
    """Turned as its notes say. Pillow's own function writes the other notes anew, and fails on odd ones."""
    picture.load()  # first the pixels, which must be whole
    try:
        turn = _UPRIGHT.get(picture.getexif().get(_ORIENTATION, 1))
    except _ODD_NOTES:  # they say nothing, and the pixels are there
        return picture
    return picture if turn is None else picture.transpose(turn)


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
