"""The growth search against learning one task: `python -m benchmarks.search`.

Task after task, from the same state: the search that stops early, the search that trains every candidate to its end,
and the growth they chose, trained alone. The two searches must choose the same, and the same bits. A short rehearsal
before them, not timed, lets libraries choose and compile what these widths need: else the first to run pays for all.
With `--whole N` every candidate is trained to its end in a seed's first N tasks only, which saves half of the time.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps import facts_of
from zeroforget.data import Split, Task, scenario
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.tfm import Candidate, Tfm
from zeroforget.nets import build
from zeroforget.training import Fit, FitLog, Progress, Regime
from zeroforget.training.seeding import generator, seeded

START, GROWTH = (0.2, 0.35, 0.5, 0.65), (0.0, 0.05, 0.1, 0.2)


def part(task: Task, images: int) -> Task:
    """A task with at most so many training images, and half as many for validation."""

    def some(split: Split, size: int) -> Split:
        rows = torch.randperm(len(split), generator=generator("part", task.name))[:size]
        return Split(split.images, split.labels[rows], rows if split.rows is None else split.rows[rows])

    return replace(task, train=some(task.train, images), val=some(task.val, images // 2))


def timed(work: Callable[..., FitLog], device: str, *args: Any) -> tuple[FitLog, float]:
    """What the work returns, and its seconds; without a GPU those of the processor, where neighbours do not count."""
    cuda = device.startswith("cuda")
    clock = time.perf_counter if cuda else time.process_time
    began = clock()
    log = work(*args)
    if cuda:
        torch.cuda.synchronize()
    return log, clock() - began


def measure(model: Tfm, task: Task, regime: Regime, seed: int, whole: bool) -> tuple[Tfm, dict[str, Any]]:
    """Learn one task in the three ways, or in two; returns the model that learned it and what it took."""
    index = len(model.specs)
    pruned, full = copy.deepcopy(model), copy.deepcopy(model)
    full.prune = False
    logs: dict[str, FitLog] = {}
    seconds: dict[str, float] = {}
    with seeded("learn", seed, index):
        copy.deepcopy(full).learn(task, Fit(replace(regime, epochs=2, warmup=0.0), seed))
    curves: dict[int, dict[int, tuple[float, float, float]]] = {}

    def hear(progress: Progress) -> None:
        if (last := progress.last) is not None:
            curves.setdefault(progress.phase, {})[last.epoch] = (last.lr, last.val_loss, last.val_accuracy)

    ways = [("pruned", pruned, Fit(regime, seed)), ("full", full, Fit(regime, seed, hear, pause=9e9))]
    for name, learner, fit in ways if whole else ways[:1]:
        with seeded("learn", seed, index):
            logs[name], seconds[name] = timed(learner.learn, regime.device, task, fit)
    tables = [log.notes["search"] for log in logs.values()]
    with seeded("learn", seed, index):
        spec = TaskSpec(task.name, len(task.classes))
        alone = model.candidate(spec, Candidate(logs["pruned"].notes["growth"]), torch.get_rng_state())
        _, seconds["one"] = timed(Fit(regime, seed), regime.device, alone, task, index)
    epochs = [sum(row["epochs"] for row in table) for table in tables]
    facts = {"task": task.name, "epochs": epochs, "seconds": seconds, "search": tables, "images": len(task.val)}
    if whole:
        same = [row["chosen"] for row in tables[0]] == [row["chosen"] for row in tables[1]]
        state = full.state_dict()
        bits = same and all(torch.equal(tensor, state[name]) for name, tensor in pruned.state_dict().items())
        facts |= {"same": same, "bits": bits, "curves": [list(each.values()) for each in curves.values()]}
    return pruned, facts


def shares(words: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    return tuple(float(word) for word in words.split(","))


def main() -> None:
    """Measure, print a line for each task and the medians."""
    compare(arguments())


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--scenario", default="digits/5")
    parser.add_argument("--network", default="small")
    parser.add_argument("--images", type=int, default=2000, help="at most so many training images a task")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--seeds", type=lambda s: [int(n) for n in s.split(",")], default=[0, 1])
    parser.add_argument("--data-root", type=Path, help="where data sets are kept")
    parser.add_argument("--start", type=shares, default=START, help="shares to try for the first task")
    parser.add_argument("--growth", type=shares, default=GROWTH, help="growths to try for each later one")
    parser.add_argument("--align", type=int, default=1)
    parser.add_argument("--whole", type=int, default=100, metavar="N", help="all to their ends in the first N only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--regime", type=json.loads, default={}, help="as JSON; the paper's without it")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def compare(args: argparse.Namespace) -> None:
    """Measure and print."""
    regime = Regime(**{"device": args.device} | args.regime)
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        data = scenario(args.scenario, seed=seed, root=args.data_root)
        with seeded("net", seed):
            options = {"search_start": args.start, "search": args.growth, "align": args.align}
            model = Tfm(build(args.network, data.shape), data.example(), **options).to(args.device)
        for number, task in enumerate(data.tasks[: args.tasks]):
            model, facts = measure(model, part(task, args.images), regime, seed, number < args.whole)
            rows.append({"seed": seed} | facts)
            print(f"{args.scenario} seed {seed} {task.name}: {told(facts)}", flush=True)
            if args.out:  # after every task, so that a run that is cut leaves those it has
                args.out.write_text(json.dumps(facts_of(args) | {"rows": rows}) + "\n")
    whole = [row for row in rows if "bits" in row]
    print(f"{median(rows, 'pruned'):7.3f}  growth search / one task, median of {len(rows)}")
    if whole:
        agreed = f"{sum(row['bits'] for row in whole)} of {len(whole)} searches agree bit for bit"
        print(f"{median(whole, 'full'):7.3f}  without stopping early; {agreed}")


def told(facts: dict[str, Any]) -> str:
    """What a search took, and whether it found what it should."""
    seconds = facts["seconds"]
    ratios = [seconds[name] / seconds["one"] for name in ("pruned", "full") if name in seconds]
    words = f"{' / '.join(f'{ratio:.2f}' for ratio in ratios)} of one task"
    if "bits" not in facts:
        return words
    agree = "same choice and bits" if facts["bits"] else "same choice" if facts["same"] else "OTHER CHOICE"
    return f"{words}, {agree}"


def median(rows: list[dict[str, Any]], name: str) -> float:
    """Of the time of searches in this way over that of one task."""
    ratios: list[float] = [row["seconds"][name] / row["seconds"]["one"] for row in rows]
    return statistics.median(ratios)


if __name__ == "__main__":
    main()
