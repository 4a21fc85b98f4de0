"""A whole data set before it is cut into tasks: listed as files on disk, or ready as an array of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from zeroforget.data.values import Images, Preparation

OnRead = Callable[[str, int, int], None]
"""Told now and then what is going on: what, how much is done, how much there is (0: not known). Twice 0: a remark."""


class DataError(ValueError):
    """Something is wrong with the data on disk; the message names the file and the remedy."""


@dataclass(frozen=True)
class Treatment:
    """How an image file becomes an array `size` pixels square.

    "stretch", for official data sets: cut to its box where it has one (or `trim` rows off its foot), then resized
    without regard to its proportions, as the paper does. "cover", for people's own: turned upright, the shorter side
    scaled, the centre cut out."""

    size: int
    boxes: bool = False
    trim: int = 0
    fit: str = "stretch"


@dataclass(frozen=True, eq=False)
class Listing:
    """Which image files there are, what they show, and which are for testing, or for validation where the data say so.
    Boxes: left, top, right, bottom."""

    base: Path
    files: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    test: npt.NDArray[np.bool_]
    classes: tuple[str, ...]
    codes: tuple[str, ...] = ()
    boxes: npt.NDArray[np.float64] | None = None
    val: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class Pixels:
    """Images that need no decoding, as bytes `(count, channels, height, width)`, with their labels and test marks."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    test: npt.NDArray[np.bool_]
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Collection:
    """Images `(count, channels, height, width)` of bytes with a class each; `test` is true for the test images.

    `codes` are the classes' names in their makers' own files (ImageNet's `n01443537`), where they differ. `val` is true
    for the validation images; where it is None, and of classes without any, they are drawn from the training images.
    """

    name: str
    classes: tuple[str, ...]
    images: Tensor | Images
    labels: Tensor
    test: Tensor
    prepare: Preparation
    codes: tuple[str, ...] = ()
    val: Tensor | None = None

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.labels) == len(self.test):
            raise DataError(
                f"data set '{self.name}': {len(self.images)} images, {len(self.labels)} labels and {len(self.test)} "
                "test marks; there must be one of each for every image"
            )
        if self.val is not None and len(self.val) != len(self.test):
            raise DataError(f"data set '{self.name}': {len(self.test)} test marks, but {len(self.val)} for validation")
        if self.val is not None and bool((self.val & self.test).any()):
            raise DataError(f"data set '{self.name}' marks an image for both validation and testing")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what the network sees: after the crop."""
        channels, height, width = self.images.shape[1:]
        crop = self.prepare.crop
        return (channels, height, width) if crop is None else (channels, crop, crop)


def set_apart(labels: npt.NDArray[np.int64], per_cent: int = 20) -> npt.NDArray[np.bool_]:
    """Test marks for data without an official test set: a share of each class, the same whatever the seed."""
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = max(len(members) * per_cent // 100, 1 if len(members) > 2 else 0)
        test[np.random.RandomState([2718, label]).permutation(members)[:count]] = True
    return test
