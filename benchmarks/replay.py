"""Growth searches replayed from their curves: `python -m benchmarks.replay results/search-*.json`.

Whether stopping early would have decided as training every candidate to its end does, in how many epochs, and how much
of what the search takes to be possible (`zeroforget.methods.growth_search`) came true: above 1, an assumption was
broken. `results/search-closest.json` holds the twenty of 250 searches that came closest to that: validation accuracies
as numbers of images, rates with how often they follow each other.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroforget.growing.growth import smallest_within
from zeroforget.methods.growth_search import standing, turns
from zeroforget.progress import Epoch
from zeroforget.training import FitLog

MARGINS = (0.001, 0.015, 0.03)


@dataclass(frozen=True)
class Course:
    """One candidate, trained to its end: the rate of every epoch, how many images it got right, which were kept."""

    rates: list[float]
    right: list[int]
    kept: list[int]

    def epochs(self, images: int) -> list[Epoch]:
        """All of them, with the accuracy on so many images."""
        pairs = zip(self.rates, self.right, strict=True)
        return [Epoch(n, rate, 0.0, 0.0, right / images, 0.0) for n, (rate, right) in enumerate(pairs)]

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Course:
        """From the small file's values."""
        rates = [rate for rate, count in values["rates"] for _ in range(count)]
        return Course(rates, values["right"], values["kept"])

    @staticmethod
    def measured(curve: Sequence[tuple[float, float, float]], images: int, keep: str) -> Course:
        """From a curve as `benchmarks.search` writes it."""
        log, kept = FitLog(), list[int]()
        for number, (rate, loss, accuracy) in enumerate(curve):
            if log.add(Epoch(number, rate, 0.0, loss, accuracy, 0.0), keep):
                kept.append(number)
        return Course([c[0] for c in curve], [round(c[2] * images) for c in curve], kept)


@dataclass(frozen=True)
class Candidates:
    """Those of one search, smallest growth first."""

    about: str
    images: int
    courses: list[Course]

    @functools.cached_property
    def _epochs(self) -> list[list[Epoch]]:
        return [course.epochs(self.images) for course in self.courses]

    def _log(self, i: int, count: int) -> FitLog:
        """What was known of a candidate after so many epochs."""
        best = bisect.bisect_left(self.courses[i].kept, count)
        kept = self.courses[i].kept[best - 1] if best else -1
        return FitLog(self._epochs[i][:count], kept, "ended" if count == len(self._epochs[i]) else "")

    def replay(self, margin: float) -> tuple[bool, int]:
        """Whether stopping early decides alike, and after how many epochs in all."""
        lengths, seen = [len(epochs) for epochs in self._epochs], [0] * len(self.courses)
        while going := turns([standing(self._log(i, count), self.images) for i, count in enumerate(seen)], margin):
            for i in going:
                seen[i] += 1
        ends = {i: self._log(i, length).val_accuracy for i, length in enumerate(lengths)}
        sound = [i for i, end in ends.items() if math.isfinite(end)]  # it answered with numbers
        chosen = [
            those[smallest_within(those, [ends[i] for i in those], margin)]
            for those in ([i for i in sound if seen[i] == lengths[i]], sound)
        ]
        return chosen[0] == chosen[1], sum(seen)

    def most_used(self) -> float:
        """The largest share of what was taken to be possible that came true, over all epochs of all candidates."""
        used = [0.0]
        for i, epochs in enumerate(self._epochs):
            end = self._log(i, len(epochs)).val_accuracy
            for count in range(1, len(epochs)):
                at = standing(self._log(i, count), self.images)
                if at.high < 1 and end > at.now:
                    used.append((end - at.now) / (at.high - at.now))
        return max(used)


def read(file: Path) -> list[Candidates]:
    """All searches of a file: one of `benchmarks.search`, or the small one."""
    held = json.loads(file.read_text())
    if "searches" in held:
        return [
            Candidates(each["about"], each["images"], [Course.from_dict(values) for values in each["courses"]])
            for each in held["searches"]
        ]
    keep = ast.literal_eval(held["args"]["regime"]).get("keep", "best")
    return [
        Candidates(
            f"{held['command']} at {held['commit']}, {held['date']}: seed {row['seed']}, {row['task']}",
            row["images"],
            [Course.measured(curve, row["images"], keep) for curve in row["curves"]],
        )
        for row in held["rows"]
        if "curves" in row
    ]


def main() -> None:
    """Replay them; a line for each file, one for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    everything: list[Candidates] = []
    for file in args.files:
        try:
            searches = read(file)
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not a file that benchmarks.search wrote"
            parser.error(f"no curves of growth searches in {file}: {why}")
        if not searches:
            parser.error(f"no curves of growth searches in {file}: in none was every candidate trained to its end")
        everything += searches
        print(f"{file}: {told(searches)}", flush=True)
    if len(args.files) > 1:
        print(f"all: {told(everything)}")


def told(searches: Sequence[Candidates]) -> str:
    """What came out, in a line."""
    found = {margin: [each.replay(margin) for each in searches] for margin in MARGINS}
    alike = [sum(same for same, _ in found[margin]) for margin in MARGINS]
    epochs, full = sum(n for _, n in found[0.015]), sum(len(c.rates) for each in searches for c in each.courses)
    most = max(each.most_used() for each in searches)
    margins = ", ".join(f"{100 * margin:g}" for margin in MARGINS)
    return (
        f"{len(searches)} searches; with margins of {margins} points {', '.join(map(str, alike))} are decided alike, "
        f"with the second in {epochs} of {full} epochs; at most {most:.2f} of what was taken to be possible came true"
    )


if __name__ == "__main__":
    main()
