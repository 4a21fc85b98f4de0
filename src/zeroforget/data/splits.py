"""Cutting a data set into tasks: which classes go together, and which training images are kept for validation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from zeroforget.data.collection import Collection
from zeroforget.data.values import Split, Task

VALIDATION_SHARE = 0.1
Rows = npt.NDArray[np.int64]


def equal_sizes(classes: int, tasks: int) -> tuple[int, ...]:
    """As equal as possible, the larger ones first: 102 classes in 4 tasks are 26, 26, 25, 25."""
    if tasks < 1 or classes < 2 * tasks:
        raise ValueError(f"cannot cut {classes} classes into {tasks} tasks: each task needs at least 2 classes")
    share, rest = divmod(classes, tasks)
    return tuple(share + (task < rest) for task in range(tasks))


def grouped(classes: int, sizes: Sequence[int], seed: int | None) -> list[list[int]]:
    """Classes 0..n-1 in groups of these sizes: shuffled by the seed, or in their own order where it is None."""
    if sum(sizes) != classes or min(sizes, default=0) < 1:
        raise ValueError(f"tasks of {list(sizes)} classes make {sum(sizes)}, but there are {classes} classes")
    order = np.arange(classes) if seed is None else np.random.RandomState([seed, 0]).permutation(classes)
    ends = np.cumsum(sizes)
    return [order[end - size : end].tolist() for size, end in zip(sizes, ends, strict=True)]


def named_groups(collection: Collection, groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """A written list of classes, by name or by code, as numbers. A class may be in one group only, and may be left
    out."""
    number = {name: index for index, name in enumerate(collection.codes)}
    number |= {name: index for index, name in enumerate(collection.classes)}
    seen: set[int] = set()
    for name in (name for group in groups for name in group):
        if name not in number:
            raise ValueError(f"data set '{collection.name}' has no class '{name}'; it has {_shown(collection.classes)}")
        if number[name] in seen:
            raise ValueError(f"class '{name}' is in two tasks; a class belongs to one task only")
        seen.add(number[name])
    return [[number[name] for name in group] for group in groups]


def _shown(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def cut(collection: Collection, groups: Sequence[Sequence[int]], names: Sequence[str], seed: int) -> tuple[Task, ...]:
    """One task for each group of classes; its labels are positions in the group. All share the collection's images."""
    members = _members(collection)
    return tuple(_task(collection, members, group, name, seed) for group, name in zip(groups, names, strict=True))


def _members(collection: Collection) -> list[Rows]:
    """The images of each class, in order; found at once, since there may be as many classes as a search takes long."""
    labels = collection.labels.numpy()
    order = np.argsort(labels, kind="stable")
    ends = np.searchsorted(labels, np.arange(len(collection.classes) + 1), sorter=order)
    return [order[start:end] for start, end in itertools.pairwise(ends)]


def _task(collection: Collection, members: list[Rows], group: Sequence[int], name: str, seed: int) -> Task:
    parts = [_parts(collection, members[label], label, seed) for label in group]
    train, val, test = (_split(collection, part) for part in zip(*parts, strict=True))
    classes = tuple(collection.classes[label] for label in group)
    return Task(name, classes, train, val, test, collection.prepare)


def _parts(collection: Collection, members: Rows, label: int, seed: int) -> tuple[Rows, Rows, Rows]:
    """Training, validation and test images of one class. Those for validation are drawn where the data name none."""
    test = collection.test.numpy()[members]
    val = np.zeros_like(test) if collection.val is None else collection.val.numpy()[members]
    train, final = members[~test & ~val], members[test]
    if not len(train) or not len(final):
        raise ValueError(
            f"data set '{collection.name}': class '{collection.classes[label]}' has {len(train)} training and "
            f"{len(final)} test images; each class needs some of both"
        )
    return (train, members[val], final) if val.any() else (*hold_out(train, label, seed), final)


def hold_out(members: Rows, label: int, seed: int) -> tuple[Rows, Rows]:
    """Training and validation images of one class. The draw depends on the seed and the class alone, so that every
    scenario of one seed keeps the same images apart. A class of two images or more gives at least one."""
    count = max(round(len(members) * VALIDATION_SHARE), 1 if len(members) > 1 else 0)
    held = np.zeros(len(members), dtype=bool)
    held[np.random.RandomState([seed, 1, label]).permutation(len(members))[:count]] = True
    return members[~held], members[held]


def _split(collection: Collection, parts: Sequence[Rows]) -> Split:
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Split(collection.images, torch.from_numpy(labels), torch.from_numpy(np.concatenate(parts)))
