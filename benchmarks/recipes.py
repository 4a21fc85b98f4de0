"""How to train a task of Tiny ImageNet from few images: `python -m benchmarks.recipes --data-root DIR`.

TFM learns the first tasks under one recipe after the other. What decides is validation accuracy: the test images are
never looked at. Wants a GPU, which several recipes may share (`--parallel`); each then is a process of its own. On a
CPU `--small` compares them at half the image's size, a quarter of the network's width and 30 epochs, or, with fewer
`--images`, for longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.search import part
from benchmarks.steps import facts_of
from zeroforget.data import Split, Task, scenario
from zeroforget.methods import registry
from zeroforget.nets import build
from zeroforget.training import Fit, Regime
from zeroforget.training.seeding import seeded

COMMON: dict[str, Any] = dict(
    schedule="cosine",
    warmup=1.0,
    label_smoothing=0.1,
    keep="last",
    precision="bf16",
)


@dataclass(frozen=True)
class Recipe:
    """What differs from recipe to recipe: the images, and how, how long and on what batches they are trained."""

    about: str
    epochs: int
    images: dict[str, Any] = field(default_factory=lambda: {"pad": 8})
    batch: int = 128
    cutmix: float = 0.0
    mixup: float = 0.0
    until: float = 1.0
    lr: float = 0.05
    decay: float = 5e-4
    dropout: float = 0.0
    growth: dict[str, Any] = field(default_factory=lambda: {"start": 0.28, "growth": 0.08})


MIXED: dict[str, Any] = dict(batch=64, cutmix=0.5, mixup=0.5)
"""The recipe of tiny-imagenet-random-best.toml: what else could be done?"""
START_55 = {"start": 0.55, "growth": 0.05}
START_40: dict[str, Any] = {"start": 0.4, "growth": 0.0667}
EARLY = {"start": 0.28, "growth": 0.08, "early": 1.0}
EARLY_10 = {"start": 0.1, "growth": 0.1, "early": 1.0}
EVEN = {"start": 0.1, "growth": 0.1, "unit": "weights"}
EARLY_40 = Recipe(
    "cut and blended, first layer whole, last one 40 % + 6.7 %", 100, growth=START_40 | {"early": 1.0}, **MIXED
)
EARLY_70 = Recipe(
    "cut and blended, first layer 70 %, last one 28 % + 8 %",
    100,
    growth={"start": 0.28, "growth": 0.08, "early": 0.7},
    **MIXED,
)


def also(words: str, **changes: Any) -> Recipe:
    """The recipe that came nearest to joint training, changed."""
    return replace(EARLY_70, about=f"{EARLY_70.about}, {words}", **changes)


RECIPES = {
    "base30": Recipe("crops", 30),
    "e100": Recipe("crops", 100),
    "e100cut": Recipe("crops, half of the images cut", 100, cutmix=0.5),
    "e100cutmix": Recipe("crops, half of the images cut, half blended", 100, cutmix=0.5, mixup=0.5),
    "e100zoom": Recipe("random parts", 100, {"zoom": 0.35}),
    "e100zoomcut": Recipe("random parts, half of the images cut", 100, {"zoom": 0.35}, cutmix=0.5),
    "e60zoomcut": Recipe("random parts, half of the images cut", 60, {"zoom": 0.35}, cutmix=0.5),
    "e60b64zoomcut": Recipe("random parts, half of the images cut", 60, {"zoom": 0.35}, batch=64, cutmix=0.5),
    "mixed": Recipe("cut and blended, 28 % + 8 %", 100, **MIXED),
    "mixed-150": Recipe("cut and blended, 28 % + 8 %", 150, **MIXED),
    "mixed-drop": Recipe("cut and blended, half of the hidden features dropped", 100, dropout=0.5, **MIXED),
    "mixed-decay": Recipe("cut and blended, twice the weight decay", 100, decay=1e-3, **MIXED),
    "mixed-fast": Recipe("cut and blended, twice the learning rate", 100, lr=0.1, **MIXED),
    "mixed-55": Recipe("cut and blended, 55 % + 5 %", 100, growth=START_55, **MIXED),
    "mixed-40": Recipe("cut and blended, 40 % + 6.7 %", 100, growth=START_40, **MIXED),
    "mixed-early": Recipe("cut and blended, first layer whole, last one 28 % + 8 %", 100, growth=EARLY, **MIXED),
    "mixed-early-10": Recipe("cut and blended, first layer whole, last one 10 % + 10 %", 100, growth=EARLY_10, **MIXED),
    "mixed-early-40": EARLY_40,
    "mixed-early-40-b32": replace(EARLY_40, batch=32),
    "mixed-early-40-200": replace(EARLY_40, epochs=200),
    "mixed-early-40-decay": replace(EARLY_40, about=f"{EARLY_40.about}, twice the weight decay", decay=1e-3),
    "mixed-early-40-drop": replace(
        EARLY_40, about=f"{EARLY_40.about}, half of the hidden features dropped", dropout=0.5
    ),
    "mixed-early-70": EARLY_70,
    "mixed-early-70-200": replace(EARLY_70, epochs=200),
    "mixed-early-70-b32": replace(EARLY_70, batch=32),
    "mixed-early-70-clean": also("not in the last 15 % of the epochs", until=0.85),
    "mixed-early-70-200-clean": also("not in the last 15 % of the epochs", epochs=200, until=0.85),
    "mixed-early-70-b32-clean": also("not in the last 15 % of the epochs", batch=32, until=0.85),
    "mixed-early-70-clean-half": also("not in the second half of the epochs", until=0.5),
    "mixed-early-70-alter": also("altered", images={"pad": 8, "alter": 1.0}),
    "mixed-early-70-alter-half": also("altered half as strongly", images={"pad": 8, "alter": 0.5}),
    "mixed-early-70-alter-cut": also("altered, cut but not blended", images={"pad": 8, "alter": 1.0}, mixup=0.0),
    "mixed-early-70-zoom": also("random parts", images={"zoom": 0.35}),
    "mixed-early-70-drop": also("half of the hidden features dropped", dropout=0.5),
    "mixed-early-70-decay": also("twice the weight decay", decay=1e-3),
    "mixed-even": Recipe("cut and blended, a tenth of the weights for each task", 100, growth=EVEN, **MIXED),
}


def train(recipe: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    """The first tasks, one after another; each one's validation accuracy."""
    data = scenario({"name": "tiny-imagenet/random", **recipe.images}, root=args.data_root)
    tasks = [part(task, args.images) if args.images else task for task in data.tasks[: args.tasks]]
    tasks = [halved(task) if args.small else task for task in tasks]
    channels, height, width = tasks[0].train.images.shape[1:]
    shape = (channels, height, width)
    with seeded("net", args.seed):
        net = build("vgg16-tiny", shape, norm="batch", dropout=recipe.dropout, width=0.25 if args.small else 1.0)
        align = 1 if args.small else 8
        method = registry.build("tfm", net, torch.zeros(2, *shape), **recipe.growth, align=align)
    method.to(args.device)
    regime = Regime(
        **COMMON,
        lr=recipe.lr,
        options={"momentum": 0.9, "weight_decay": recipe.decay},
        batch_size=recipe.batch,
        epochs=min(recipe.epochs, args.longest or (30 if args.small else recipe.epochs)),
        cutmix=recipe.cutmix,
        mixup=recipe.mixup,
        mix_until=recipe.until,
        device=args.device,
        capture=torch.device(args.device).type == "cuda",
    )
    began = time.perf_counter()
    logs = []
    for index, task in enumerate(tasks):
        with seeded("learn", args.seed, index):
            logs.append(method.learn(task, Fit(regime, args.seed)))
        print(f"{recipe.about}, {task.name}: {logs[-1].val_accuracy:.3f}", flush=True)
    return {
        "epochs": regime.epochs,
        "accuracies": [log.val_accuracy for log in logs],
        "loss": logs[-1].epochs[-1].loss,
        "seconds": time.perf_counter() - began,
    }


def halved(task: Task) -> Task:
    """The same images at half their size."""

    def smaller(split: Split) -> Split:
        images, labels = split.batch(torch.arange(len(split)))
        return Split(F.avg_pool2d(images.float(), 2).round().to(images.dtype), labels)

    train, val, test = smaller(task.train), smaller(task.val), smaller(task.test)
    return replace(task, train=train, val=val, test=test, prepare=replace(task.prepare, pad=task.prepare.pad // 2))


def apart(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One recipe in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        words = [sys.executable, "-m", "benchmarks.recipes", "--only", name, "--out", str(out)]
        words += ["--tasks", str(args.tasks), "--seed", str(args.seed), "--device", args.device]
        words += ["--data-root", str(args.data_root)] if args.data_root else []
        words += ["--small"] if args.small else []
        words += ["--images", str(args.images)] if args.images else []
        words += ["--longest", str(args.longest)] if args.longest else []
        subprocess.run(words, check=True)
        row: dict[str, Any] = json.loads(out.read_text())["rows"][0]
    return row


def here(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One recipe in this process."""
    recipe = RECIPES[name]
    facts: dict[str, Any] = {"name": name, "about": recipe.about, "batch": recipe.batch}
    row = facts | train(recipe, args)
    figures = ", ".join(f"{value:.3f}" for value in row["accuracies"])
    print(f"{name}: validation {figures}, {row['seconds']:.0f} s", flush=True)
    return row


def table(files: list[Path]) -> str:
    """For the docs: one row for each recipe, the mean of its seeds, the best one last, from all the files."""
    found = [json.loads(path.read_text()) for path in files]
    same: dict[tuple[str, int, int], list[list[float]]] = {}
    for row in (row for file in found for row in file["rows"]):
        same.setdefault((row["about"], row["epochs"], row["batch"]), []).append(row["accuracies"])
    means = {key: [100 * statistics.fmean(each) for each in zip(*runs, strict=True)] for key, runs in same.items()}
    tasks = len(next(iter(means.values())))
    names = " | ".join(f"task {k + 1}" for k in range(tasks))
    lines = [f"| recipe | epochs | batch | {names} | mean |", "|---|--:|--:|" + "--:|" * (tasks + 1)]
    for (about, epochs, batch), figures in sorted(means.items(), key=lambda item: sum(item[1])):
        cells = " | ".join(f"{value:.1f}" for value in [*figures, statistics.fmean(figures)])
        lines.append(f"| {about} | {epochs} | {batch} | {cells} |")
    if (seeds := max(map(len, same.values()))) > 1:
        lines += ["", f"Means of {seeds} runs."]
    for file in found:
        about = f"{file['device']}, torch {file['torch']}, commit {file['commit']}, {file['date']}."
        lines += ["", *([file["note"], ""] if "note" in file else []), f"`{file['command']}`: {about}"]
    return "\n".join(lines)


def main() -> None:
    """Train, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="where data sets are kept")
    parser.add_argument("--only", choices=RECIPES, action="append", help="this recipe; may be given several times")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="at a size that suits a CPU")
    parser.add_argument("--images", type=int, help="at most so many training images a task")
    parser.add_argument("--longest", type=int, help="at most so many epochs; with --small 30 if nothing is said")
    parser.add_argument("--parallel", type=int, default=1, help="so many at a time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = list(args.only or RECIPES)
    if args.parallel > 1:
        with ThreadPoolExecutor(args.parallel) as pool:
            rows = list(pool.map(lambda name: apart(name, args), names))
    else:
        rows = [here(name, args) for name in names]
    if args.out:
        args.out.write_text(json.dumps(facts_of(args) | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
