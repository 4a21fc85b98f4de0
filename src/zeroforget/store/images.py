"""Pictures from wherever they come, as the one decoder makes them. What cannot be used is named, never guessed."""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from zeroforget.data.decode import MOST_PIXELS, TooLarge, covering, fitted, needs
from zeroforget.nets import Shape
from zeroforget.store.errors import TooManyPixels, Unreadable

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
