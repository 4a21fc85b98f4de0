"""How to train a task of Tiny ImageNet from few images: `python -m benchmarks.recipes --data-root DIR`.

TFM learns the first tasks under one recipe after the other. What decides is validation accuracy: the test images are
never looked at. Wants a GPU; start several processes with `--only` each to share it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps import facts_of
from zeroforget.data import scenario
from zeroforget.methods import registry
from zeroforget.nets import build
from zeroforget.training import Fit, Regime
from zeroforget.training.seeding import seeded

COMMON: dict[str, Any] = dict(
    lr=0.05,
    options={"momentum": 0.9, "weight_decay": 5e-4},
    schedule="cosine",
    warmup=1.0,
    label_smoothing=0.1,
    keep="last",
    precision="bf16",
)


@dataclass(frozen=True)
class Recipe:
    """What differs from recipe to recipe: the images, and how long and on what batches they are trained."""

    about: str
    epochs: int
    images: dict[str, Any] = field(default_factory=lambda: {"pad": 8})
    batch: int = 128
    cutmix: float = 0.0
    mixup: float = 0.0


RECIPES = {
    "base30": Recipe("crops", 30),
    "e100": Recipe("crops", 100),
    "e100cut": Recipe("crops, half of the images cut", 100, cutmix=0.5),
    "e100cutmix": Recipe("crops, half of the images cut, half blended", 100, cutmix=0.5, mixup=0.5),
    "e100zoom": Recipe("random parts", 100, {"zoom": 0.35}),
    "e100zoomcut": Recipe("random parts, half of the images cut", 100, {"zoom": 0.35}, cutmix=0.5),
    "e60zoomcut": Recipe("random parts, half of the images cut", 60, {"zoom": 0.35}, cutmix=0.5),
    "e60b64zoomcut": Recipe("random parts, half of the images cut", 60, {"zoom": 0.35}, batch=64, cutmix=0.5),
}


def train(recipe: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    """The first tasks, one after another; each one's validation accuracy."""
    data = scenario({"name": "tiny-imagenet/random", **recipe.images}, root=args.data_root)
    with seeded("net", args.seed):
        net = build("vgg16-tiny", data.shape, norm="batch", dropout=0.0)
        method = registry.build("tfm", net, data.example(), start=0.28, growth=0.08, align=8)
    method.to(args.device)
    own: dict[str, Any] = dict(cutmix=recipe.cutmix, mixup=recipe.mixup, epochs=recipe.epochs, batch_size=recipe.batch)
    regime = Regime(**COMMON, **own, device=args.device)
    began = time.perf_counter()
    logs = [method.learn(task, Fit(regime, args.seed)) for task in data.tasks[: args.tasks]]
    return {
        "accuracies": [log.val_accuracy for log in logs],
        "loss": logs[-1].epochs[-1].loss,
        "seconds": time.perf_counter() - began,
    }


def table(files: list[Path]) -> str:
    """For the docs: one row for each recipe, the best one last."""
    found = json.loads(files[0].read_text())
    tasks = len(found["rows"][0]["accuracies"])
    names = " | ".join(f"task {k + 1}" for k in range(tasks))
    lines = [f"| recipe | epochs | batch | {names} | mean |", "|---|--:|--:|" + "--:|" * (tasks + 1)]
    for row in sorted(found["rows"], key=lambda row: sum(row["accuracies"])):
        figures = [100 * value for value in [*row["accuracies"], sum(row["accuracies"]) / tasks]]
        cells = " | ".join(f"{value:.1f}" for value in figures)
        lines.append(f"| {row['about']} | {row['epochs']} | {row['batch']} | {cells} |")
    about = (
        f"`{found['command']}`: {found['device']}, torch {found['torch']}, commit {found['commit']}, {found['date']}."
    )
    return "\n".join([*lines, "", *([found["note"], ""] if "note" in found else []), about])


def main() -> None:
    """Train, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="where data sets are kept")
    parser.add_argument("--only", choices=RECIPES, action="append", help="this recipe; may be given several times")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.only or RECIPES:
        recipe = RECIPES[name]
        facts = {"name": name, "about": recipe.about, "epochs": recipe.epochs, "batch": recipe.batch}
        rows.append(facts | train(recipe, args))
        figures = ", ".join(f"{value:.3f}" for value in rows[-1]["accuracies"])
        print(f"{name}: validation {figures}, {rows[-1]['seconds']:.0f} s", flush=True)
    if args.out:
        args.out.write_text(json.dumps(facts_of(args) | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
