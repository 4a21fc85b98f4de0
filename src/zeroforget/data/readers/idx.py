"""MNIST and Fashion-MNIST: IDX files, gzipped or not."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zeroforget.data.collection import DataError, Pixels
from zeroforget.data.extract import ALWAYS, MOST_RATIO

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
DIGITS = tuple(str(digit) for digit in range(10))
UNSIGNED_BYTES = 8


def read_mnist(folder: Path) -> Pixels:
    """The digits of MNIST."""
    return _read(folder, DIGITS)


def read_fashion_mnist(folder: Path) -> Pixels:
    """The clothes of Fashion-MNIST."""
    return _read(folder, FASHION)


def _read(folder: Path, classes: tuple[str, ...]) -> Pixels:
    images, labels, test = [], [], []
    for part in ("train", "t10k"):
        pictures = read_idx(_found(folder, f"{part}-images-idx3-ubyte"), dimensions=3)
        marks = read_idx(_found(folder, f"{part}-labels-idx1-ubyte"), dimensions=1)
        if len(pictures) != len(marks):
            raise DataError(f"{folder}: {len(pictures)} {part} images but {len(marks)} labels")
        if len(marks) and marks.max() >= len(classes):
            raise DataError(f"{folder}: a {part} label is {marks.max()}, but the classes are 0 to {len(classes) - 1}")
        images.append(pictures)
        labels.append(marks)
        test.append(np.full(len(marks), part == "t10k"))
    joined = np.concatenate(images)[:, None]
    return Pixels(joined, np.concatenate(labels).astype(np.int64), np.concatenate(test), classes)


def _found(folder: Path, stem: str) -> Path:
    for name in (stem, f"{stem}.gz", stem.replace("-idx", ".idx"), stem.replace("-idx", ".idx") + ".gz"):
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder / stem}.gz is missing")


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """An IDX file of bytes: two zeros, the type, the number of dimensions, their sizes, then the values."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        most = max(ALWAYS, MOST_RATIO * len(raw))
        try:
            with gzip.open(path) as file:
                raw = file.read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged: {error}") from error
        if len(raw) > most:
            raise DataError(f"{path} is refused: it unpacks to more than {most:,} bytes, too many for its size")
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes((0, 0, UNSIGNED_BYTES, dimensions)):
        raise DataError(f"{path} is damaged: it does not start as an IDX file of {dimensions} dimension(s) does")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    values = np.frombuffer(raw, dtype=np.uint8, offset=header)
    if values.size != np.prod(shape, dtype=np.int64):
        raise DataError(
            f"{path} is damaged: {values.size} values where its header promises {' x '.join(map(str, shape))}"
        )
    return values.reshape(shape)
