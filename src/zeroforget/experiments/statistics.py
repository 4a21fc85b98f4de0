"""What differences between methods are worth: paired by seed, with the interval of Student's t."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from zeroforget.experiments.results import deviation, mean

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and how far its interval reaches to each side; infinitely far for one pair."""

    mean: float
    reach: float
    pairs: int

    @property
    def low(self) -> float:
        """Where the interval begins."""
        return self.mean - self.reach

    @property
    def high(self) -> float:
        """Where it ends."""
        return self.mean + self.reach

    def __str__(self) -> str:
        if self.pairs < 2:
            return f"{self.mean:+.1f}"
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Ours less theirs over the seeds that both have, with its 95 % interval; None where they share no seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    apart = [ours[seed] - theirs[seed] for seed in seeds]
    count = len(apart)
    reach = math.inf
    if count > 1:
        from scipy.special import stdtrit  # a quarter of a second, which most commands need not spend

        reach = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * deviation(apart) / math.sqrt(count)
    return Difference(mean(apart), reach, count)
