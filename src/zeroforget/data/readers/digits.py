"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn: the one data set that needs no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from zeroforget.data.collection import Pixels, set_apart


def read_digits(folder: Path) -> Pixels:
    """Grey levels 0..16 stretched to bytes. A fifth of each class, the same for every seed, stands in for the test
    set that the authors did not set apart. No folder is read."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.int64)
    return Pixels(images, labels, set_apart(labels), tuple(str(digit) for digit in range(10)))
