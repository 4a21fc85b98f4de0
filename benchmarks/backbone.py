"""Trains the network that comes with the package, on all of Tiny ImageNet and CIFAR-100, and a twin without 40 classes.

    python -m benchmarks.backbone --data DIR --out DIR --minutes 6 --without 0,40 --device cuda

DIR holds `tiny-imagenet` and `cifar-100`, packed. For each network a file of weights (float16) and one of facts are
written. The number of epochs is what fits into the time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.facts import commit
from benchmarks.packed import PARTS, names, pictures, unseen
from zeroforget import nets
from zeroforget.data import Preparation, Split, Task
from zeroforget.methods.baselines import Finetuning
from zeroforget.training import Fit, Progress, Regime
from zeroforget.training.evaluate import logits

SIZE, NETWORK = 64, "compact"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RESERVE = 12.0
"""Seconds to measure and write in."""
SHOTS = 50
"""Training pictures that give the mean of a class nobody has seen."""


def main(argv: list[str] | None = None) -> None:
    """Train one network after another, each in its share of the time."""
    args = _arguments(argv)
    began = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    data = {
        part: {source: pictures(args.data, source, part, SIZE, args.every) for source in PARTS}
        for part in ("train", "test")
    }
    print(f"decoded in {time.perf_counter() - began:.1f} s", flush=True)
    counts = [int(count) for count in args.without.split(",")]
    for place, count in enumerate(counts):
        end = began + args.minutes * 60 * (place + 1) / len(counts)
        Backbone(args, data, count).make(end)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.backbone", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="for all networks together")
    parser.add_argument(
        "--without", default="0,40", help="classes that a network never sees, a network for each number"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--epochs", type=int, help="instead of what fits into the time")
    parser.add_argument("--every", type=int, default=1, help="take one of so many pictures, to try this out")
    return parser.parse_args(argv)


class Backbone:
    """One network: what it sees, its training, its file."""

    def __init__(self, args: argparse.Namespace, data: dict[str, Any], count: int) -> None:
        self.args, self.data, self.count = args, data, count
        self.without = unseen(args.data, count, args.seed) if count else {source: [] for source in PARTS}
        self.held = unseen(args.data, 40, args.seed)
        """The classes that both networks are measured on, which the twin has not seen."""
        self.classes: list[str] = []
        self.first: dict[str, int] = {}
        for source, own in self.without.items():
            known = names(args.data, source)
            self.first[source] = len(self.classes)
            self.classes += [f"{source}/{name}" for label, name in enumerate(known) if label not in own]

    def make(self, end: float) -> None:
        """Train until `end`, write, read back, measure."""
        began, args = time.perf_counter(), self.args
        task = self._task()
        epochs = args.epochs or self._epochs(task, end)
        print(f"{len(self.classes)} classes, {len(task.train)} pictures, {epochs} epochs", flush=True)
        method = self._method()
        log = method.learn(task, Fit(self._regime(epochs), args.seed, _told))
        name = f"backbone-without-{self.count}" if self.count else "backbone"
        path = args.out / f"{name}.safetensors"
        _write(method.net, path)
        head, net = method.heads[0].float(), nets.build(NETWORK, (3, SIZE, SIZE)).to(args.device)
        with safe_open(path, framework="pt") as opened:
            values = {key: opened.get_tensor(key).float() for key in opened.keys()}  # noqa: SIM118 - no mapping
        lacking = net.load_state_dict(values, strict=False)
        assert not lacking.unexpected_keys
        assert all("num_batches" in key for key in lacking.missing_keys)
        net.eval()
        facts = {
            "command": "python -m benchmarks.backbone " + " ".join(sys.argv[1:]),
            "commit": commit(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
            "seed": args.seed,
            "network": NETWORK,
            "size": SIZE,
            "without": {
                source: [names(args.data, source)[label] for label in own] for source, own in self.without.items()
            },
            "pictures": len(task.train),
            "epochs": epochs,
            "regime": vars(self._regime(epochs)),
            "prepare": vars(task.prepare),
            "seconds": round(time.perf_counter() - began, 1),
            "losses": [round(epoch.loss, 4) for epoch in log.epochs],
            "bytes": path.stat().st_size,
            "accuracy": self._accuracies(nn.Sequential(net, head.eval())),
            "nearest_mean_of_40": self._nearest_means(net),
        }
        path.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
        print(
            json.dumps({key: facts[key] for key in ("seconds", "bytes", "accuracy", "nearest_mean_of_40")}), flush=True
        )

    def _method(self) -> Finetuning:
        torch.manual_seed(self.args.seed)
        net = nets.build(NETWORK, (3, SIZE, SIZE))
        return Finetuning(net, torch.randn(2, 3, SIZE, SIZE)).to(self.args.device)

    def _task(self) -> Task:
        prepare = Preparation(MEAN, STD, zoom=0.35, flip=True, alter=0.3)
        train = [self._seen(source, "train") for source in PARTS]
        test = [self._seen(source, "test") for source in PARTS]
        draws = np.random.RandomState(self.args.seed)
        made = []
        for parts, most in ((train, 1.0), (test, 0.1)):
            images, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            if most < 1:
                rows = draws.permutation(len(labels))[: int(most * len(labels))]
                images, labels = images[rows], labels[rows]
            made.append(Split(torch.from_numpy(images), torch.from_numpy(labels)))
        return Task("photos", tuple(self.classes), made[0], made[1], made[1], prepare)

    def _seen(self, source: str, part: str) -> tuple[Any, Any]:
        """Pictures of a data set whose classes the network learns, with their labels among all of these."""
        images, labels = self.data[part][source]
        without = np.array(self.without[source], np.int64)
        rows = ~np.isin(labels, without)
        below = (labels[:, None] > without[None, :]).sum(1)  # so many labels before it are left out
        return images[rows] if len(without) else images, (labels - below + self.first[source])[rows]

    def _regime(self, epochs: int) -> Regime:
        cuda = self.args.device.startswith("cuda")
        return Regime(
            lr=self.args.lr, options={"momentum": 0.9, "weight_decay": 5e-4}, batch_size=self.args.batch, epochs=epochs,
            schedule="cosine", warmup=min(2.0, epochs / 4), keep="last", label_smoothing=0.1, cutmix=0.4,
            mix_until=0.85, clip=5.0, precision="bf16" if cuda else "float32", device=self.args.device,
        )  # fmt: skip

    def _epochs(self, task: Task, end: float) -> int:
        """How many epochs fit, by a training of a few steps whose first epoch records them."""
        steps = 60
        rows = torch.arange(min(steps * self.args.batch, len(task.train)))
        few = Split(task.train.images[rows], task.train.labels[rows])
        trial = Task(task.name, task.classes, few, task.val, task.val, task.prepare)
        log = self._method().learn(trial, Fit(self._regime(3), self.args.seed))
        shortest = min(epoch.seconds for epoch in log.epochs[1:])
        each = shortest * len(task.train) / len(few)
        left = end - time.perf_counter() - RESERVE
        print(f"about {each:.1f} s an epoch, {left:.0f} s left", flush=True)
        return max(2, math.floor(left / each))

    def _accuracies(self, net: nn.Module) -> dict[str, float]:
        """On test pictures of each data set, among all classes and among its own."""
        out, prepare, ends = {}, Preparation(MEAN, STD), [*list(self.first.values())[1:], len(self.classes)]
        for (source, first), last in zip(self.first.items(), ends, strict=True):
            images, labels = (torch.from_numpy(one) for one in self._seen(source, "test"))
            scores = logits(net, Split(images, labels), prepare, device=self.args.device)
            out[f"{source}, {len(self.classes)} classes"] = _share(scores.argmax(1) == labels)
            out[f"{source}, own {last - first}"] = _share(scores[:, first:last].argmax(1) == labels - first)
        return out

    def _nearest_means(self, net: nn.Module) -> dict[str, float]:
        """How many test pictures of the 40 classes lie nearest to their own class's mean feature, within a data set."""
        out, prepare = {}, Preparation(MEAN, STD)
        for source, own in self.held.items():
            means, found, wanted = [], [], []
            for place, label in enumerate(own):
                (images, labels), (tests, targets) = self.data["train"][source], self.data["test"][source]
                few = torch.from_numpy(images[np.flatnonzero(labels == label)[:SHOTS]])
                new = torch.from_numpy(tests[targets == label])
                means.append(_unit(self._features(net, few, prepare)).mean(0))
                found.append(_unit(self._features(net, new, prepare)))
                wanted += [place] * len(new)
            nearest = (torch.cat(found) @ _unit(torch.stack(means)).T).argmax(1)
            out[source] = _share(nearest == torch.tensor(wanted))
        return out

    def _features(self, net: nn.Module, images: Tensor, prepare: Preparation) -> Tensor:
        return logits(net, Split(images, torch.zeros(len(images), dtype=torch.int64)), prepare, device=self.args.device)


def _unit(values: Tensor) -> Tensor:
    return nn.functional.normalize(values, dim=-1)


def _share(right: Tensor) -> float:
    return round(float(right.double().mean()), 4)


def _told(progress: Progress) -> None:
    if progress.last is not None and progress.step == progress.steps:
        last = progress.last
        print(
            f"epoch {last.epoch + 1}: loss {last.loss:.3f}, {100 * last.val_accuracy:.1f} %, {last.seconds:.1f} s",
            flush=True,
        )


def _write(net: nn.Module, path: Path) -> None:
    """As float16, the counts of batches left out."""
    values = {
        name: value.detach().to("cpu", torch.float16).contiguous()
        for name, value in net.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    assert all(value.isfinite().all() for value in values.values())
    about = {"network": NETWORK, "size": SIZE, "mean": MEAN, "std": STD}
    save_file(values, path, {key: json.dumps(value) for key, value in about.items()})


if __name__ == "__main__":
    main()
