"""Counts and times of a server, as Prometheus reads them."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Mapping

SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
PICTURES = (1, 2, 4, 8, 16, 32, 64, 128)


class Histogram:
    """How many values lay below each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        """In Prometheus' words: each bucket holds all below its bound."""
        out, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            out.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*out, f"{name}_sum {self.sum!r}", f"{name}_count {total}"]


class Metrics:
    """What a server has done since it started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int], int] = {}
        self._pictures: dict[str, int] = {}
        self.seconds = Histogram(SECONDS)
        self.batches = Histogram(PICTURES)

    def request(self, path: str, status: int) -> None:
        """Count an answer."""
        with self._lock:
            self._requests[path, status] = self._requests.get((path, status), 0) + 1

    def answered(self, seconds: float) -> None:
        """Count a picture that was classified."""
        with self._lock:
            self.seconds.add(seconds)

    def batch(self, pictures: int) -> None:
        """Count a batch, of however many tasks."""
        with self._lock:
            self.batches.add(pictures)

    def task(self, name: str, pictures: int) -> None:
        """Count pictures of a task."""
        with self._lock:
            self._pictures[name] = self._pictures.get(name, 0) + pictures

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All of it, with what is true at this moment: name → (what it is, value)."""
        with self._lock:
            lines = [*_head("requests_total", "counter", "Answers by path and status.")]
            for (path, status), count in sorted(self._requests.items()):
                lines.append(f'zeroforget_requests_total{{path="{_quoted(path)}",status="{status}"}} {count}')
            lines += _head("pictures_total", "counter", "Pictures classified, by task.")
            for name, count in self._pictures.items():
                lines.append(f'zeroforget_pictures_total{{task="{_quoted(name)}"}} {count}')
            lines += _head("predict_seconds", "histogram", "From a request's first byte to its answer.")
            lines += self.seconds.lines("zeroforget_predict_seconds")
            lines += _head("batch_pictures", "histogram", "Pictures classified together.")
            lines += self.batches.lines("zeroforget_batch_pictures")
        for name, (about, value) in gauges.items():
            lines += [*_head(name, "counter" if name.endswith("_total") else "gauge", about)]
            lines.append(f"zeroforget_{name} {'NaN' if math.isnan(value) else int(value)}")
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP zeroforget_{name} {about}", f"# TYPE zeroforget_{name} {kind}"]


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
