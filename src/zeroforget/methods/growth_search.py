"""The growth search of section 4.1 without training every candidate to its end: whose turn it is, and when it is over.

The decision is the smallest growth whose final validation accuracy is within a margin of the best one. A candidate that
has ended is known. One that has not may still end anywhere between nothing and a bound:

- accuracy never exceeds 1;
- once the learning rate has fallen to a share r of its highest, half or less, accuracy on n validation images is taken
  to rise by at most r (0.1 + 3 / sqrt(n)) + 1.5 w + 1/n over that of the weights kept so far, where w is by how much
  it went up or down from one of the last ten epochs to the next, on average;
- and, where the rate falls in steps, by at most 8 w + 2 g or 1 / sqrt(n), whichever is more, + 1/n, where g is by how
  much accuracy rose over these ten epochs. What a lower rate adds is what a higher one tossed about.

The last two are what is assumed (what was measured is in docs/experiments.md). Candidates that seem not to matter wait.
None is given up before those that ended prove it, so a guess that fails costs time and not the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeroforget.progress import Epoch
from zeroforget.training import FitLog

STEADY, CHANCE, LUCK = 0.1, 3.0, 1.5
TOSSED, TREND, QUIET, RECENT = 8.0, 2.0, 1.0, 10
_EDGE = 1e-9


@dataclass(frozen=True)
class Standing:
    """What is known of a candidate's final accuracy: it ends between `low` and `high`, and is at `now`."""

    low: float
    now: float
    high: float

    @property
    def ended(self) -> bool:
        """Whether it is known."""
        return self.low == self.high


def standing(log: FitLog, images: int) -> Standing:
    """Where a candidate stands; `images` are those it is validated on."""
    if log.stopped:
        end = log.val_accuracy if math.isfinite(log.val_accuracy) else -math.inf  # it never answered with numbers
        return Standing(end, end, end)
    if log.best < 0:
        return Standing(-1.0, 0.0, 1.0)
    return Standing(-1.0, log.val_accuracy, min(1.0, log.val_accuracy + _rise(log.epochs, images)))


def _rise(epochs: Sequence[Epoch], images: int) -> float:
    """By how much the accuracy of the weights kept may still rise."""
    rates = [epoch.lr for epoch in epochs]
    if len(epochs) < 2 or (share := rates[-1] / max(rates)) > 0.5:
        return 1.0
    recent = [epoch.val_accuracy for epoch in epochs[-RECENT - 1 :]]
    tossed = sum(abs(after - before) for before, after in pairwise(recent)) / (len(recent) - 1)
    rise = share * (STEADY + CHANCE / math.sqrt(images)) + LUCK * tossed
    if len(recent) > RECENT and rates[-1] == rates[-2]:
        trend = max(0.0, recent[-1] - recent[0])
        rise = min(rise, max(TOSSED * tossed + TREND * trend, QUIET / math.sqrt(images)))
    return rise + 1 / images


def turns(candidates: Sequence[Standing], margin: float) -> list[int]:
    """Which candidates, smallest growth first, train an epoch next; none when the decision is certain."""
    margin += _EDGE
    best = max(each.low for each in candidates)
    able = [i for i, each in enumerate(candidates) if each.high >= best - margin]  # to be chosen, or to be the best
    first = candidates[able[0]]
    if first.ended and first.now >= max(each.high for each in candidates) - margin:
        return []
    leader = max(each.now for each in candidates)
    likely = [i for i in able if candidates[i].high >= leader - margin]
    matter: list[int] = []
    for i in likely:
        # One that cannot exceed a smaller one by more than the margin waits: it matters only if that one falls, or if a
        # larger one leaves that one behind.
        if all(candidates[i].high > candidates[k].now + margin for k in matter):
            matter.append(i)
    unknown = [i for i in able if not candidates[i].ended]
    going = [i for i in unknown if i in matter]
    # If all of these have ended, whoever stands highest proves most by its end.
    return going or [i for i in unknown if candidates[i].now == leader][:1] or unknown
