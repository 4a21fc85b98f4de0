"""The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn: the one data set that needs no download."""

from __future__ import annotations

import numpy as np
import torch

from zeroforget.data.collection import Collection
from zeroforget.data.values import Preparation

TEST_PER_CENT = 20
PREPARE = Preparation(mean=(0.3053,), std=(0.3758,))


def read_digits() -> Collection:
    """Grey levels 0..16 stretched to bytes. A fifth of each class, the same for every seed, stands in for the test
    set that the authors did not set apart."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = bunch.target.astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        draw = np.random.RandomState([2718, digit]).permutation(members)
        test[draw[: len(members) * TEST_PER_CENT // 100]] = True
    names = tuple(str(digit) for digit in range(10))
    return Collection(
        "digits", names, torch.from_numpy(images), torch.from_numpy(labels), torch.from_numpy(test), PREPARE
    )
