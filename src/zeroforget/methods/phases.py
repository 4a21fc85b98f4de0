"""Training in several phases, told as one."""

from __future__ import annotations

from zeroforget.training import FitLog


def joined(first: FitLog, second: FitLog) -> FitLog:
    """The log of two phases one after the other; the weights that were kept are those of the second."""
    best = second.best if second.best < 0 else len(first.epochs) + second.best
    notes = first.notes | second.notes | {"phases": [len(first.epochs), len(second.epochs)]}
    return FitLog(first.epochs + second.epochs, best, second.stopped, first.seconds + second.seconds, notes)
