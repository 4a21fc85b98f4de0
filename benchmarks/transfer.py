"""Is what an adopted network knows of use to new tasks? Growing it, against copies and adapters, on Tiny ImageNet.

A plain network learns some classes, is adopted as the first task, and then other classes come as further tasks:

    PYTHONPATH=src:. python -m benchmarks.transfer --data-root DIR --device cuda --out results/transfer.json
    PYTHONPATH=src:. python -m benchmarks.transfer --out results/transfer.json --docs docs/transfer.md
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import transfer_docs
from benchmarks.facts import commit
from benchmarks.transfer_contestants import (
    Adapting,
    Classifier,
    Contestant,
    Copying,
    FromScratch,
    Growing,
    bytes_of_growth,
    fresh,
    rank_within,
)
from benchmarks.transfer_lora import nbytes, rank_near
from benchmarks.transfer_training import exact, fewer, resident, train
from zeroforget.data import Plan, Task, scenario
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import adopt
from zeroforget.training import Regime, accuracy, logits
from zeroforget.training.seeding import seeded

SHAPE = (3, 64, 64)
PAD = 6
"""Crops are drawn from images padded by this many pixels."""


SMALL = 0.011
"""The smallest that contestants of equal bytes may cost, as a share of the network: half a megabyte of a ResNet-18."""


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    first: int = 140
    """Classes of the network in service."""
    classes: int = 20
    """Classes of each of the three tasks to come."""
    images: int = 500
    """Images of each class, at most, in each split."""
    width: float = 1.0
    first_epochs: int = 15
    first_batch: int = 256
    first_rate: float = 0.2
    epochs: int = 15
    batch: int = 128
    trial_epochs: int = 5
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    align: int = 1
    """Growing networks keep their widths at multiples of this."""


QUICK = Size(
    first=8, classes=4, images=32, width=0.125, first_epochs=3, first_batch=32, first_rate=0.05, epochs=2, batch=32
)
QUICK = replace(QUICK, trial_epochs=1, rates=(1e-3, 1e-2))


def tasks_of(root: Path | None, size: Size, seed: int, device: str) -> list[Task]:
    """The first task's classes and three times other ones, drawn by the seed."""
    plan = Plan("transfer", ("tiny-imagenet",), sizes=(140, 20, 20, 20), names=("service", "two", "three", "four"))
    found = scenario(plan, seed, root, _progress).tasks
    counts = (size.first, *[size.classes] * 3)
    tasks = [fewer(task, count, size.images) for task, count in zip(found, counts, strict=True)]
    return [resident(replace(task, prepare=replace(task.prepare, pad=PAD)), device) for task in tasks]


def _progress(what: str, done: int, total: int) -> None:
    if total and done == total:
        print(f"{what}: {total}", flush=True)


class Race:
    """One seed: a network in service, then every contestant."""

    def __init__(
        self, size: Size, seed: int, device: str, eager: bool, root: Path | None, without: Sequence[str] = ()
    ) -> None:
        self.size, self.seed, self.device, self.eager, self.without = size, seed, device, eager, without
        self.began = time.perf_counter()
        self.first, *self.tasks = tasks_of(root, size, seed, device)
        self.facts: dict[str, Any] = {"seed": seed, "classes": [list(task.classes) for task in self.tasks]}
        self.facts["contestants"] = []
        self.say(f"{len(self.first.train)} images to begin with, {len(self.tasks[0].train)} in each task to come")

    def say(self, line: str) -> None:
        """A line with the time."""
        print(f"{time.perf_counter() - self.began:7.1f} s  seed {self.seed}: {line}", flush=True)

    def run(self) -> Iterator[dict[str, Any]]:
        """Everything in order; what is known so far comes out whenever there is more of it."""
        classifier = self.in_service()
        yield self.facts
        net = self.adopted(classifier)
        yield self.facts
        for contestant in self.contestants(classifier, net):
            if not any(word in contestant.name for word in self.without):
                yield from self.compete(contestant)
        self.facts["seconds"] = time.perf_counter() - self.began

    def regime(self, optimizer: str, rate: float, epochs: int, batch: int, **options: float) -> Regime:
        """Mixed precision and recorded steps on a GPU; plain float32 elsewhere."""
        cuda = self.device.startswith("cuda")
        return Regime(
            optimizer=optimizer,
            lr=rate,
            options=options,
            epochs=epochs,
            batch_size=batch,
            precision="bf16" if cuda else "float32",
            device=self.device,
            capture=cuda and not self.eager,
        )

    # The network in service ------------------------------------------------------------------------------------

    def in_service(self) -> Classifier:
        """A plain network, trained in plain PyTorch."""
        size = self.size
        with seeded("service", self.seed):
            classifier = fresh(SHAPE, size.first, size.width).to(self.device)
        regime = self.regime(
            "sgd", size.first_rate, size.first_epochs, size.first_batch, momentum=0.9, weight_decay=5e-4
        )

        def told(epoch: int, loss: float, seconds: float) -> None:
            self.say(f"in service: epoch {epoch} of {size.first_epochs}, loss {loss:.3f}, {seconds:.1f} s")

        took = train(classifier, lambda: dict(classifier.state_dict()), self.first, regime, self.seed, told)
        # Trained with channels last; answers are compared bit for bit in the usual order.
        classifier.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        classifier.requires_grad_(False).eval()
        right = self.judge(classifier, self.first)
        self.say(f"in service: {right:.1%} of {size.first} classes, {took.seconds:.1f} s, {took.ms_per_step:.2f} ms")
        self.facts["service"] = asdict(took) | {"accuracy": right, "bytes": nbytes(dict(classifier.state_dict()))}
        return classifier

    def adopted(self, classifier: Classifier) -> GrowingNetwork:
        """The same network as the first task of one that grows, compared on the device and before that."""
        self.expected = self.probe(classifier)
        start = time.perf_counter()
        example = torch.randn(2, *SHAPE)
        net = adopt(classifier.cpu(), example, task=self.first.name, classes=self.first.classes, align=self.size.align)
        seconds = time.perf_counter() - start
        net.to(self.device)
        classifier.to(self.device)
        equal = torch.equal(self.probe(net.dense(0)), self.expected)
        self.say(f"adopted in {seconds:.1f} s; logits bit-equal: {equal}")
        self.facts["adopted"] = {"seconds": seconds, "equal": equal, "axes": net.widths()}
        return net

    def probe(self, model: nn.Module) -> Tensor:
        """Logits of the first task's test images."""
        with exact():
            return logits(model, self.first.test, self.first.prepare, device=self.device)

    def judge(self, model: nn.Module, task: Task, part: str = "test") -> float:
        """The share of a task's images that a network gets right."""
        with exact():
            return accuracy(model.eval(), getattr(task, part), task.prepare, device=self.device)

    # Contestants -----------------------------------------------------------------------------------------------

    def contestants(self, classifier: Classifier, net: GrowingNetwork) -> Iterator[Contestant]:
        """Those of equal bytes get the ranks whose bytes are closest to what growing costs on average, or to a small
        share of the network."""
        yield Growing(net, 0.0)
        yield Growing(net, 0.05)
        yield Growing(net, 0.2)
        tasks, classes = len(self.tasks), self.size.classes
        with seeded("sizes", self.seed):
            bytes_of = {f"growth {100 * g:g} %": bytes_of_growth(net, g, tasks, classes) for g in (0.05, 0.2)}
            few = f"{100 * SMALL:g} % of the network"
            bytes_of[few] = SMALL * nbytes(dict(classifier.state_dict()))
            leaning = [
                (growth, rank_within(net, growth, bytes_of[like], tasks, classes), like)
                for growth, like in ((0.02, "growth 5 %"), (0.0, "growth 5 %"), (0.002, few), (0.0, few))
            ]
        for growth, rank, like in leaning:
            yield Growing(net, growth, rank, like)
        yield Copying(classifier)
        for like, wanted in bytes_of.items():
            yield Adapting(classifier, rank_near(classifier.features, classes, wanted), like)
        yield FromScratch(classifier, SHAPE, self.size.width)

    def compete(self, contestant: Contestant) -> Iterator[dict[str, Any]]:
        """A rate by the first new task's validation images, then all tasks with it."""
        size = self.size
        trials = {rate: self.learn(contestant, self.tasks[0], rate, size.trial_epochs, "val") for rate in size.rates}
        rate = max(trials, key=lambda rate: trials[rate]["accuracy"])
        shown = ", ".join(f"{r:g}: {trial['accuracy']:.1%}" for r, trial in trials.items())
        self.say(f"{contestant.name}: rate {rate:g} of {shown}")
        facts: dict[str, Any] = {"name": contestant.name, "rate": rate, "tasks": []}
        facts["trials"] = {f"{r:g}": trial["accuracy"] for r, trial in trials.items()}
        if isinstance(contestant, Adapting | Growing) and contestant.rank:
            facts["rank"] = contestant.rank
        self.facts["contestants"].append(facts)
        for task in self.tasks:
            facts["tasks"].append(self.learn(contestant, task, rate, size.epochs, "test"))
            yield self.facts

    def learn(self, contestant: Contestant, task: Task, rate: float, epochs: int, part: str) -> dict[str, Any]:
        """One task. A trial, judged by validation images, is taken back; what is judged by test images stays."""
        with seeded("begin", self.seed, task.name):
            model = contestant.begin(task)
        regime = self.regime("adamw", rate, epochs, self.size.batch, weight_decay=0.01)
        took = train(model, contestant.moving, task, regime, self.seed)
        facts = asdict(took) | {"task": task.name, "accuracy": self.judge(contestant.answer(), task, part)}
        if part == "val":
            contestant.discard()
            return facts
        facts["bytes"] = contestant.stored()
        facts["first_equal"] = torch.equal(self.probe(contestant.first()), self.expected)
        self.say(
            f"{contestant.name}, task {task.name}: {facts['accuracy']:.1%}, {facts['bytes'] / 1e6:.2f} MB, "
            f"{took.seconds:.1f} s, {took.ms_per_step:.2f} ms a step, first task bit-equal: {facts['first_equal']}"
        )
        return facts


def write(path: Path | None, found: dict[str, Any]) -> None:
    """What is known so far; a run that is cut leaves a whole file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(json.dumps(found, indent=1) + "\n")
    aside.replace(path)


def about(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Where and how this was measured."""
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "cpu"
    facts = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "device": device, "torch": torch.__version__}
    words = ["DIR" if word == str(args.data_root) else word for word in sys.argv[1:]]
    facts |= {"command": shlex.join(["python", "-m", "benchmarks.transfer", *words]), "commit": commit()}
    return facts | {"quick": args.quick, "eager": args.eager, "size": asdict(size), "runs": []}


def join(files: Sequence[Path]) -> dict[str, Any]:
    """The seeds of several results as those of one, if all was alike but the seed."""
    found = [json.loads(file.read_text()) for file in files]
    for file, other in zip(files, found, strict=True):
        for key in ("commit", "device", "torch", "size"):
            if other[key] != found[0][key]:
                sys.exit(f"{file} differs from {files[0]} in its {key}: {other[key]} and {found[0][key]}")
    runs = sorted((run for each in found for run in each["runs"]), key=lambda run: run["seed"])
    whole: dict[str, Any] = found[0] | {"command": "; ".join(each["command"] for each in found), "runs": runs}
    return whole


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data-root", type=Path, help="the folder with tiny-imagenet-200")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--align", type=int, default=1, help="keep growing widths at multiples of this")
    parser.add_argument("--without", nargs="+", default=[], metavar="WORD", help="leave out whose name has this word")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="only write these seeds' results as one")
    parser.add_argument("--quick", action="store_true", help="a size that proves nothing but runs in a minute")
    parser.add_argument("--eager", action="store_true", help="on a GPU: do not record steps as CUDA graphs")
    parser.add_argument("--out", type=Path, help="a JSON file for the results, written anew as they come")
    parser.add_argument("--docs", type=Path, help="only fill this page's table from the file given by --out")
    return parser.parse_args(words)


def main() -> None:
    """Run every seed, or write the page."""
    args = arguments()
    if args.docs is not None:
        if args.out is None or not args.out.is_file():
            sys.exit("--docs needs --out FILE, the results to fill the page from")
        transfer_docs.write(args.docs, args.out)
        return
    if args.join:
        write(args.out, join(args.join))
        return
    size = replace(QUICK if args.quick else Size(), align=args.align)
    found = about(args, size)
    for seed in args.seeds:
        race = Race(size, seed, args.device, args.eager, args.data_root, args.without)
        found["runs"].append(race.facts)
        for _ in race.run():
            write(args.out, found)
        write(args.out, found)


if __name__ == "__main__":
    main()
