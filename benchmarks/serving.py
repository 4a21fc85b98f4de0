"""The server against a plain handler that runs the same network for one request at a time, on loopback, in one run.

`python -m benchmarks.serving` prints a table: requests per second and the time 99 of 100 requests take, for 1, 8 and 64
clients. Servers are processes of their own; rounds alternate, so that whatever else the machine does hits both.
`--workers 2` compares the server with itself, with one process and with two, and tells what memory each takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from PIL import Image

from zeroforget.store import Model, open_model

CLIENTS = (1, 8, 64)
TASKS = ("first", "second", "third")


def pictures(folder: Path, side: int, classes: int = 3, per_class: int = 12) -> Path:
    """Noise of a class's own color, as JPEG files: their content does not matter here, their decoding does."""
    random = np.random.default_rng(0)
    for number in range(classes):
        place = folder / f"class{number}"
        place.mkdir(parents=True)
        for row in range(per_class):
            values = random.integers(0, 128, (side, side, 3), np.uint8)
            values[..., number % 3] += 100
            Image.fromarray(values).save(place / f"{row}.jpg")
    return folder


def model(folder: Path, network: str, side: int, width: float) -> Model:
    """A model of three tasks that has barely learned: its speed is that of any other."""
    data, made = pictures(folder / "pictures", side), open_model(folder / "garden")
    first: dict[str, Any] = {"network": network, "size": side, "width": width}
    for place, task in enumerate(TASKS):
        made.learn(data, task, epochs=1, **({} if place else first))
    return made


def plain(folder: Path, port: int) -> None:
    """The opponent: a handler as most would write it. The task's network is ready; requests come one at a time."""
    app, served = FastAPI(), open_model(folder)
    for task in served.tasks:
        served.dense(task.name)

    @app.post("/predict")
    async def predict(request: Request, task: str) -> dict[str, object]:
        image = served.prepare(await request.body())
        best = served.probabilities(image[None], task)[0]
        ranked = sorted(zip(served.task(task).classes, best.tolist(), strict=True), key=lambda pair: -pair[1])
        return {"task": task, "classes": [{"class": name, "probability": p} for name, p in ranked]}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


@contextmanager
def process(command: list[str], port: int) -> Iterator[int]:
    """A server in a process of its own, until it answers and until we are done."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL) as running:
        try:
            end = time.monotonic() + 60
            while not asyncio.run(_answers(port)):
                if time.monotonic() > end or running.poll() is not None:
                    raise RuntimeError(f"{command} does not answer")
                time.sleep(0.1)
            yield running.pid
        finally:
            running.terminate()


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@dataclass
class Load:
    """What clients saw."""

    times: list[float] = field(default_factory=list)
    seconds: float = 0.0
    failed: int = 0
    cpu: float = 0.0
    """Seconds of the processor that the server took, with all that it started."""

    @property
    def work(self) -> float:
        """Milliseconds of the processor for a request, which hang less on what else the machine does."""
        return 1000 * self.cpu / len(self.times)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.times) / self.seconds

    @property
    def p99(self) -> float:
        """Milliseconds that 99 of 100 requests stay below."""
        return 1000 * sorted(self.times)[min(len(self.times) - 1, int(0.99 * len(self.times)))]


async def load(port: int, bodies: list[bytes], clients: int, seconds: float) -> Load:
    """So many clients, each with one connection, ask and ask again until the time is up."""
    out, end = Load(), time.monotonic() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = number
        while time.monotonic() < end:
            body, task = bodies[turn % len(bodies)], TASKS[turn % len(TASKS)]
            turn += 1
            head = f"POST /predict?task={task} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            began = time.monotonic()
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            out.times.append(time.monotonic() - began)
            out.failed += b" 200 " not in answer[:20]
        writer.close()

    began = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(clients)))
    out.seconds = time.monotonic() - began
    return out


def compare(folder: Path, seconds: float, rounds: int, port: int, workers: int) -> Iterator[str]:
    """Lines of a table, a row for each number of clients."""
    garden, bodies = str(folder / "garden"), [file.read_bytes() for file in sorted(folder.glob("pictures/*/*.jpg"))]

    def serve(at: int, *words: str) -> list[str]:
        return ["-m", "zeroforget", "serve", garden, "--port", str(at), "--connections", "1000", *words]

    other, ours = "plain", "zeroforget serve"
    commands = [["-m", "benchmarks.serving", "--plain", garden, "--port", str(port)], serve(port + 1)]
    if workers > 1:
        other, ours = "one process", f"{workers} processes"
        alone = ["--threads", "1"]
        commands = [serve(port, *alone), serve(port + 1, *alone, "--workers", str(workers))]
    ports = {other: port, ours: port + 1}
    more = workers > 1
    head = [f"{name}: requests/s | p99 ms" + " | ms of CPU" * more for name in ports]
    yield f"| clients | {' | '.join(head)} | requests/s, ratio |"
    yield "|---|" + "---|" * (7 if more else 5)
    with process(commands[0], port) as first, process(commands[1], port + 1) as second:
        for at in ports.values():
            asyncio.run(load(at, bodies, 64, 2.0))  # warm
        for clients in CLIENTS:
            seen: dict[str, list[Load]] = {name: [] for name in ports}
            for _ in range(rounds):
                for (name, one), pid in zip(ports.items(), (first, second), strict=True):
                    before = cpu(pid)
                    seen[name].append(asyncio.run(load(one, bodies, clients, seconds)))
                    seen[name][-1].cpu = cpu(pid) - before
            if failed := sum(one.failed for loads in seen.values() for one in loads):
                raise RuntimeError(f"{failed} requests failed")
            rate, p99, work = (
                {name: statistics.median(getattr(one, what) for one in loads) for name, loads in seen.items()}
                for what in ("rate", "p99", "work")
            )
            cells = [f"{rate[name]:.0f} | {p99[name]:.0f}" + f" | {work[name]:.1f}" * more for name in ports]
            yield f"| {clients} | {' | '.join(cells)} | {rate[ours] / rate[other]:.2f} |"
        if workers > 1:
            yield ""
            for name, pid in ((other, first), (ours, second)):
                whole, mapped = memory(pid)
                yield f"{name}: {whole:.0f} MiB of memory, {mapped:.0f} MiB of them weights that are mapped"


def memory(pid: int) -> tuple[float, float]:
    """MiB of a server and of all that it started, what they share counted once, and of mapped weights in them."""
    whole = mapped = 0
    for one in family(pid):
        ours = False
        for line in Path(f"/proc/{one}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                ours = line.endswith(".weights")
            elif line.startswith("Pss:"):
                whole += int(line.split()[1])
                mapped += int(line.split()[1]) * ours
    return whole / 1024, mapped / 1024


def cpu(pid: int) -> float:
    """Seconds of the processor that a server and all below it have taken."""
    ticks = 0
    for one in family(pid):
        words = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and those below it."""
    children = [int(one) for thread in Path(f"/proc/{pid}/task").iterdir() for one in _words(thread / "children")]
    return [pid, *(below for child in children for below in family(child))]


def _words(file: Path) -> list[str]:
    return file.read_text().split()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--side", type=int, default=64, help="pixels of the pictures")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--workers", type=int, default=1, help="compare so many processes with one")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        plain(args.plain, args.port)
        return
    with tempfile.TemporaryDirectory() as place:
        made = model(Path(place), args.network, args.side, args.width)
        print(
            f"{args.network} at width {args.width:g}, {args.side}×{args.side}, {len(made.tasks)} tasks in turn, ",
            end="",
        )
        print(f"{made.tasks[-1].operations / 1e6:.0f} M operations a picture; {torch.get_num_threads()} threads")
        for line in compare(Path(place), args.seconds, args.rounds, args.port, args.workers):
            print(line, flush=True)


if __name__ == "__main__":
    main()
