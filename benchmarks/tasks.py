"""What a model costs that has learned many tasks: `python -m benchmarks.tasks --out results/tasks-cpu.json`.

A folder of T tasks is written (of a small network, each later task with a head and a feature normalization of its own),
and every action is measured in a process of its own for each T. The exponent of an action is the slope between the two
largest T on logarithmic axes: 0 is a cost that does not grow, 1 one that grows in step with the tasks. What the file of
`--out` already holds of other numbers of tasks stays there.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.steps import facts_of
from zeroforget.files.hashes import sha256
from zeroforget.growing.network import GrowingNetwork
from zeroforget.serving.catalog import Networks, take
from zeroforget.store import TaskFacts, open_model
from zeroforget.store.folder import BORN, PROBE, SPREAD, TASK, Folder
from zeroforget.store.network import assemble_chain, probe_logits
from zeroforget.store.schema import text_of
from zeroforget.store.tensors import born
from zeroforget.store.verify import verify

NETWORK: dict[str, Any] = {"network": "lenet", "width": 0.5, "size": 28, "gray": True, "epochs": 1}
COMMAND = [sys.executable, "-m", "zeroforget"]


def pictures(folder: Path, side: int = 28) -> Path:
    """Two classes of noise: what is learned from them does not matter here."""
    random = np.random.default_rng(0)
    for number in range(2):
        (folder / f"class{number}").mkdir(parents=True)
        for row in range(12):
            values = random.integers(100 * number, 100 * number + 100, (side, side), np.uint8)
            Image.fromarray(values).save(folder / f"class{number}" / f"{row}.png")
    return folder


def write_tasks(path: Path, count: int) -> None:
    """Let a model that has learned have so many tasks: as if each had been learned, with random numbers for what it
    learned."""
    folder = Folder(path)
    chain = folder.read()
    net, tasks, last = assemble_chain(folder, chain), list(chain.tasks), chain.tasks[-1]
    known = {name: folder.tensors(folder.task(last), last, name) for name in (SPREAD, PROBE)}
    torch.manual_seed(0)
    for index in range(len(tasks), count):
        net.add_task(f"task{index + 1}", len(last.classes), 0.0, quiet=True)
        for parameter in net.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        tasks.append(_written(folder, tasks[-1], net, index, known))


def _written(folder: Folder, last: TaskFacts, net: GrowingNetwork, index: int, known: dict[str, Any]) -> TaskFacts:
    tensors, name = born(net, index), net.history[index].name
    facts = replace(last, number=index + 1, name=name, before=last.hash, growth=0.0, rank=0)
    aside, dense = folder.aside(facts.folder), net.dense(index)
    logits = probe_logits(dense, known[PROBE]["images"], facts.preprocessing)
    contents = {BORN: tensors, PROBE: {"images": known[PROBE]["images"], "logits": logits}, SPREAD: known[SPREAD]}
    facts = replace(
        facts,
        born=dict.fromkeys(last.born, 0),
        weights=sum(t.numel() for t in tensors.values()),
        network=net.fingerprint(index),
        probe=sha256(logits.numpy().tobytes()),
        files={name: folder.write_tensors(aside, name, content) for name, content in contents.items()},
    )
    content = text_of(facts, folder.task(facts) / TASK)
    (aside / TASK).write_bytes(content)
    folder.commit(aside, facts.folder)
    return replace(facts, hash=sha256(content))


# What is measured: each in a process of its own, in seconds of the processor ----------------------------------------


def cpu(work: Callable[[], object], repeat: int = 1) -> float:
    """Seconds of the processor: the median of several times."""
    times = []
    for _ in range(repeat):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def network(path: Path) -> dict[str, float]:
    """What the growing network itself takes, in memory."""
    folder = Folder(path)
    chain = folder.read()
    net = assemble_chain(folder, chain)
    shape, newest = net.shape, len(net.history) - 1
    number = iter(range(1000))
    out = {"dense": cpu(lambda: net.dense(newest), 25)}
    out["add_task"] = cpu(lambda: net.add_task(f"another{next(number)}", 2), 9)
    out["train"] = cpu(net.train, 25)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    x, y = torch.randn(16, *shape), torch.arange(16) % 2
    name = net.tasks[-1]

    def steps() -> None:
        for _ in range(20):
            step()

    def step() -> None:
        net.train()
        loss = torch.nn.functional.cross_entropy(net(x, name), y)
        net.zero_grad()
        loss.backward()
        optimizer.step()

    return out | {"step": cpu(steps, 9) / 20}


def learn(path: Path) -> dict[str, float]:
    """One more task, with so few pictures that nearly all is overhead; it is taken back."""
    model = open_model(path)
    taken = cpu(lambda: model.learn(path.with_name("pictures"), "one-more", epochs=1))
    model.undo("one-more")
    return {"learn": taken}


def proof(path: Path) -> dict[str, float]:
    """`verify`, and the memory at its height beside that of the network and one task's own."""
    folder = Folder(path)
    one = folder.read()
    net = assemble_chain(folder, one)
    size = sum(t.nbytes for t in [*net.state_dict().values(), *net.dense(0).state_dict().values()])
    del net
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the height is counted from here
    before = _resident("VmRSS")
    taken = cpu(lambda: verify(folder))
    return {"verify": taken, "verify, memory / (network + one dense)": (_resident("VmHWM") - before) / size}


def _resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])


def guess(path: Path) -> dict[str, float]:
    """Which of all tasks a picture belongs to, by a server that may keep one task's network."""
    snapshot = take(Folder(path))
    networks = Networks(1)
    image = torch.zeros(1, *snapshot.net.shape, dtype=torch.uint8)
    networks.likely(snapshot, image)
    return {"guess": cpu(lambda: networks.likely(snapshot, image), 5)}


def opening(path: Path) -> dict[str, float]:
    """`open` and the answer of the newest task, torch and all that must be imported included."""
    image = next(path.with_name("pictures").rglob("*.png"))
    newest = open_model(path).tasks[-1].name
    code = f"import zeroforget; zeroforget.open({str(path)!r}).predict({str(image)!r}, {newest!r})"
    listing = [*COMMAND, "tasks", str(path)]
    return {"open and predict": _of([sys.executable, "-c", code]), "tasks DIR": _of(listing)}


def _of(command: list[str]) -> float:
    """Seconds of the processor that a process of its own takes."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return statistics.median(times)


ACTIONS = {each.__name__: each for each in (network, opening, learn, guess, proof)}


def exponent(fewer: tuple[int, float], more: tuple[int, float]) -> float:
    """The slope between two measurements on logarithmic axes."""
    return math.log(max(more[1], 1e-9) / max(fewer[1], 1e-9)) / math.log(more[0] / fewer[0])


def measure(counts: list[int], actions: list[str], options: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Action → number of tasks → what it took."""
    found: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as base:
        data, path = pictures(Path(base) / "pictures", options.get("size", 28)), Path(base) / "model"
        open_model(path).learn(data, "task1", **options)
        for count in sorted(counts):
            write_tasks(path, count)
            for action in actions:
                command = [sys.executable, "-m", "benchmarks.tasks", "--one", action, str(path)]
                told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                for name, value in told.items():
                    found.setdefault(name, {})[count] = value
                    print(f"{count:5} tasks: {name} {value:.4g}", file=sys.stderr, flush=True)
    return found


def joined(
    before: dict[str, Any], network: dict[str, Any], found: dict[str, dict[int, float]]
) -> dict[str, dict[int, float]]:
    """What was measured now, and for other numbers of tasks before: a long measurement may be made in pieces."""
    if before["network"] != network:
        raise SystemExit("the file holds measurements of another network; choose another --out")
    took = {name: {int(count): value for count, value in values.items()} for name, values in before["took"].items()}
    return {name: dict(sorted((took.get(name, {}) | found.get(name, {})).items())) for name in took | found}


def main() -> None:
    """Measure, print a row for each action, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="1,10,100,1000", help="how many tasks the models have")
    parser.add_argument("--actions", default=",".join(ACTIONS))
    parser.add_argument("--network", default=json.dumps(NETWORK), help="the options of `learn` for the first task")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("ACTION", "MODEL"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.one:
        print(json.dumps(ACTIONS[chosen.one[0]](Path(chosen.one[1]))))
        return
    counts = [int(count) for count in chosen.tasks.split(",")]
    found = measure(counts, chosen.actions.split(","), json.loads(chosen.network))
    if chosen.out and chosen.out.exists():
        found = joined(json.loads(chosen.out.read_text()), json.loads(chosen.network), found)
    slopes = {}
    for name, values in found.items():
        some = sorted(values.items())[-2:]
        slopes[name] = exponent(*some) if len(some) == 2 else math.nan
        print(f"{name:40}" + "".join(f"{value:10.4g}" for value in values.values()) + f"   T^{slopes[name]:.2f}")
    if chosen.out:
        facts = facts_of(argparse.Namespace(**vars(chosen), device="cpu"))
        content = facts | {"network": json.loads(chosen.network), "took": found, "exponents": slopes}
        chosen.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
