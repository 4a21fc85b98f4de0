"""What data are here, values that nobody changes: a collection before it is cut, its splits, tasks and scenarios."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeroforget.data.alter import alter
from zeroforget.files.hashes import Digest

_LOOKED_AT = 1024
"""So many images at a time are searched for what is no number: they may lie in a file larger than memory."""
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Images(ABC):
    """Images that are read whenever they are asked for; to a split they are what a tensor of bytes would be."""

    shape: tuple[int, int, int, int]
    dtype = torch.uint8
    device = torch.device("cpu")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        chosen = torch.arange(len(self))[rows]
        return self.index_select(0, chosen)

    def is_floating_point(self) -> bool:
        """They are bytes."""
        return False

    @abstractmethod
    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """The images in these rows, as a tensor."""

    def read(self, rows: Tensor, out: Tensor) -> None:
        """Write the images in these rows there."""
        out.copy_(self.index_select(0, rows))

    def identity(self, rows: Tensor) -> bytes:
        """What tells these images from any others."""
        digest = Digest()
        for part in rows.split(_LOOKED_AT):
            digest.update(self.index_select(0, part).numpy().tobytes())
        return digest.digest()

    @abstractmethod
    def shards(self, rows: Tensor | None) -> npt.NDArray[np.int32]:
        """In which file each of these lies: those of one file are best read at about the same time."""

    @abstractmethod
    def expect(self, rows: Tensor) -> None:
        """These are going to be asked for, in this order."""

    def __deepcopy__(self, memo: Any) -> Images:
        return self


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels.

    `images` may be a large (even memory-mapped) array that several splits share, or `Images` that lie in shards; `rows`
    says which of its images belong to this split, in order. Without `rows` all of them do.

    Example:
        >>> import torch, zeroforget
        >>> images = torch.zeros(6, 1, 8, 8)
        >>> split = zeroforget.Split(images, labels=torch.tensor([0, 1, 0]), rows=torch.tensor([5, 3, 1]))
        >>> len(split)
        3
    """

    images: Tensor | Images
    labels: Tensor
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        for part in ("images", "labels", "rows"):
            value: object = getattr(self, part)
            known = Tensor | Images if part == "images" else Tensor
            if not isinstance(value, known) and (part != "rows" or value is not None):
                raise ValueError(
                    f"a split's {part} are a tensor, not {type(value).__name__}; torch.as_tensor makes one of an array"
                )
        count = len(self.images) if self.rows is None else len(self.rows)
        if count != len(self.labels):
            raise ValueError(f"a split needs one label per image; got {count} images and {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The raw images and labels at these positions of the split; labels of any whole kind come as int64."""
        rows = index if self.rows is None else self.rows.index_select(0, index)
        return self.images.index_select(0, rows), self.labels.index_select(0, index).long()

    def all_images(self) -> Tensor:
        """All of them, in memory."""
        return self.images[slice(None) if self.rows is None else self.rows]

    @staticmethod
    def merge(splits: Sequence[Split], label_offsets: Sequence[int]) -> Split:
        """One split out of several, the labels of each moved up by its offset."""
        labels = torch.cat([s.labels.long() + o for s, o in zip(splits, label_offsets, strict=True)])
        images = splits[0].images
        if all(s.images is images for s in splits):
            rows = [torch.arange(len(images)) if s.rows is None else s.rows for s in splits]
            return Split(images, labels, torch.cat(rows))
        return Split(torch.cat([s.all_images() for s in splits]), labels)


@dataclass(frozen=True)
class Preparation:
    """From raw images to the network's input, a batch at a time, on whatever device the batch is.

    Bytes become [0, 1]; then `(x - mean) / std` for each channel. Training crops `crop` pixels square at random
    (after padding by `pad`) and flips left to right if `flip`; testing takes the central crop. With `zoom` below 1 a
    training image is a random part of at least that share of the area, up to 4:3 out of shape, brought back to size.
    With `erase` a square of so many pixels, anywhere, is the mean colour (DeVries and Taylor, 2017). With `alter` each
    image is moved or recoloured in one of thirteen ways, by a random part of that strength (see `data/alter.py`).

    Example:
        >>> import torch, zeroforget
        >>> prepare = zeroforget.Preparation(mean=(0.5,), std=(0.5,), crop=8, flip=True)
        >>> prepare.test(torch.full((1, 1, 10, 10), 255, dtype=torch.uint8)).shape
        torch.Size([1, 1, 8, 8])
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    crop: int | None = None
    pad: int = 0
    flip: bool = False
    zoom: float = 1.0
    erase: int = 0
    alter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pad", "erase"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is 0 pixels or more, not {getattr(self, name)}")
        if not 0 < self.zoom <= 1:
            raise ValueError(f"zoom is a share of the area, above 0 and at most 1, not {self.zoom}")
        if not 0 <= self.alter <= 1:
            raise ValueError(f"alter is a strength from 0 to 1, not {self.alter}")

    def train(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A training batch, augmented and normalized. `generator` is a CPU generator; without one the draws come from
        the generator of the images' own device."""
        if self.crop is not None or self.pad:
            images = self._random_crop(images, generator)
        if self.zoom < 1:
            images = self._random_zoom(images, generator)
        if self.flip:
            device = None if generator is not None else images.device
            coin = torch.rand(len(images), generator=generator, device=device) < 0.5
            coin = coin.to(images.device).view(-1, 1, 1, 1)
            images = torch.where(coin, images.flip(-1), images)
        if self.alter:
            images = alter(_floating(images), self.alter, generator)
        images = self._normalize(images)
        return self._random_erase(images, generator) if self.erase else images

    def test(self, images: Tensor) -> Tensor:
        """An evaluation batch: the central crop, normalized."""
        if self.crop is not None:
            height, width = images.shape[-2:]
            top, left = (height - self.crop) // 2, (width - self.crop) // 2
            images = images[..., top : top + self.crop, left : left + self.crop]
        return self._normalize(images)

    def _random_crop(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        size = images.shape[-2:] if self.crop is None else (self.crop, self.crop)
        if self.pad:
            images = torch.nn.functional.pad(images, (self.pad,) * 4)
        room = [images.shape[-2] - size[0], images.shape[-1] - size[1]]
        if min(room) < 0:
            raise ValueError(f"cannot crop {size[0]}x{size[1]} out of images of {tuple(images.shape[-2:])}")
        device = images.device if generator is None else torch.device("cpu")
        draw = [torch.randint(r + 1, (len(images), 1), generator=generator, device=device) for r in room]
        y = (draw[0] + torch.arange(size[0], device=device)).to(images.device)
        x = (draw[1] + torch.arange(size[1], device=device)).to(images.device)
        batch = torch.arange(len(images), device=images.device)
        cropped = images.movedim(1, -1)[batch[:, None, None], y[:, :, None], x[:, None, :]]
        return cropped.movedim(-1, 1).contiguous()

    def _random_zoom(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Bilinear, and nothing waits for the device: all draws of a batch are one tensor."""
        count, height, width = len(images), *images.shape[-2:]
        draws = torch.rand(4, count, 1, generator=generator, device=None if generator is not None else images.device)
        share, shape, across, down = draws.to(images.device)
        area = self.zoom + (1 - self.zoom) * share
        ratio = (4 / 3) ** (2 * shape - 1)
        part = [(area * r).sqrt().clamp(max=1.0) for r in (ratio, 1 / ratio)]
        # Positions of the new pixels in the old image, where -1 and 1 are its edges.
        even = [(2 * torch.arange(n, device=images.device) + 1) / n - 1 for n in (width, height)]
        x, y = (e * p + (2 * place - 1) * (1 - p) for e, p, place in zip(even, part, (across, down), strict=True))
        grid = torch.stack([x[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], -1)
        return torch.nn.functional.grid_sample(
            _floating(images), grid, mode="bilinear", padding_mode="border", align_corners=False
        )

    def _random_erase(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """The square's middle is anywhere in the image, so that some of it may lie outside."""
        device = images.device if generator is None else torch.device("cpu")
        inside = []
        for size in images.shape[-2:]:
            first = torch.randint(size, (len(images), 1), generator=generator, device=device).to(images.device)
            place = torch.arange(size, device=images.device) - (first - self.erase // 2)
            inside.append((place >= 0) & (place < self.erase))
        return images.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)

    def _normalize(self, images: Tensor) -> Tensor:
        images = _floating(images)
        shape = (1, -1) + (1,) * (images.dim() - 2)
        mean, std = _constants(self.mean, self.std, images.dtype, images.device)
        return ((images - mean.view(shape)) / std.view(shape)).contiguous()


def _floating(images: Tensor) -> Tensor:
    """Bytes as [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


@functools.lru_cache(maxsize=64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Kept on the device: a copy from the host for every batch would make it wait, and cannot be recorded."""
    return torch.tensor(mean, dtype=dtype, device=device), torch.tensor(std, dtype=dtype, device=device)


_KEPT = ", or two training images for one of them to be kept for validation"


@dataclass(frozen=True, eq=False)
class Task:
    """One thing to learn: named classes, and images to learn, choose and judge by.

    Example:
        >>> import torch, zeroforget
        >>> part = zeroforget.Split(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
        >>> task = zeroforget.Task("signs", ("stop", "go"), train=part, val=part, test=part)
        >>> task.check()  # raises ValueError if it could not be learned
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    test: Split
    prepare: Preparation = Preparation()

    @property
    def parts(self) -> tuple[Split, Split]:
        """What is learned from, and what chooses."""
        return self.train, self.val

    def check(self) -> None:
        """Raise ValueError if no method could learn this: labels out of range, empty splits, NaN in the images."""
        if len(self.classes) < 2:
            raise ValueError(f"task '{self.name}' has {len(self.classes)} class(es); a task needs at least 2")
        for part, split in (("train", self.train), ("val", self.val), ("test", self.test)):
            if not len(split):
                more = _KEPT if part == "val" else ""
                raise ValueError(f"task '{self.name}' has no {part} images; give each class at least one{more}")
            if split.labels.dim() != 1:
                raise ValueError(
                    f"task '{self.name}': {part} labels are of shape {tuple(split.labels.shape)}; give one whole "
                    "number an image"
                )
            if split.labels.dtype not in _WHOLE:
                raise ValueError(
                    f"task '{self.name}': {part} labels are {split.labels.dtype}; give whole numbers, as labels.long() "
                    "makes them"
                )
            low, high = int(split.labels.min()), int(split.labels.max())
            if low < 0 or high >= len(self.classes):
                raise ValueError(
                    f"task '{self.name}': {part} labels run from {low} to {high}, but its {len(self.classes)} classes "
                    f"are 0 to {len(self.classes) - 1}; labels are local to a task, so subtract the first one"
                )
            if not split.images.is_floating_point() and split.images.dtype != torch.uint8:
                raise ValueError(
                    f"task '{self.name}': the {part} images are {split.images.dtype}; give bytes (torch.uint8), which "
                    "count as 0 to 1, or floats"
                )
            if split.images.is_floating_point():
                places = torch.arange(len(split), device=split.labels.device).split(_LOOKED_AT)
                if not all(split.batch(index)[0].isfinite().all() for index in places):
                    raise ValueError(f"task '{self.name}': the {part} images hold NaN or infinite values; clean them")


@dataclass(frozen=True, eq=False)
class Scenario:
    """Tasks in the order they come, all with inputs of one shape (channels, height, width).

    Example:
        >>> import torch, zeroforget
        >>> part = zeroforget.Split(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
        >>> signs = zeroforget.Task("signs", ("stop", "go"), train=part, val=part, test=part)
        >>> street = zeroforget.Scenario("street", (3, 8, 8), (signs,))
        >>> street.check()
    """

    name: str
    shape: tuple[int, int, int]
    tasks: tuple[Task, ...]

    def check(self) -> None:
        """Raise ValueError if some task could not be learned: better met before anything is trained."""
        if not self.tasks:
            raise ValueError(f"scenario '{self.name}' has no tasks")
        for place, task in enumerate(self.tasks):
            if task.name in (other.name for other in self.tasks[:place]):
                raise ValueError(f"scenario '{self.name}' has two tasks '{task.name}'; give them different names")
            task.check()
            for part, split in (("train", task.train), ("val", task.val), ("test", task.test)):
                first = split.batch(torch.zeros(1, dtype=torch.int64, device=split.labels.device))[0]
                self._check_input(f"task '{task.name}': {part} images come to the network as", task.prepare.test(first))

    def _check_input(self, said: str, x: Tensor) -> None:
        if tuple(x.shape[1:]) != tuple(self.shape):
            seen, wanted = ("x".join(map(str, shape)) for shape in (x.shape[1:], self.shape))
            raise ValueError(f"{said} {seen}, but the scenario '{self.name}' is {wanted}")
        if x.dtype != torch.float32:
            raise ValueError(f"{said} {x.dtype}; give bytes (torch.uint8) or torch.float32")

    def example(self, batch: int = 2) -> Tensor:
        """A batch of this scenario's shape, for tracing a network."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(batch, *self.shape, generator=generator)


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
