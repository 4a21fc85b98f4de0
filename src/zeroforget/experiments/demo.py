"""The first minute: five small tasks learned one after another, by TFM and by fine-tuning, and what was proved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.formats import plain
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.results import Results
from zeroforget.experiments.runner import run

SETTINGS: dict[str, Any] = {
    "name": "demo",
    "scenario": "digits/5",
    "network": "small",
    "regime": {"epochs": 60, "lr": 0.1, "min_lr": 0.003},
    "methods": {"finetuning": {}, "tfm": {"start": 0.4, "growth": 0.15}},
}


def learn(out: Path, watch: Observer, seed: int = 0) -> tuple[Results, Results]:
    """Fine-tuning's results and TFM's, in that order."""
    finetuning, tfm = run(Experiment.from_dict(SETTINGS | {"seeds": [seed]}), out, watch=watch)
    return finetuning, tfm


def growth_table(results: Results) -> str:
    """The features of each layer after each task."""
    tasks = [f"task {t + 1}" for t in range(len(results.tasks))]
    rows = [[axis, *map(str, widths)] for axis, widths in results.growth.items()]
    sums = [sum(widths[t] for widths in results.growth.values()) for t in range(len(tasks))]
    return plain(["features of layer", *tasks], [*rows, ["all", *map(str, sums)]])


def overhead_lines(results: Sequence[Results]) -> list[str]:
    """What each method keeps beside its network, in bytes."""
    return [
        f"{r.method}: {r.overhead[-1]['inference'] / 8:,.0f} bytes beside a network of {r.parameters[-1] * 4:,} bytes"
        for r in results
    ]


def verdict(results: Results) -> str:
    """What was proved about old tasks, in one line."""
    earlier, kept = len(results.tasks) - 1, sum(results.unchanged[:-1])
    if kept == earlier:
        return f"proved: logits of all {earlier} earlier tasks are bit-equal to those at the time each was learned"
    return f"not equal: the logits of {earlier - kept} of {earlier} earlier tasks changed after they were learned"
