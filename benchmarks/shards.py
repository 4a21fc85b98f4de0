"""Reading pictures from shards: `python -m benchmarks.shards --out results/shards-cpu.json`.

Three questions. How many images a second a core are there for training, from shards, from a plain DataLoader over files
and by the `webdataset` library? What does it take to list ten thousand to ten million images? Does an epoch that was
stopped in its middle end with the bits of one that was not?

The pictures are pieces of two photos that scikit-learn has, as large as ImageNet's are on average, as JPEG of quality
90. Every contestant decodes the same files, brings them to their size in the same way and gives shuffled batches of
bytes. Each is a process of its own; what counts is the processor's time of all its processes, so other work on the
machine matters little.
`--libraries FOLDER` is where webdataset and simplejpeg lie, if they are not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.steps import facts_of
from zeroforget.data import Split, load, scenario
from zeroforget.data.decode import decode
from zeroforget.data.pack import pack
from zeroforget.data.readers.folders import class_files
from zeroforget.data.shards import Index, InShards, Rows
from zeroforget.data.sources import FLIPPED
from zeroforget.data.stream import Shard
from zeroforget.data.values import Treatment
from zeroforget.methods.baselines import Finetuning
from zeroforget.training import Fit, Progress, Regime, feed
from zeroforget.training.feed import ALONE, Sharded, batch_sizes

BATCH, EPOCHS = 64, 2
SETTINGS = {"500x375, brought to 224": ((500, 375), 224), "256x256, as they are": ((256, 256), 256)}
CLASSES = 10
WAYS = ("zeroforget", "zeroforget, Pillow alone", "webdataset", "DataLoader over files")


def photos(folder: Path, count: int, size: tuple[int, int] = (500, 375)) -> Path:
    """Pieces of two photos, in class folders."""
    from sklearn.datasets import load_sample_images

    whole = [Image.fromarray(image) for image in load_sample_images().images]
    random = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / f"class{label}").mkdir(parents=True)
    for number in range(count):
        wide = int(random.uniform(0.5, 0.9) * min(640, 427 * size[0] / size[1]))
        tall = wide * size[1] // size[0]
        left, top = int(random.integers(0, 640 - wide)), int(random.integers(0, 427 - tall))
        piece = whole[number % 2].resize(size, Image.Resampling.BICUBIC, (left, top, left + wide, top + tall))
        piece.save(folder / f"class{number % CLASSES}" / f"{number}.jpg", quality=90)
    return folder


# Contestants: each gives batches of bytes and labels ------------------------------------------------------------------


def ours(folder: Path, workers: int, side: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches as the training loop gets them."""
    os.environ["LOCAL_WORLD_SIZE"] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    found = load(f"shards:{folder / 'shards'}", size=side)
    split = Split(found.images, found.labels)
    sharded, sizes = Sharded(split, torch.device("cpu"), BATCH), batch_sizes(len(split), BATCH)
    order = sharded.shuffled(torch.Generator().manual_seed(0), sizes, ALONE)
    for rows in sharded.batches(order, sizes):
        yield sharded.window.batch(rows)


class Files(Dataset[tuple[Tensor, int]]):
    """Files in class folders, as a Dataset for a DataLoader is written."""

    def __init__(self, folder: Path, side: int) -> None:
        found, self.side = class_files(folder), side
        self.files, self.labels = found.files, found.labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.from_numpy(treated(self.files[row].read_bytes(), self.side)), self.labels[row]


def treated(content: bytes, side: int) -> Any:
    """By Pillow, as our own decoder does it where it has no other."""
    return np.ascontiguousarray(decode(io.BytesIO(content), side, fit="cover"))


def plain(folder: Path, workers: int, side: int) -> Iterable[tuple[Tensor, Tensor]]:
    """A DataLoader over files."""
    return DataLoader(Files(folder / "files", side), BATCH, shuffle=True, num_workers=workers)


def library(folder: Path, workers: int, side: int) -> Iterable[tuple[Tensor, Tensor]]:
    """The webdataset library over the same shards, with a buffer to shuffle in."""
    import webdataset

    names = sorted(str(file) for file in (folder / "shards").glob("*.tar"))
    read = webdataset.WebDataset(names, shardshuffle=len(names), workersplitter=webdataset.split_by_worker)
    samples = read.shuffle(1000).to_tuple("jpg", "cls").map_tuple(lambda c: torch.from_numpy(treated(c, side)), int)
    return DataLoader(samples.batched(BATCH), batch_size=None, num_workers=workers)


def run(way: str, folder: Path, workers: int, side: int) -> dict[str, float]:
    """One contestant, in this process and those that it starts."""
    if way != "zeroforget":  # a module of this name that cannot be imported comes first, in the processes too
        (folder / "without").mkdir(exist_ok=True)
        (folder / "without" / "simplejpeg.py").write_text("raise ImportError")
        sys.path.insert(0, str(folder / "without"))
    give: Callable[[Path, int, int], Iterable[tuple[Tensor, Tensor]]] = {
        "webdataset": library, "DataLoader over files": plain
    }.get(way, ours)  # fmt: skip
    seen, total, before, began = 0, 0, 0.0, 0.0
    for epoch in range(1 + EPOCHS):
        if epoch == 1:  # the first one starts processes, and verifies shards
            seen, before, began = 0, spent(), time.perf_counter()
        for images, labels in give(folder, workers, side):
            seen += len(labels)
            total += int(images[:, :, ::16, ::16].sum())
    return {"images": seen, "cpu": spent() - before, "wall": time.perf_counter() - began, "sum": total}


def spent() -> float:
    """Seconds of the processor, of this process and of those that it started, whether they live or not."""
    table = {int(file.parent.name): file.read_text().rpartition(")")[2].split() for file in _processes()}
    mine = {os.getpid()}
    while more := {pid for pid, fields in table.items() if int(fields[1]) in mine} - mine:
        mine |= more
    ticks = sum(int(tick) for pid in mine if pid in table for tick in table[pid][11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _processes() -> Iterator[Path]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            file.read_text()
            yield file


# Listing --------------------------------------------------------------------------------------------------------------


def listing(folder: Path, count: int) -> None:
    """An index of so many images, in shards that have a length and no content."""
    each, size = 10_000, 100_000
    shards = []
    for place in range(-(-count // each)):
        name, images = f"train-{place:06d}.tar", min(each, count - place * each)
        with (folder / name).open("wb") as file:
            file.truncate(images * size)
        shards.append(Shard(name, images * size, "0" * 64, images))
    numbers = np.arange(count)
    columns = {
        "start": numbers % each * size, "size": np.full(count, size - 1024), "label": numbers % 1000,
        "shard": numbers // each, "part": np.where(numbers // 1000 % 5 == 0, 2, 0),
    }  # fmt: skip
    names = tuple(f"class{number}" for number in range(1000))
    treatment = Treatment(224, fit="cover")
    Index("listed", names, (), 3, treatment, False, FLIPPED, tuple(shards), Rows.of(columns)).write(folder)


def resident() -> int:
    """Bytes of memory of this process that are not mapped from files, and those that are."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem"))


def listed(folder: Path) -> dict[str, float]:
    """What a scenario in ten tasks takes, and then the order of an epoch."""
    scenario("digits/5")  # what is imported on the way
    before, began = resident(), time.perf_counter()
    made = scenario(f"shards:{folder}/10")
    seconds, held = time.perf_counter() - began, resident() - before
    train = made.tasks[0].train
    assert isinstance(train.images, InShards)
    sharded, sizes = Sharded(train, torch.device("cpu"), BATCH), batch_sizes(len(train), BATCH)
    order = sharded.shuffled(torch.Generator().manual_seed(0), sizes, ALONE)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"bytes": held, "peak": peak, "seconds": seconds, "ordered": len(order)}


# Going on -------------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """Training was stopped here."""


def resumed(folder: Path) -> dict[str, Any]:
    """An epoch stopped in its middle and gone on with, beside one that was not."""
    task = scenario({"data": f"shards:{folder / 'shards'}", "size": 32, "name": "photos"}).tasks[0]
    feed.WINDOW, Sharded.leg = 2, 4
    batch = BATCH // 4
    steps = len(batch_sizes(len(task.train), batch))
    middle = steps // 2

    def stop(progress: Progress) -> None:
        if progress.step == middle:
            raise Stopped

    def learn(place: Path, told: Callable[[Progress], None]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(16))
        body(torch.zeros(2, 3, 32, 32))
        model = Finetuning(nn.Sequential(*body, nn.ReLU()), torch.zeros(2, 3, 32, 32))
        model.learn(task, Fit(Regime(epochs=1, batch_size=batch), folder=place, progress=told))
        return model.state_dict()

    taken = list[int]()
    with tempfile.TemporaryDirectory() as place:
        whole = learn(Path(place) / "whole", lambda progress: None)
        try:
            learn(Path(place) / "cut", stop)
        except Stopped:
            again = learn(Path(place) / "cut", lambda progress: taken.append(progress.step))
    return {
        "steps": steps, "stopped at": middle, "went on at": taken[0],
        "bit-equal": all(torch.equal(whole[name], again[name]) for name in whole),
    }  # fmt: skip


# All of it ------------------------------------------------------------------------------------------------------------


def alone(words: list[str]) -> dict[str, Any]:
    """What a part of this benchmark finds in a process of its own."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.shards", *words], capture_output=True)
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=3000, help="how many pictures are made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="processes that decode")
    parser.add_argument("--most", type=int, default=10**7, help="the longest listing")
    parser.add_argument("--libraries", type=Path, help="a folder with webdataset and simplejpeg")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", type=int, default=224, help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.libraries is not None:
        sys.path.append(str(args.libraries))
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(args.libraries)])
    if args.part is not None:
        what, place = args.part[0], Path(args.part[1])
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "listed": lambda: listed(place),
            "resumed": lambda: resumed(place),
        }
        print(json.dumps(parts[what]() if what in parts else run(what, place, args.workers, args.side)))
        return
    if args.libraries is not None:  # where they lie says nothing of how
        at = sys.argv.index("--libraries")
        del sys.argv[at : at + 2]
    del args.part, args.side, args.libraries
    args.device = "cpu"
    found: dict[str, Any] = {**facts_of(args), "simplejpeg": importlib.util.find_spec("simplejpeg") is not None}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["ZEROFORGET_CACHE"] = str(Path(scratch) / "cache")
        found["reading"], found["bytes of an image"] = {}, {}
        for name, (size, side) in SETTINGS.items():
            folder = Path(scratch) / str(side)
            photos(folder / "files", args.images, size)
            packed = pack(str(folder / "files"), folder / "shards", per_shard=max(1, args.images // 20))
            found["bytes of an image"][name] = packed.bytes // args.images
            found["reading"][name] = reading(folder, args, side)
        found["resumed"] = alone(["--part", "resumed", str(folder)])
    found["listing"] = {}
    for count in (10**power for power in range(4, 8) if 10**power <= args.most):
        with tempfile.TemporaryDirectory() as scratch:
            listing(Path(scratch), count)
            found["listing"][str(count)] = alone(["--part", "listed", scratch])
            print(count, found["listing"][str(count)], file=sys.stderr, flush=True)
    text = json.dumps(found, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


def reading(folder: Path, args: argparse.Namespace, side: int) -> dict[str, Any]:
    """Each contestant in turn, so many rounds: the median of its images for a second of the processor."""
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            seen[way].append(alone(["--part", way, str(folder), "--workers", str(args.workers), "--side", str(side)]))
            print(way, seen[way][-1], file=sys.stderr, flush=True)
    assert len({each["sum"] for runs in seen.values() for each in runs}) == 1, "they gave other pixels"
    return {
        way: {
            "images": runs[0]["images"],
            "a second a core": round(statistics.median(each["images"] / each["cpu"] for each in runs), 1),
            "a second": round(statistics.median(each["images"] / each["wall"] for each in runs), 1),
        }
        for way, runs in seen.items()
    }


if __name__ == "__main__":
    main()
