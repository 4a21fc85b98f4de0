"""Converts every classification model of torchvision and one of each large family of timm, and proves each.

    PYTHONPATH=src python -m benchmarks.zoo --out benchmarks/results/zoo.json --minutes 6 --workers 16

Needs torchvision or timm, or both; no weights are fetched. Each model runs in a process of its own with a time limit.
`--docs docs/architectures.md` writes the table of a results file (`--out`) without running anything.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path

from benchmarks.zoo_models import Choice, choices

MEMORY = 0.85
"""The share of the machine's memory that conversions may take together."""
COPIES = 6
"""Bytes a conversion takes, in float64 copies of the network."""
GOOD = ("grown", "grown in part", "refused")


@dataclass
class Row:
    """What became of one model."""

    library: str
    family: str
    model: str
    status: str = "error"
    """grown, grown in part, refused, wrong, error or time."""
    why: str = ""
    weights: int = 0
    size: int = 0
    axes: int = 0
    coupled: int = 0
    kept: int = 0
    """Layers whose width stays."""
    reasons: dict[str, str] | None = None
    """Kept layer → why, for those that could not be followed (a few)."""
    features: int = 0
    adopted: bool = False
    """The classifier was adopted with its own head, its logits bit-equal."""
    seconds: float = 0.0
    """To convert and prove."""
    trained: float = 0.0
    """To grow by a second task and take one step."""


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--minutes", type=float, default=6.0, help="when to stop; what has not run by then is said so")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one model")
    parser.add_argument("--only", default="", help="only models whose library/name contains this")
    parser.add_argument("--families", type=int, default=60, help="how many of timm's families, largest first")
    parser.add_argument("--docs", type=Path, help="write the table of the results here and do nothing else")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        from benchmarks.zoo_one import convert

        args.out.write_text(json.dumps(convert(Choice(**json.loads(args.one)))))
    elif args.docs:
        from benchmarks.zoo_docs import write

        write(args.docs, args.out)
    else:
        run(args)


def run(args: argparse.Namespace) -> None:
    """Every chosen model in a process of its own; the results so far are written down after each."""
    began = time.monotonic()
    chosen = [c for c in choices(args.families) if args.only in f"{c.library}/{c.model}"]
    if not chosen:
        raise SystemExit("no model to convert: install torchvision or timm, or check --only")
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": "PYTHONPATH=src python -m benchmarks.zoo " + " ".join(sys.argv[1:]),
        "commit": _commit(),
        "versions": {name: v for name in ("torch", "torchvision", "timm", "zeroforget") if (v := _version(name))},
        "cpus": os.cpu_count(),
    }
    end = began + 60 * args.minutes
    memory = Memory(MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    rows: list[dict[str, object]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        jobs = [pool.submit(_one, choice, memory, end, args.limit) for choice in chosen]
        for job in concurrent.futures.as_completed(jobs):
            row = job.result()
            rows.append(row)
            print(f"[{len(rows)}/{len(jobs)}] {row['library']}/{row['model']}: {row['status']} {row['why']}"[:300])
            rows.sort(key=lambda r: (str(r["library"]), str(r["model"])))
            total = {"seconds": round(time.monotonic() - began, 1)}
            args.out.write_text(json.dumps(facts | total | {"models": rows}, indent=1) + "\n")
    for line in table(rows):
        print(line)


class Memory:
    """Lets processes begin only while their estimated memory is free."""

    def __init__(self, total: float) -> None:
        self.total = self.free = total
        self.changed = threading.Condition()

    def take(self, amount: float, until: float) -> float | None:
        """Wait for the amount (at most all there is); None if the time is over first."""
        amount = min(amount, self.total)
        with self.changed:
            while self.free < amount:
                if not self.changed.wait(max(0.0, until - time.monotonic())):
                    return None
            self.free -= amount
        return amount

    def give(self, amount: float) -> None:
        """Put it back."""
        with self.changed:
            self.free += amount
            self.changed.notify_all()


def _one(choice: Choice, memory: Memory, end: float, limit: float) -> dict[str, object]:
    row = asdict(Row(choice.library, choice.family, choice.model))
    amount = memory.take(choice.weights * 8 * COPIES + 1.5e9, end)
    left = end - time.monotonic()
    if amount is None or left < 5:
        return row | {"status": "time", "why": "there was no time left to begin it"}
    try:
        return row | _process(choice, min(limit, left))
    finally:
        memory.give(amount)


def _process(choice: Choice, seconds: float) -> dict[str, object]:
    threads = "4" if choice.weights > 60e6 else "2" if choice.library == "timm" else "1"
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks.zoo", "--out", str(out), "--one", json.dumps(asdict(choice))]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"status": "time", "why": f"it took more than {seconds:.0f} s"}
        if done.returncode or not out.is_file():
            last = done.stderr.strip().splitlines()[-6:] or [f"exit status {done.returncode}"]
            return {"status": "error", "why": " | ".join(last)[-900:]}
        found: dict[str, object] = json.loads(out.read_text())
        return found


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    """The results in short: how many of each status, then what is not simply grown."""
    for row in rows:
        if row["status"] not in ("grown", "grown in part"):
            yield f"{row['status']:8} {row['library']}/{row['model']}: {row['why']}"[:240]
    for library in sorted({str(r["library"]) for r in rows}):
        own = [r for r in rows if r["library"] == library]
        counts: dict[str, int] = {}
        for row in own:
            counts[str(row["status"])] = counts.get(str(row["status"]), 0) + 1
        seconds = sorted(float(str(r["seconds"])) for r in own if r["status"] in GOOD)
        middle = f"; half convert within {seconds[len(seconds) // 2]:.1f} s" if seconds else ""
        yield f"{library}: {len(own)} models: " + ", ".join(f"{n} {s}" for s, n in sorted(counts.items())) + middle


def _version(package: str) -> str | None:
    try:
        version = getattr(import_module(package), "__version__", None)
        return str(version or metadata.version(package))
    except (ImportError, metadata.PackageNotFoundError):
        return None


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
