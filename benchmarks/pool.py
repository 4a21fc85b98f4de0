"""Runs of several experiments side by side for a limited time, as on a machine that is lent:

    python -m benchmarks.pool --minutes 25 --parallel 5 --device cuda \\
        tiny-imagenet-random-best:joint-scratch tiny-imagenet-random-best:tfm tiny-imagenet-random:hat:0,1

Each is `zeroforget run experiments/NAME.toml --methods METHOD` in a process of its own, begun in the order given (the
longest first). `NAME:A,B:0,1` is A and B with seed 0, then both with seed 1, each a process. `NAME:METHOD@12` is begun
only in the first twelve minutes: later it would not come to its end, and only slow the others down. `--list FILE` reads
more of them from a file, a line each; what follows a # is for people. `--set KEY=VALUE` changes a value for all of
them, `--set METHOD.KEY=VALUE` for that one.

Whenever one ends, all finished runs of its experiment join those in `--results`, a small file for each experiment. A
seed that is in there is not run again. When the time is over the rest are stopped; the same command goes on with them
where they were.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from zeroforget.experiments.archive import load

ZEROFORGET = [sys.executable, "-m", "zeroforget"]


@dataclass(frozen=True)
class Job:
    """One method of one experiment, to be begun in so many minutes or not at all."""

    experiment: str
    method: str
    latest: float = math.inf
    seed: int | None = None
    """None: all of the file."""

    @staticmethod
    def parse(text: str) -> list[Job]:
        """From NAME:METHODS[:SEEDS][@MINUTES], seed by seed."""
        named, _, latest = text.partition("@")
        experiment, _, rest = named.partition(":")
        methods, _, seeds = rest.partition(":")
        try:
            minutes = float(latest) if "@" in text else math.inf
            numbers = [int(seed) for seed in seeds.split(",")] if ":" in rest else [None]
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' does not end in :SEEDS or @MINUTES, numbers") from None
        if not all(methods.split(",")) or not Path(f"experiments/{experiment}.toml").is_file():
            raise argparse.ArgumentTypeError(f"'{text}' is not NAME:METHOD with a file experiments/NAME.toml")
        return [Job(experiment, method, minutes, seed) for seed in numbers for method in methods.split(",")]

    @property
    def title(self) -> str:
        """What it is called on the way."""
        return f"{self.experiment} {self.method}" + ("" if self.seed is None else f" seed {self.seed}")

    def known(self, results: Path) -> bool:
        """Whether this seed is among the results."""
        file = results / f"{self.experiment}.json"
        found = load(file) if self.seed is not None and file.exists() else []
        return any((run.method, run.seed) == (self.method, self.seed) for run in found)

    def start(self, args: argparse.Namespace, others: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Begin it, without changes that begin with others' names; what it says goes to a file beside its runs."""
        words = ["run", f"experiments/{self.experiment}.toml", "--methods", self.method, "--out", str(args.out)]
        words += [word for change in args.set if not change.startswith(others) for word in ("--set", change)]
        words += ["--seeds", str(self.seed)] if self.seed is not None else []
        words += ["--device", args.device] if args.device else []
        words += ["--data-root", str(args.data_root)] if args.data_root else []
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / f"{self.title.replace(' ', '-')}.log").open("ab") as log:
            return subprocess.Popen([*ZEROFORGET, *words], stdout=log, stderr=log, start_new_session=True)

    def archive(self, args: argparse.Namespace) -> None:
        """Write down what is finished of its experiment, beside what is there already."""
        file = args.results / f"{self.experiment}.json"
        args.results.mkdir(parents=True, exist_ok=True)
        sources = [str(args.out / self.experiment), *([str(file)] if file.exists() else [])]
        subprocess.run([*ZEROFORGET, "archive", *sources, "-o", str(file)], check=False)


def listed(name: str) -> list[list[Job]]:
    """The jobs of a file."""
    try:
        lines = [line.partition("#")[0].strip() for line in Path(name).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be read: {error.strerror}") from None
    return [Job.parse(line) for line in lines if line]


def run(jobs: list[Job], args: argparse.Namespace) -> list[Job]:
    """Those that did not come to their end."""
    began = time.monotonic()
    waiting, running = list(jobs), dict[Job, subprocess.Popen[bytes]]()
    unfinished: list[Job] = []
    try:
        while (waiting or running) and time.monotonic() < began + 60 * args.minutes:
            while waiting and len(running) < args.parallel:
                job = waiting.pop(0)
                if job.known(args.results):
                    say(began, job, "is there already")
                    continue
                if time.monotonic() > began + 60 * job.latest:
                    unfinished.append(job)
                    say(began, job, "is not begun: it is too late")
                    continue
                others = tuple(f"{other.method}." for other in jobs if other.method != job.method)
                running[job] = job.start(args, others)
                say(began, job, "begins")
            for job, process in list(running.items()):
                if process.poll() is not None:
                    del running[job]
                    say(began, job, "is finished" if process.returncode == 0 else "failed: see its log")
                    unfinished += [job] if process.returncode else []
                    job.archive(args)
            time.sleep(0.5)
    finally:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [*unfinished, *running, *waiting]


def say(began: float, job: Job, what: str) -> None:
    """A line on the way."""
    print(f"{time.monotonic() - began:6.0f} s  {job.title} {what}", flush=True)


def main() -> None:
    """Run them; the status tells whether all came to their end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", type=Job.parse, default=[], metavar="NAME:METHODS[:SEEDS][@MINUTES]")
    parser.add_argument("--list", type=listed, default=[], metavar="FILE", help="more of them, a line each")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `zeroforget run`")
    parser.add_argument("--device")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=Path("runs/finished"), help="where to write what is finished")
    args = parser.parse_args()
    jobs = [job for part in [*args.jobs, *args.list] for job in part]
    if not jobs:
        parser.error("name what to run: NAME:METHOD, or --list FILE")
    if left := run(jobs, args):
        sys.exit(f"not finished: {'; '.join(job.title for job in left)}")


if __name__ == "__main__":
    main()
