"""What is written down of a training: its epochs, and which one's weights were kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeroforget.progress import Epoch, Progress

UNFINISHED = "its turn did not come again"
"""Why a learner of a race stopped that others decided."""


@dataclass
class FitLog:
    """What happened: every epoch, and which one's weights were kept (-1: those before the first epoch).

    Example:
        >>> import zeroforget
        >>> log = zeroforget.FitLog()  # `Fit` returns one
        >>> len(log.epochs), log.best
        (0, -1)
    """

    epochs: list[Epoch] = field(default_factory=list)
    best: int = -1
    stopped: str = ""
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    """What the method has to tell, such as the table of a growth search."""

    def add(self, epoch: Epoch, keep: str) -> bool:
        """One more epoch; whether its weights are now the ones to keep, by the rule of the regime."""
        self.epochs.append(epoch)
        best = self.epochs[self.best] if self.best >= 0 else None
        if keep == "last":
            better = True
        elif best is None or not math.isfinite(epoch.val_loss):
            better = math.isfinite(epoch.val_loss)
        elif keep == "accurate":
            better = (epoch.val_accuracy, -epoch.val_loss) > (best.val_accuracy, -best.val_loss)
        else:
            better = epoch.val_loss < best.val_loss
        self.best = epoch.epoch if better else self.best
        self.seconds += epoch.seconds
        return better

    def until(self, count: int, keep: str) -> FitLog:
        """The log as it was after so many epochs, if there are more."""
        if len(self.epochs) <= count:
            return self
        log = FitLog()
        for epoch in self.epochs[:count]:
            log.add(epoch, keep)
        return log

    @property
    def val_accuracy(self) -> float:
        """The validation accuracy of the weights that were kept."""
        return self.epochs[self.best].val_accuracy if self.best >= 0 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> FitLog:
        """The inverse of `to_dict`."""
        return FitLog(**(values | {"epochs": [Epoch(**e) for e in values["epochs"]]}))


@dataclass
class Reporter:
    """Tells how far training is: the last step of an epoch always, others so many seconds apart."""

    tell: Callable[[Progress], None] | None
    pause: float
    where: Progress
    _told: float = -math.inf

    def __call__(self, epoch: int, step: int, lr: float, log: FitLog) -> None:
        """So many steps of this epoch are done."""
        if self.tell is None or (step < self.where.steps and time.monotonic() < self._told + self.pause):
            return
        self._told = time.monotonic()
        last = log.epochs[-1] if log.epochs else None
        self.tell(replace(self.where, epoch=epoch, step=step, lr=lr, last=last))


def joined(first: FitLog, second: FitLog) -> FitLog:
    """The log of two phases one after the other; the weights that were kept are those of the second."""
    best = second.best if second.best < 0 else len(first.epochs) + second.best
    notes = first.notes | second.notes | {"phases": [len(first.epochs), len(second.epochs)]}
    return FitLog(first.epochs + second.epochs, best, second.stopped, first.seconds + second.seconds, notes)
