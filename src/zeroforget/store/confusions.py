"""Where a task errs: its confusions on the test part, and the pictures that it is surest about and wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.data import Split
from zeroforget.store import task_guess
from zeroforget.store.errors import ModelError
from zeroforget.store.network import preparation
from zeroforget.store.pictures import held_out, list_pictures, pixels, read_pictures
from zeroforget.store.schema import TaskFacts, interval
from zeroforget.training import logits

MOST_PAIRS = 2000
"""So many kinds of mistakes are written down of a task, the most frequent first."""
SUREST = 12
"""So many mistakes are shown as pictures."""


@dataclass(frozen=True)
class Mistake:
    """A picture, what it shows and what the task took it for."""

    file: Path
    shows: str
    taken_for: str
    sure: float


@dataclass(frozen=True)
class Seen:
    """Pictures of a task, each with its class and the answer it got."""

    classes: tuple[str, ...]
    totals: tuple[int, ...]
    """Pictures of each class."""
    wrong: Mapping[tuple[int, int], int]
    """How often a class (first) was taken for another (second)."""
    mistakes: tuple[Mistake, ...] = ()
    """The surest ones; none where only counts were written down."""
    of_test_part: bool = True

    @property
    def right(self) -> tuple[int, ...]:
        """Right answers of each class."""
        lost = [0] * len(self.classes)
        for (shows, _), count in self.wrong.items():
            lost[shows] += count
        return tuple(total - gone for total, gone in zip(self.totals, lost, strict=True))

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return sum(self.right) / max(1, sum(self.totals))

    @property
    def interval(self) -> tuple[float, float]:
        """Where that lies with 95 % confidence."""
        return interval(self.accuracy, sum(self.totals))


def noted(scores: Tensor, labels: Tensor, classes: int) -> dict[str, Any]:
    """What is written down about the test part: pictures of each class, and [class, taken for, how often]."""
    pairs = _pairs(scores.argmax(1), labels)
    most = sorted(pairs.items(), key=lambda one: (-one[1], one[0]))[:MOST_PAIRS]
    totals = torch.bincount(labels, minlength=classes).tolist()
    return {"pictures": totals, "wrong": [[shows, taken, count] for (shows, taken), count in most]}


def _pairs(answers: Tensor, labels: Tensor) -> dict[tuple[int, int], int]:
    pairs: dict[tuple[int, int], int] = {}
    for shows, taken in zip(labels.tolist(), answers.tolist(), strict=True):
        if shows != taken:
            pairs[shows, taken] = pairs.get((shows, taken), 0) + 1
    return pairs


def recorded(facts: TaskFacts) -> Seen | None:
    """As it was written down when the task was learned; None where it was not, or does not fit the task.

    A model may come from others, so nothing of it is taken on trust.
    """
    told, count = facts.training.get("test"), len(facts.classes)
    if not isinstance(told, dict):
        return None
    totals, rows = told.get("pictures"), told.get("wrong")
    if not isinstance(totals, list) or len(totals) != count or not all(map(_count, totals)):
        return None
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
        return None
    if not all(_count(n) for row in rows for n in row) or any(max(row[:2]) >= count for row in rows):
        return None
    seen = Seen(facts.classes, tuple(totals), {(shows, taken): n for shows, taken, n in rows})
    return seen if all(n >= 0 for n in seen.right) else None


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40


def seen(facts: TaskFacts, dense: nn.Module, folder: Path) -> Seen:
    """A task's answers for a folder of class folders: for its test part where this is the folder it was learned from,
    else for all pictures there."""
    listing = list_pictures(folder, facts.classes)
    decoded = read_pictures(listing, facts.preprocessing.shape)
    if not len(decoded.labels):
        raise ModelError(f"none of the pictures below {folder} can be read")
    aside = (held_out(decoded.labels, facts.data.share, facts.data.seed) | (facts.data.share == 1)).nonzero().squeeze(1)
    part = Split(decoded.images, decoded.labels[aside], aside)
    of_test_part = pixels(part) == facts.data.pixels
    rows = aside if of_test_part else torch.arange(len(decoded.labels))
    split = Split(decoded.images, decoded.labels[rows], rows)
    scores = task_guess.probabilities(logits(dense, split, preparation(facts.preprocessing)), facts.calibration)
    files = decoded.files
    return Seen(
        facts.classes,
        tuple(torch.bincount(split.labels, minlength=len(facts.classes)).tolist()),
        _pairs(scores.argmax(1), split.labels),
        _surest(scores, split.labels, [files[row] for row in rows.tolist()], facts.classes),
        of_test_part,
    )


def _surest(scores: Tensor, labels: Tensor, files: Sequence[Path], classes: Sequence[str]) -> tuple[Mistake, ...]:
    sure, answers = scores.max(1)
    wrong = (answers != labels).nonzero().squeeze(1)
    order = wrong[sure[wrong].argsort(descending=True, stable=True)][:SUREST].tolist()
    return tuple(
        Mistake(files[row], classes[int(labels[row])], classes[int(answers[row])], float(sure[row])) for row in order
    )
