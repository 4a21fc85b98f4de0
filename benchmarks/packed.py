"""Tiny ImageNet and CIFAR-100 as packed parts: one .bin of encoded pictures and one .npz of offsets and labels each."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from zeroforget.data.decode import formats

Bytes = npt.NDArray[np.uint8]
CHUNK = 500
_FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR = tuple(_FINE.split())
"""The fine classes, in the order of their labels."""
PARTS = {
    "tiny-imagenet": {"train": ("train-0", "train-1", "train-2"), "test": ("val",)},
    "cifar-100": {"train": ("train-0", "train-1"), "test": ("test",)},
}


@dataclass(frozen=True)
class Packed:
    """One part of a data set: where it lies and what is in it."""

    folder: Path
    part: str

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The class of each picture."""
        labels: npt.NDArray[np.int64] = np.load(self.folder / f"{self.part}.npz")["labels"].astype(np.int64)
        return labels

    def files(self, first: int, last: int, every: int = 1) -> Iterator[bytes]:
        """Pictures `first` to `last`, or one of so many of them, as files."""
        about = np.load(self.folder / f"{self.part}.npz")
        offsets, index = about["offsets"], self.folder / "index.json"
        heads = (
            [base64.b64decode(head) for head in json.loads(index.read_text())["headers"]] if index.exists() else [b""]
        )
        which = about["headers"] if index.exists() else np.zeros(len(offsets), np.int64)
        with (self.folder / f"{self.part}.bin").open("rb") as file:
            file.seek(int(offsets[first]))
            for row in range(first, last):
                content = file.read(int(offsets[row + 1] - offsets[row]))
                if (row - first) % every == 0:
                    yield heads[which[row]] + content


def names(data: Path, source: str) -> list[str]:
    """The classes of a data set by label."""
    if source == "cifar-100":
        return list(CIFAR)
    index = json.loads((data / source / "index.json").read_text())
    return [str(words) for words in index["words"]]


def pictures(data: Path, source: str, part: str, size: int, every: int = 1) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """All pictures of "train" or "test" (or one of so many) as `(count, 3, size, size)` and their labels, decoded by
    all cores."""
    parts = [Packed(data / source, name) for name in PARTS[source][part]]
    labels = [one.labels for one in parts]
    jobs = [
        (one, first, last, every, size)
        for one, own in zip(parts, labels, strict=True)
        for first, last in _spans(len(own))
    ]
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:  # before anything is on a GPU
        images = np.concatenate(list(pool.map(_decoded, jobs)))
    return images, np.concatenate([own[first:last:every] for own in labels for first, last in _spans(len(own))])


def _spans(count: int) -> list[tuple[int, int]]:
    return [(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]


def _decoded(job: tuple[Packed, int, int, int, int]) -> Bytes:
    packed, first, last, every, size = job
    return np.stack([opened(file, size) for file in packed.files(first, last, every)])


def opened(file: bytes, size: int) -> Bytes:
    """One picture as bytes."""
    with Image.open(io.BytesIO(file), formats=formats()) as picture:
        image = picture.convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def unseen(data: Path, count: int, seed: int) -> dict[str, list[int]]:
    """So many labels, half of each data set, whose things are not in the other one under the same name."""
    known = {source: names(data, source) for source in PARTS}
    kinds = {source: [_kinds(name) for name in own] for source, own in known.items()}
    out = {}
    for place, (source, own) in enumerate(kinds.items()):
        others = set().union(*(kind for name, those in kinds.items() if name != source for kind in those))
        free = [label for label, kind in enumerate(own) if not kind & others]
        draws = np.random.RandomState([seed, place])
        out[source] = sorted(int(label) for label in draws.permutation(free)[: count // 2])
    return out


def _kinds(words: str) -> set[str]:
    """What a class is called, and what kind of thing that is: 'sulphur butterfly' is a butterfly too."""
    synonyms = [re.sub(r"[^a-z]+", " ", word.lower()).strip() for word in words.split(",")]
    return set(synonyms) | {word.rsplit(" ", 1)[-1] for word in synonyms}
