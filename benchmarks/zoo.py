"""Converts every classification model of torchvision, one of each large family of timm and one of each of 60 types of
transformers, and proves each.

    PYTHONPATH=src python -m benchmarks.zoo --out benchmarks/results/zoo.json --minutes 60 --workers 2
    PYTHONPATH=src python -m benchmarks.zoo --only transformers/ --out benchmarks/results/zoo-transformers.json

Needs torchvision, timm or transformers; no weights are fetched. Each model runs in a process of its own with a time
limit.
`--resume` goes on with an earlier run: what came out well is not done again.
`--docs docs/architectures.md` writes the table of a results file (`--out`) without running anything.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path

from benchmarks.facts import commit
from benchmarks.zoo_models import Choice, choices

MEMORY = 0.85
"""The share of the machine's memory that conversions may take together."""
COPIES = 6
"""What a conversion takes, in copies of the network."""
PACKAGES = ("torch", "torchvision", "timm", "transformers", "zeroforget")
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
    """To convert and prove, on one CPU thread."""
    trained: float = 0.0
    """To grow by a second task and take one step."""
    commit: str = ""
    """The code that did it."""


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--resume", action="store_true", help="keep what --out holds that came out well")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to stop; what has not run by then is said so")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one model")
    parser.add_argument("--only", default="", help="only models whose library/name contains this")
    parser.add_argument("--families", type=int, default=60, help="how many of timm's families, largest first")
    parser.add_argument("--docs", type=Path, help="write the table of the results here and do nothing else")
    args = parser.parse_args()
    if args.docs:
        from benchmarks.zoo_docs import write

        write(args.docs, args.out)
    else:
        run(args)


def run(args: argparse.Namespace) -> None:
    """Every chosen model in a process of its own; the results so far are written down after each."""
    began = time.monotonic()
    chosen = choices(args.families)
    names = {(c.library, c.model) for c in chosen}
    rows = [row for row in _earlier(args.out, args.resume) if (row["library"], row["model"]) in names]
    done = {(row["library"], row["model"]) for row in rows}
    chosen = [c for c in chosen if args.only in f"{c.library}/{c.model}" and (c.library, c.model) not in done]
    if not chosen:
        raise SystemExit("no model to convert: install torchvision, timm or transformers, or check --only")
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": "PYTHONPATH=src python -m benchmarks.zoo " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "versions": {
            name: v for name in ("torch", "torchvision", "timm", "transformers", "zeroforget") if (v := _version(name))
        },
        "cpus": os.cpu_count(),
    }
    end = began + 60 * args.minutes
    memory = Memory(MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    _prepare()
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        jobs = [pool.submit(_one, choice, memory, end, args.limit) for choice in chosen]
        for count, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            row = job.result()
            rows.append(row)
            print(
                f"[{count}/{len(jobs)}] {row['library']}/{row['model']}: {row['status']} {row['why']}"[:300], flush=True
            )
            rows.sort(key=lambda r: (str(r["library"]), str(r["model"])))
            args.out.write_text(json.dumps(facts | {"models": rows}, indent=1) + "\n")
    for line in table(rows):
        print(line)


def _earlier(out: Path, resume: bool) -> list[dict[str, object]]:
    """The rows of an earlier run that need not be made again."""
    found = json.loads(out.read_text())["models"] if resume and out.is_file() else []
    return [row for row in found if row["status"] in GOOD]


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
    row = asdict(Row(choice.library, choice.family, choice.model, commit=commit()))
    amount = memory.take(choice.weights * 4 * COPIES + 1.5e9, end)
    left = end - time.monotonic()
    if amount is None or left < 5:
        return row | {"status": "time", "why": "there was no time left to begin it"}
    try:
        return row | _process(choice, min(limit, left))
    finally:
        memory.give(amount)


def _prepare() -> None:
    """Import the libraries once, in a server whose forks do the work, each on one thread and without a GPU."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["torchvision.models", "timm", "transformers", "benchmarks.zoo_one"])


def _process(choice: Choice, seconds: float) -> dict[str, object]:
    from benchmarks.zoo_one import answer

    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=answer, args=(choice, there))
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            return {"status": "time", "why": f"it took more than {seconds:.0f} s"}
        found: dict[str, object] = here.recv()
        return found
    except EOFError:
        process.join()
        return {"status": "error", "why": f"the process ended with status {process.exitcode}"}
    finally:
        process.kill()
        process.join()


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


if __name__ == "__main__":
    main()
