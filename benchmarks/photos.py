"""What a person with a few dozen photos a class gets: accuracy, interval, seconds and bytes, and how good the guess of
the task is.

    python -m benchmarks.photos --data DIR --squeezenet FILE --out results/photos.json

DIR holds `tiny-imagenet` and `cifar-100`, packed. The classes are of the 40 that the embedded backbone's twin never saw
(`benchmarks/backbone.py`), and the pictures of the parts that no network here was trained on. Those of `TUNED` are of
other classes. Each later task is learned after another one, as in practice. Results are written as they come, and what
is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.facts import commit
from benchmarks.packed import PARTS, Packed, names
from zeroforget import nets
from zeroforget.data import Preparation
from zeroforget.nets import resnet
from zeroforget.store import Model, open_model
from zeroforget.store.pictures import list_pictures, read_pictures
from zeroforget.store.schema import interval
from zeroforget.store.weights import read_weights
from zeroforget.training.probe import fit_head

LEARNED = 40
"""Photos a class to learn from; the others test."""
SIZE = 96
"""Pixels for SqueezeNet: its features of smaller pictures are poor, and larger ones take long."""
SETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "food": ("tiny-imagenet", ("guacamole", "ice cream", "ice lolly", "cauliflower", "meat loaf")),
    "things": (
        "tiny-imagenet",
        ("candle", "cash machine", "chest", "gasmask", "iPod", "punching bag", "space heater", "stopwatch"),
    ),
    "animals": ("cifar-100", ("beaver", "fox", "trout", "whale", "worm")),
    "outdoors": (
        "cifar-100",
        ("forest", "house", "maple_tree", "oak_tree", "pine_tree", "plain", "sea", "sunflower"),
    ),
    "creatures": ("tiny-imagenet", ("bullfrog", "tarantula", "Chihuahua", "ox")),
    "objects": ("cifar-100", ("bed", "bicycle", "can", "pear", "rocket")),
    "fish": ("cifar-100", ("aquarium_fish", "flatfish", "ray", "shark", "dolphin")),
    "traffic": ("cifar-100", ("bus", "pickup_truck", "train", "motorcycle", "tank", "tractor", "streetcar")),
    "insects": ("cifar-100", ("bee", "beetle", "butterfly", "caterpillar", "cockroach", "spider")),
    "garden": ("cifar-100", ("orchid", "poppy", "rose", "tulip", "mushroom", "apple", "orange", "sweet_pepper")),
}
MEASURED = ("food", "animals", "things", "outdoors")
TUNED = ("fish", "traffic", "insects", "garden")
"""By random splits of sets like these the training of what a task adds was chosen."""
UNLIKE = (("creatures", "food", "things"), ("animals", "objects", "outdoors"))
"""Tasks of the same source, so that no guess can go by how sharp a picture is."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the file lacks."""
    args = _arguments(argv)
    found = json.loads(args.out.read_text()) if args.out.exists() else _begun()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        if not found.get("uneven"):
            found["uneven"] = [bench.uneven(name) for name in MEASURED]
        if not found["guesses"]:
            found["guesses"] = [bench.guesses(tasks) for tasks in UNLIKE]
            args.out.write_text(json.dumps(found, indent=1) + "\n")
        for name in args.sets.split(","):
            for place, (what, run) in enumerate(bench.contestants().items()):
                if args.only and what not in map(str.strip, args.only.split(";")):
                    continue
                if any((row["what"], row["set"]) == (what, name) for row in found["tasks"]):
                    continue
                began = time.perf_counter()
                right, bytes_, notes = run(name)
                row = {"what": what, "place": place, "set": name, "right": right, "pictures": bench.tests(name)}
                row |= {"seconds": round(time.perf_counter() - began, 1), "bytes": bytes_, "commit": commit()} | notes
                found["tasks"].append(row)
                args.out.write_text(json.dumps(found, indent=1) + "\n")
                print(json.dumps(row), flush=True)
    print(page([args.out]))


def _begun() -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.photos --data DIR --squeezenet FILE --out results/photos.json",
        "commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d"), "seed": 0, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "learned": LEARNED,
        "sets": {name: {"source": source, "classes": list(kinds)} for name, (source, kinds) in SETS.items()},
        "tasks": [], "guesses": [],
    }  # fmt: skip


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.photos", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--squeezenet", type=Path, required=True, help="SqueezeNet 1.0's weights by torchvision's names"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(MEASURED), help=f"others are {', '.join(TUNED)}")
    parser.add_argument(
        "--only", help="such rows alone, parted by semicolons: 'SqueezeNet, frozen; SqueezeNet, rank 16'"
    )
    parser.add_argument("--epochs", type=int, help="of all that is trained, to try this out")
    return parser.parse_args(argv)


def cut(data: Path, name: str, folder: Path) -> None:
    """A set's photos as class folders: `learn` has the first ones of each class, `test` the others."""
    source, kinds = SETS[name]
    (part,) = PARTS[source]["test"]
    packed, known = Packed(data / source, part), [one.split(",")[0] for one in names(data, source)]
    labels = packed.labels
    for kind in kinds:
        for place, row in enumerate(np.flatnonzero(labels == known.index(kind)).tolist()):
            into = folder / name / ("learn" if place < LEARNED else "test") / kind
            into.mkdir(parents=True, exist_ok=True)
            content = next(packed.files(row, row + 1))
            ending = "png" if content.startswith(b"\x89PNG") else "jpg"
            (into / f"{row:05d}.{ending}").write_bytes(content)


Outcome = tuple[int, int, dict[str, Any]]
"""Right answers on the test photos, bytes that the task takes, and what else is to be told."""


@dataclass
class Bench:
    """The photos in a folder, and models that have learned one task before the one that is measured."""

    args: argparse.Namespace
    folder: Path

    def __post_init__(self) -> None:
        for name in SETS:
            cut(self.args.data, name, self.folder / "photos")
        self.weights = {"network": "squeezenet", "weights": self.args.squeezenet, "size": SIZE}

    def contestants(self) -> dict[str, Callable[[str], Outcome]]:
        """All that is measured, in the table's order."""
        given, trained = self.weights, {} if self.args.epochs is None else {"epochs": self.args.epochs}
        return {
            "from scratch": lambda name: self.later(name, {"pretrained": False, "size": 64} | trained, None),
            "embedded, frozen (the default)": lambda name: self.later(name, {}, {}),
            "embedded, rank 16": lambda name: self.later(name, {}, {"rank": 16} | trained),
            "embedded, growth 0.1": lambda name: self.later(name, {}, {"growth": 0.1} | trained),
            "embedded, linear probe": lambda name: self.probe(name, "compact", resnet.embedded_weights(), 64),
            "SqueezeNet, frozen": lambda name: self.later(name, given, {}),
            "SqueezeNet, frozen, 224 pixels": lambda name: self.later(name, given | {"size": 224}, {}),
            "SqueezeNet, rank 16": lambda name: self.later(name, given, {"rank": 16} | trained),
            "SqueezeNet, growth 0.1": lambda name: self.later(name, given, {"growth": 0.1} | trained),
            "SqueezeNet, rank 16 and growth 0.1": lambda name: self.later(
                name, given, {"rank": 16, "growth": 0.1} | trained
            ),
            "SqueezeNet, linear probe": lambda name: self.probe(name, "squeezenet", self.args.squeezenet, SIZE),
            "SqueezeNet, a fine-tuned copy": self.fine_tuned,
        }

    def tests(self, name: str) -> int:
        """How many photos test a set."""
        return len(list_pictures(self.folder / "photos" / name / "test").files)

    def _parts(self, name: str) -> tuple[Path, Path]:
        return self.folder / "photos" / name / "learn", self.folder / "photos" / name / "test"

    def later(self, name: str, first: dict[str, Any], options: dict[str, Any] | None) -> Outcome:
        """A task of a model that has learned another one from the same start; with None, the first task."""
        place = self.folder / "model"
        shutil.rmtree(place, ignore_errors=True)
        model, (learn, test) = open_model(place), self._parts(name)
        if options is None:
            facts = model.learn(learn, name, test=test, progress=False, **first)
        else:
            self._before(model, first)
            facts = model.learn(learn, name, test=test, progress=False, **options)
        told = {key: facts.training[key] for key in ("epochs", "kept", "selection") if key in facts.training}
        told |= {"new_features": sum(facts.born.values()) if options else 0, "learning": facts.training["seconds"]}
        return round(facts.accuracy * facts.data.held_out), facts.bytes, told

    def _before(self, model: Model, first: dict[str, Any]) -> None:
        """Some other task, so that the one that is measured is a later one."""
        kept = self.folder / f"before-{first.get('network', 'embedded')}-{first.get('size')}"
        if not kept.exists():
            open_model(kept).learn(self._parts("creatures")[0], "creatures", progress=False, **first)
        shutil.copytree(kept, model.path)
        model.refresh()

    def probe(self, name: str, network: str, weights: Path, size: int) -> Outcome:
        """scikit-learn's logistic regression on the network's features, its strength by cross-validation."""
        from sklearn.linear_model import LogisticRegressionCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        net = filled(network, weights, size).eval()
        (x, y), (tests, targets) = ((features(net, images), labels) for images, labels in self._images(name, size))
        made = make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=[1e-4, 1e-3, 1e-2, 1e-1, 1], max_iter=300))
        made.fit(x.numpy(), y.numpy())
        right = int((torch.from_numpy(made.predict(tests.numpy())) == targets).sum())
        return right, 4 * (x.shape[1] + 1) * len(SETS[name][1]), {}

    def fine_tuned(self, name: str) -> Outcome:
        """A copy of the whole network for this task, in plain PyTorch: 10 epochs of SGD with a cosine from the head
        that fits the features. It has no selection part, so it learns from all photos."""
        torch.manual_seed(0)
        (images, labels), (tests, targets) = self._images(name, SIZE)
        body = filled("squeezenet", self.args.squeezenet, SIZE)
        known = features(body.eval(), images), labels
        start, linear = fit_head(known, known, len(SETS[name][1])), nn.Linear(512, len(SETS[name][1]))
        linear.load_state_dict({"weight": start.weight, "bias": start.bias})
        net = nn.Sequential(body, linear)
        epochs, size, prepare = self.args.epochs or 10, 32, Preparation(MEAN, STD, pad=SIZE // 16, flip=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9, weight_decay=1e-4)
        steps = epochs * -(-len(labels) // size)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(epochs):
            for rows in torch.randperm(len(labels)).split(size):
                loss = nn.functional.cross_entropy(net.train()(prepare.train(images[rows])), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 5.0)
                optimizer.step()
                falling.step()
        right = int((features(net.eval(), tests).argmax(1) == targets).sum())
        return right, sum(value.nbytes for value in net.state_dict().values()), {}

    def _images(self, name: str, size: int) -> list[tuple[Tensor, Tensor]]:
        found = [read_pictures(list_pictures(part), (3, size, size)) for part in self._parts(name)]
        return [(one.images[:], one.labels) for one in found]

    def uneven(self, name: str) -> dict[str, Any]:
        """Heads on the embedded network's features where every other class has a fifth of the photos: right answers of
        one fitted to the photos as they are, and of one to which each class counts the same."""
        net = filled("compact", resnet.embedded_weights(), 64).eval()
        (x, y), (tests, targets) = ((features(net, images), labels) for images, labels in self._images(name, 64))
        right = {False: 0, True: 0}
        for odd in (0, 1):
            each = [(y == label).nonzero().squeeze(1) for label in range(int(y.max()) + 1)]
            counts = [len(own) if (label + odd) % 2 else len(own) // 5 for label, own in enumerate(each)]
            rows = torch.cat([own[:count] for own, count in zip(each, counts, strict=True)])
            for even in right:
                known = x[rows], y[rows]
                head = fit_head(known, known, len(each), even=even)
                right[even] += int(((tests @ head.weight.T + head.bias).argmax(1) == targets).sum())
        return {"set": name, "pictures": 2 * len(targets), "as they are": right[False], "even": right[True]}

    def guesses(self, tasks: Sequence[str]) -> dict[str, Any]:
        """Three tasks learned by default: which one each test photo is taken for, and how sure that was."""
        place = self.folder / "model"
        shutil.rmtree(place, ignore_errors=True)
        model, sure, right = open_model(place), list[float](), list[bool]()
        for name in tasks:
            model.learn(self._parts(name)[0], name, progress=False)
        for name in tasks:
            files = list_pictures(self._parts(name)[1]).files
            for one in model.predict(files):
                sure.append(round(one.tasks[0][1], 4))
                right.append(one.task == name)
        return {"tasks": list(tasks), "sure": sure, "right": right}


def filled(network: str, weights: Path, size: int) -> nn.Module:
    """A network of ours with the weights of a file, by our names or torchvision's."""
    net = nets.build(network, (3, size, size))
    values = {name: value.float() for name, value in read_weights(weights).items() if not name.startswith("classifier")}
    lacking = net.load_state_dict(values, strict=False)
    assert not lacking.unexpected_keys
    assert all("num_batches" in key for key in lacking.missing_keys)
    return net


@torch.no_grad()
def features(net: nn.Module, images: Tensor) -> Tensor:
    """What a network makes of pictures, without augmentation."""
    return torch.cat([net(Preparation(MEAN, STD).test(part)) for part in images.split(64)])


def page(files: Sequence[Path]) -> str:
    """The tables of the docs, from this benchmark's file and those of the embedded network and its twin."""
    found, *backbones = (json.loads(file.read_text()) for file in files)
    commits = dict.fromkeys(f"commit {row.get('commit', found['commit'])}" for row in found["tasks"])
    about = (
        f"`{found['command']}`: one thread of a CPU, torch {found['torch']}, seed {found['seed']}, "
        f"{' and '.join(commits)}, {found['date']}."
    )
    guess = "## Which task is this?\n\nThree tasks are learned by default, and the model guesses each test photo's."
    parts = [
        table(found, MEASURED),
        weighed(found),
        about,
        *map(twin, [backbones] if backbones else []),
        guess,
        guessed(found),
    ]
    if any(row["set"] in TUNED for row in found["tasks"]):
        parts += [
            "## Where the training was chosen",
            "Classes that SqueezeNet may know, and the embedded network does.",
            table(found, TUNED),
        ]
    return "\n\n".join(parts)


def twin(backbones: Sequence[dict[str, Any]]) -> str:
    """What it is worth that the embedded network was trained on these classes."""
    embedded, without = (one["nearest_mean_of_40"] for one in backbones)
    lines = ["| of 20 classes, the nearest mean is right | embedded | its twin |", "|---|--:|--:|"]
    lines += [f"| {source} | {100 * embedded[source]:.1f} | {100 * without[source]:.1f} |" for source in embedded]
    return "\n".join(lines)


def weighed(found: dict[str, Any]) -> str:
    """Heads on uneven classes."""
    sums = {key: sum(row[key] for row in found["uneven"]) for key in ("pictures", "as they are", "even")}
    as_they_are, even = (100 * sums[key] / sums["pictures"] for key in ("as they are", "even"))
    return (
        "Where every other class has a fifth of the photos, a head that counts each class the same is right for "
        f"{even:.1f} % of the test photos. One that takes them as they are is right for {as_they_are:.1f} %."
    )


def table(found: dict[str, Any], wanted: Sequence[str]) -> str:
    """A row for each contestant: accuracy of each set; and of the sets that all have, accuracy with its interval,
    seconds and bytes a task."""
    own = sorted((row for row in found["tasks"] if row["set"] in wanted), key=lambda row: row["place"])
    there = {(row["what"], row["set"]) for row in own}
    whats = list(dict.fromkeys(row["what"] for row in own))
    sets = [name for name in wanted if any(one == name for _, one in there)]
    shared = [name for name in sets if all((what, name) in there for what in whats)]
    every = "all four" if shared == list(wanted) else " and ".join(shared)
    heads = [*sets, f"{every} (95 % interval)", "s a task", "kB a task"]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for what in whats:
        rows = {row["set"]: row for row in own if row["what"] == what}
        cells = [f"{100 * rows[s]['right'] / rows[s]['pictures']:.1f}" if s in rows else "–" for s in sets]
        right, count = (sum(rows[name][key] for name in shared) for key in ("right", "pictures"))
        low, high = interval(right / count, count)
        cells.append(f"{100 * right / count:.1f} ({100 * low:.0f}–{100 * high:.0f})")
        seconds, size = (sum(rows[name][key] for name in shared) / len(shared) for key in ("seconds", "bytes"))
        lines.append(f"| {what} | {' | '.join(cells)} | {seconds:.0f} | {size / 1e3:,.0f} |")
    return "\n".join(lines)


def guessed(found: dict[str, Any]) -> str:
    """How often the guess of the task is right, in all and by how likely it was said to be."""
    lines = [
        "| tasks | right | said 70 to 85 % | said 85 to 95 % | said 95 % and more | not sure |",
        "|---|" + "--:|" * 5,
    ]
    every: dict[str, Any] = {"sure": [], "right": []}
    for one in found["guesses"]:
        every = {key: every[key] + one[key] for key in every}
        lines.append(_guess_row(", ".join(one["tasks"]), one))
    return "\n".join([*lines, _guess_row("both", every)]) if len(found["guesses"]) > 1 else "\n".join(lines)


def _guess_row(name: str, one: dict[str, Any]) -> str:
    sure, right = torch.tensor(one["sure"]), torch.tensor(one["right"]).double()
    cells = [f"{100 * right.mean():.1f} %"]
    for low, high in ((0.7, 0.85), (0.85, 0.95), (0.95, 2.0), (0.0, 0.7)):
        within = (sure >= low) & (sure < high)
        cells.append(f"{100 * right[within].mean():.0f} % of {int(within.sum())}" if within.any() else "–")
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
