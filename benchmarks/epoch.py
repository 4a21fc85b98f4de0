"""An epoch of our training loop against the plainest PyTorch loop for the same work (`python -m benchmarks.epoch`).

Both train on the same images (random ones, of Tiny ImageNet's sizes) with the same network, precision and shuffling,
validate after every epoch and keep the best weights. How busy the GPU is comes from a profile of one epoch: the time
in which at least one kernel runs, over the epoch's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.steps import facts_of
from zeroforget.data import Preparation, Split, Task
from zeroforget.methods import registry
from zeroforget.nets import build
from zeroforget.training import Fit, Regime
from zeroforget.training.seeding import seeded

CLASSES = 20


def random_task(args: argparse.Namespace, number: int) -> Task:
    """As many images as a task of Tiny ImageNet in ten tasks has."""
    draw = torch.Generator().manual_seed(number)

    def split(count: int) -> Split:
        images = torch.randint(256, (count, *args.shape), generator=draw, dtype=torch.uint8)
        return Split(images.to(args.device), torch.randint(CLASSES, (count,), generator=draw).to(args.device))

    channels = args.shape[0]
    prepare = Preparation((0.5,) * channels, (0.25,) * channels)
    parts = (split(args.images), split(args.images // 9), split(2 * CLASSES))
    return Task(f"task {number}", tuple(map(str, range(CLASSES))), *parts, prepare)


def plainest(args: argparse.Namespace, task: Task, epochs: int) -> list[float]:
    """What anybody would write: seconds of each epoch."""
    torch.manual_seed(0)
    net = build(args.network, tuple(args.shape)).to(args.device)
    with torch.no_grad():
        head = nn.Linear(net(torch.zeros(2, *args.shape, device=args.device)).shape[1], CLASSES).to(args.device)
    model = nn.Sequential(net, head).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    kind, bf16 = torch.device(args.device).type, args.precision == "bf16"
    best, kept, seconds = float("inf"), copy.deepcopy(model.state_dict()), []
    for _ in range(epochs):
        began = time.perf_counter()
        model.train()
        for index in torch.randperm(len(task.train), device=args.device).split(args.batch):
            x = task.prepare.train(task.train.images[index]).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
                loss = F.cross_entropy(model(x), task.train.labels[index])
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
            losses = [
                F.cross_entropy(model(task.prepare.test(x)), y, reduction="sum")
                for x, y in zip(task.val.images.split(256), task.val.labels.split(256), strict=True)
            ]
        now = float(sum(losses)) / len(task.val)
        if now < best:
            best, kept = now, copy.deepcopy(model.state_dict())
        seconds.append(time.perf_counter() - began)
    model.load_state_dict(kept)
    return seconds


def ours(args: argparse.Namespace, tasks: list[Task], name: str, capture: bool, epochs: int) -> list[float]:
    """The newest task's epochs; a growing method learns one before it, for a single epoch."""
    with seeded("net"):
        method = registry.build(name, build(args.network, tuple(args.shape)), torch.zeros(2, *args.shape))
    method.to(args.device)
    regime = Regime(lr=args.lr, precision=args.precision, device=args.device, capture=capture, batch_size=args.batch)
    for number, task in enumerate(tasks):
        last = number == len(tasks) - 1
        log = method.learn(task, Fit(_with(regime, epochs if last else 1)))
    return [epoch.seconds for epoch in log.epochs]


def _with(regime: Regime, epochs: int) -> Regime:
    return Regime(**(vars(regime) | {"epochs": epochs, "patience": 1000}))


def busy(run: Callable[[], object], args: argparse.Namespace) -> float:
    """The share of the time from the first kernel to the last in which one runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in trace.events() if e.device_type == DeviceType.CUDA)
    spans = spans[len(spans) // 2 :]  # the first half warms up and records
    total, end = 0.0, float(spans[0][0])
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / (end - float(spans[0][0]))


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="vgg16-tiny")
    parser.add_argument("--shape", type=lambda s: [int(n) for n in s.split(",")], default=[3, 64, 64])
    parser.add_argument("--images", type=int, default=9000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="only loops with this in their name, beside the plainest")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tasks = [random_task(args, n) for n in range(2)]
    recorded = args.device.startswith("cuda")
    sides: dict[str, Callable[[int], list[float]]] = {
        "plainest loop": lambda epochs: plainest(args, tasks[0], epochs),
        "fine-tuning": lambda epochs: ours(args, tasks[:1], "finetuning", False, epochs),
    }
    if recorded:
        sides["fine-tuning, recorded"] = lambda epochs: ours(args, tasks[:1], "finetuning", True, epochs)
        sides["tfm, recorded"] = lambda epochs: ours(args, tasks, "tfm", True, epochs)
    sides["tfm"] = lambda epochs: ours(args, tasks, "tfm", False, epochs)
    rows: list[dict[str, Any]] = []
    for name, side in sides.items():
        if rows and args.only not in name:
            continue
        each = side(args.epochs)[1:]  # the first one warms up
        row: dict[str, Any] = {"loop": name, "seconds": statistics.median(each), "epochs": len(each)}
        if recorded:
            row["busy"] = busy(lambda side=side: side(4), args)  # type: ignore[misc]
        rows.append(row | {"ratio": row["seconds"] / (rows[0]["seconds"] if rows else row["seconds"])})
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in rows[-1].items()), flush=True)
        if args.out:  # after every row, so that a run that is cut leaves those it has
            args.out.write_text(json.dumps(facts_of(args) | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
