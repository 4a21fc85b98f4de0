"""Data sets that come as arrays: scikit-learn's digits, MNIST and Fashion-MNIST (IDX files), CIFAR (pickles)."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroforget.data.extract import ALWAYS, MOST_RATIO
from zeroforget.data.readers.pickled import read_pickle
from zeroforget.data.values import DataError, Pixels, set_apart


def read_digits(folder: Path) -> Pixels:
    """Grey levels 0..16 stretched to bytes. A fifth of each class, the same for every seed, stands in for the test
    set that the authors did not set apart. No folder is read."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.int64)
    return Pixels(images, labels, set_apart(labels), tuple(str(digit) for digit in range(10)))


FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
DIGITS = tuple(str(digit) for digit in range(10))
UNSIGNED_BYTES = 8


def read_mnist(folder: Path) -> Pixels:
    """The digits of MNIST."""
    return _idx_files(folder, DIGITS)


def read_fashion_mnist(folder: Path) -> Pixels:
    """The clothes of Fashion-MNIST."""
    return _idx_files(folder, FASHION)


def _idx_files(folder: Path, classes: tuple[str, ...]) -> Pixels:
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


def read_cifar10(folder: Path) -> Pixels:
    """Five training batches and one of testing."""
    train = [f"data_batch_{number}" for number in range(1, 6)]
    return _batches(folder, train, "test_batch", "labels", ("batches.meta", "label_names"))


def read_cifar100(folder: Path) -> Pixels:
    """The hundred fine classes."""
    return _batches(folder, ["train"], "test", "fine_labels", ("meta", "fine_label_names"))


def _batches(folder: Path, train: Sequence[str], test: str, key: str, names: tuple[str, str]) -> Pixels:
    classes = tuple(_text(name) for name in _field(folder / names[0], read_pickle(folder / names[0]), names[1]))
    images, labels, marks = [], [], []
    for name in (*train, test):
        path = folder / name
        batch = read_pickle(path)
        data, numbers = _field(path, batch, "data"), np.asarray(_field(path, batch, key), dtype=np.int64)
        if data.ndim != 2 or data.shape != (len(numbers), 3 * 32 * 32):
            raise DataError(f"{path} is damaged: {data.shape} values of pixels for {len(numbers)} labels")
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(classes):
            raise DataError(f"{path} is damaged: labels outside 0 to {len(classes) - 1}")
        images.append(data.reshape(-1, 3, 32, 32))
        labels.append(numbers)
        marks.append(np.full(len(numbers), name == test))
    return Pixels(np.concatenate(images), np.concatenate(labels), np.concatenate(marks), classes)


def _field(path: Path, batch: dict[str, Any], key: str) -> Any:
    if key not in batch:
        raise DataError(f"{path} is damaged: it has no '{key}'")
    return batch[key]


def _text(name: Any) -> str:
    return name.decode("utf-8") if isinstance(name, bytes) else str(name)
