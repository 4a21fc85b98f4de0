"""CIFAR-10 and CIFAR-100 from their official Python batches, read without unpickling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zeroforget.data.collection import DataError, Pixels
from zeroforget.data.readers.pickled import read_pickle


def read_cifar10(folder: Path) -> Pixels:
    """Five training batches and one of testing."""
    train = [f"data_batch_{number}" for number in range(1, 6)]
    return _read(folder, train, "test_batch", "labels", ("batches.meta", "label_names"))


def read_cifar100(folder: Path) -> Pixels:
    """The hundred fine classes."""
    return _read(folder, ["train"], "test", "fine_labels", ("meta", "fine_label_names"))


def _read(folder: Path, train: Sequence[str], test: str, key: str, names: tuple[str, str]) -> Pixels:
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
