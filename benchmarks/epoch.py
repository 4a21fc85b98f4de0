"""An epoch of our training loop against the plainest PyTorch loop for the same work (`python -m benchmarks.epoch`).

Both train on the same images (random ones, of Tiny ImageNet's sizes) with the same network, precision and shuffling,
validate after every epoch and keep the best weights. How busy the GPU is comes from a profile: the time in which at
least one kernel runs, over all of it. `--kernels 20` prints on what each loop spends that time. `--experiment FILE`
takes network, regime and augmentation from an experiment's file, without the plainest loop, which knows none of it.

Memory is the most that was allocated at a time, without images that lie on the GPU already.

`--also hat,ewc` measures these methods in their second task, where they hold on to the first. With `--host` images stay
on the host, and are brought to the GPU batch by batch.

TFM learns its second task: 5 % of the features after 55 %, at the widths as they come and at multiples of 8, and 15 %
after 85 %, where the network is as wide as the one that is fine-tuned (less than 15 % would leave narrow layers without
new features, if these come in eights).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.steps import facts_of
from zeroforget.data import Preparation, Split, Task
from zeroforget.experiments.experiment import Experiment
from zeroforget.methods import registry
from zeroforget.nets import build
from zeroforget.training import Fit, Regime, feed
from zeroforget.training.seeding import seeded

CLASSES = 20


def random_task(args: argparse.Namespace, number: int) -> Task:
    """As many images as a task of Tiny ImageNet in ten tasks has."""
    draw = torch.Generator().manual_seed(number)

    def split(count: int) -> Split:
        images = torch.randint(256, (count, *args.shape), generator=draw, dtype=torch.uint8)
        labels, place = torch.randint(CLASSES, (count,), generator=draw), "cpu" if args.host else args.device
        return Split(images.to(place), labels.to(place))

    channels = args.shape[0]
    prepare = Preparation((0.5,) * channels, (0.25,) * channels, **args.augmented)
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
        for index in torch.randperm(len(task.train), device=task.train.labels.device).split(args.batch):
            images, y = (part[index].to(args.device) for part in (task.train.images, task.train.labels))
            x = task.prepare.train(images).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
            losses = [
                F.cross_entropy(model(task.prepare.test(x.to(args.device))), y.to(args.device), reduction="sum")
                for x, y in zip(task.val.all_images().split(256), task.val.labels.split(256), strict=True)
            ]
        now = float(sum(losses)) / len(task.val)
        if now < best:
            best, kept = now, copy.deepcopy(model.state_dict())
        seconds.append(time.perf_counter() - began)
    model.load_state_dict(kept)
    return seconds


@dataclass(frozen=True)
class Ours:
    """One of our loops: the method, its options, and whether steps are recorded."""

    method: str
    capture: bool
    options: dict[str, Any] = field(default_factory=dict)


def ours(args: argparse.Namespace, tasks: list[Task], loop: Ours, epochs: int) -> list[float]:
    """The newest task's epochs. Of two the first is learned for a single epoch; for fine-tuning one is as good."""
    net, example = build(args.network, tuple(args.shape), **args.options), torch.zeros(2, *args.shape)
    with seeded("net"):
        method = registry.build(loop.method, net, example, **loop.options)
    method.to(args.device)
    regime = replace(args.regime, capture=loop.capture)
    learned = tasks[:1] if loop.method == "finetuning" else tasks
    for task in learned:
        asked = {"epochs": epochs} if task is learned[-1] else {"epochs": 1, "warmup": 0.0}
        log = method.learn(task, Fit(replace(regime, patience=1000, **asked)))
    return [epoch.seconds for epoch in log.epochs]


@dataclass(frozen=True)
class Profile:
    """What the GPU did in the second half of a run; the first warms up and records."""

    busy: float
    """The share of the time from the first kernel to the last in which one runs."""
    kernels: list[tuple[str, int, float]]
    """Name, how often, and milliseconds in all, the longest first."""


def profiled(run: Callable[[], object]) -> Profile:
    """Run it, and look."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    found = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    found = sorted(found, key=lambda e: (e.time_range.start, e.time_range.end))[len(found) // 2 :]
    total, first, end = 0.0, float(found[0].time_range.start), float(found[0].time_range.start)
    kernels: dict[str, tuple[int, float]] = {}
    for event in found:
        start, stop = event.time_range.start, event.time_range.end
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
        count, spent = kernels.get(event.name, (0, 0.0))
        kernels[event.name] = count + 1, spent + (stop - start) / 1000
    ranked = sorted(((name, *each) for name, each in kernels.items()), key=lambda each: -each[2])
    return Profile(total / (end - first), ranked)


def loops(args: argparse.Namespace) -> dict[str, Ours]:
    """Ours, by what they are called. Recording is for GPUs."""
    wide = {"start": 0.85, "growth": 0.15, "align": 8}
    found = {"fine-tuning, recorded": Ours("finetuning", True)}
    found["TFM, recorded"] = Ours("tfm", True)
    found["TFM, recorded, widths at multiples of 8"] = Ours("tfm", True, {"align": 8})
    found["TFM, recorded, widths at multiples of 8, the last 15 %"] = Ours("tfm", True, wide)
    found |= {"fine-tuning": Ours("finetuning", False), "TFM": Ours("tfm", False)}
    for name in args.also:
        # What is counted after a task is not measured: few images will do.
        few = {"samples": 64} if "samples" in registry.options(registry.find(name)[0]) else {}
        found[f"{name}, recorded"] = Ours(name, True, few)
    on_gpu = args.device.startswith("cuda")
    return {name: loop for name, loop in found.items() if args.only in name and (on_gpu or not loop.capture)}


def main() -> None:
    """Measure, print, and write JSON if asked."""
    args = arguments()
    if args.host:
        feed.SHARE = 0.0
    tasks = [random_task(args, n) for n in range(2)]
    sides: dict[str, Callable[[int], list[float]]] = {}
    if args.experiment is None:
        sides["plainest loop"] = lambda epochs: plainest(args, tasks[0], epochs)
    for name, loop in loops(args).items():
        sides[name] = lambda epochs, loop=loop: ours(args, tasks, loop, epochs)  # type: ignore[misc]
    rows: list[dict[str, Any]] = []
    on_gpu = args.device.startswith("cuda")
    for name, side in sides.items():
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(args.device)
            held = torch.cuda.memory_allocated(args.device)
        each = side(args.epochs)[1:]  # the first one warms up
        row: dict[str, Any] = {"loop": name, "seconds": statistics.median(each), "epochs": len(each)}
        if on_gpu:
            row["memory"] = torch.cuda.max_memory_allocated(args.device) - held
        rows.append(row | {"ratio": row["seconds"] / (rows[0]["seconds"] if rows else row["seconds"])})
        kernels = []
        if on_gpu:
            seen = profiled(lambda side=side: side(3))  # type: ignore[misc]
            rows[-1]["busy"], kernels = seen.busy, seen.kernels[: args.kernels]
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in rows[-1].items()), flush=True)
        for kernel, count, spent in kernels:
            print(f"    {spent:8.2f} ms in {count:6d}  {kernel[:100]}", flush=True)
        if args.out:  # after every row, so that a run that is cut leaves those it has
            args.out.write_text(json.dumps(facts_of(args) | {"rows": rows}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """What to measure."""
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
    parser.add_argument("--also", type=lambda s: s.split(","), default=[], help="more methods, by a comma between them")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of each loop, the longest first")
    parser.add_argument("--host", action="store_true", help="images stay on the host, as those do that do not fit")
    parser.add_argument("--experiment", type=Path, help="take network, regime and augmentation from this file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        for name in args.also:
            registry.find(name)
    except ValueError as error:
        parser.error(str(error))
    args.options, args.augmented = dict[str, Any](), dict[str, Any]()
    if args.experiment is None:
        chosen = dict(lr=args.lr, precision=args.precision, batch_size=args.batch)
        args.regime = Regime(device=args.device, **chosen)
        return args
    try:
        found = Experiment.load(args.experiment, device=args.device)
    except ValueError as error:
        parser.error(str(error))
    args.network, args.options = found.network.name, found.network.options
    args.regime, args.precision, args.batch = found.regime, found.regime.precision, found.regime.batch_size
    known = {one.name for one in fields(Preparation)}
    args.augmented = {name: value for name, value in found.scenarios[0].options.items() if name in known}
    return args


if __name__ == "__main__":
    main()
