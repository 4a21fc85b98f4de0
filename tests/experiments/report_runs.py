"""Made-up results for tests of the report: the shapes that real runs have, from a small rule for each method."""

from __future__ import annotations

import random
from typing import Any

from zeroforget.experiments.results import Results


def epochs(draw: random.Random, count: int, end: float) -> dict[str, Any]:
    rows = []
    for e in range(count):
        left = 2.2 * 0.82**e
        accuracy = min(1.0, end * (1 - 0.7 * 0.75**e) + draw.uniform(-0.01, 0.01))
        losses = {"loss": left + 0.05, "val_loss": left + 0.2 + draw.uniform(0, 0.05)}
        rows.append({"epoch": e, "lr": 0.05, **losses, "val_accuracy": accuracy, "seconds": 0.5})
    best = min(range(count), key=lambda e: rows[e]["val_loss"])
    return {"epochs": rows, "best": best, "stopped": "all epochs done", "seconds": 0.5 * count, "notes": {}}


def run(
    method: str,
    *,
    seed: int = 0,
    tasks: int = 5,
    scenario: str = "digits/5",
    network: str = "lenet",
    forgets: float = 0.0,
    level: float = 0.9,
    bits: tuple[int, int] = (0, 0),
    growth: dict[str, list[int]] | None = None,
    names: list[str] | None = None,
    options: dict[str, Any] | None = None,
    length: int = 12,
) -> Results:
    draw = random.Random(f"{method}{seed}{options}")
    names = names or [f"digits {2 * t}-{2 * t + 1}" for t in range(tasks)]
    start = [min(1.0, level + draw.uniform(-0.06, 0.04)) for _ in range(tasks)]
    accuracy = [[max(0.3, start[k] - forgets * (t - k) ** 0.7) for k in range(t + 1)] for t in range(tasks)]
    return Results(
        scenario=scenario,
        network=network,
        method=method,
        options=options or {},
        regime={"epochs": length, "lr": 0.05},
        seed=seed,
        tasks=[{"name": name, "classes": 2} for name in names],
        accuracy=accuracy,
        logs=[epochs(draw, length + draw.randrange(4), start[t]) for t in range(tasks)],
        seconds=[4.0 + draw.random() for _ in range(tasks)],
        parameters=[60_000 + 170 * t for t in range(tasks)],
        overhead=[{"training": bits[0] * (t + 1), "inference": bits[1] * (t + 1)} for t in range(tasks)],
        growth=growth or {},
        unchanged=[forgets == 0 or t == tasks - 1 for t in range(tasks)],
        environment={"python": "3.11.2", "torch": "2.13.0", "gpu": None, "command": "zeroforget run digits.toml"},
    )


GROWN = {
    "conv1": [6, 7, 8, 9, 10],
    "conv2": [16, 20, 23, 27, 30],
    "fc1": [60, 75, 90, 105, 120],
    "fc2": [46, 56, 66, 76, 84],
}


def study(seeds: int = 2) -> list[Results]:
    """Six methods as an experiment leaves them."""
    made = []
    for seed in range(seeds):
        made += [
            run("finetuning", seed=seed, forgets=0.18, level=0.95),
            run("joint", seed=seed, forgets=-0.004, level=0.96),
            run("ewc", seed=seed, forgets=0.07, level=0.92, bits=(60_000 * 64, 0)),
            run("packnet", seed=seed, level=0.9, bits=(60_000 * 8, 60_000 * 8)),
            run("tfm-nofn", seed=seed, level=0.92, bits=(460, 460), growth=GROWN),
            run("tfm", seed=seed, level=0.95, bits=(460 + 8000, 460 + 8000), growth=GROWN),
        ]
    return made
