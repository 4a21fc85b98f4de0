"""Runs of several experiments side by side for a limited time, as on a machine that is lent:

    python -m benchmarks.pool --minutes 25 --parallel 5 --device cuda \\
        tiny-imagenet-random-best:joint-scratch tiny-imagenet-random-best:tfm tiny-imagenet-random:hat

Each is `zeroforget run experiments/NAME.toml --methods METHOD` in a process of its own, begun in the order given (the
longest first). `NAME:METHOD@12` is begun only in the first twelve minutes: later it would not come to its end, and only
slow the others down. `--set KEY=VALUE` changes a value for all of them, `--set METHOD.KEY=VALUE` for that one. Whenever
one ends, all finished runs of its experiment are written to `--results` as one small file. When the time is over the
rest are stopped; the same command goes on with them where they were.
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

ZEROFORGET = [sys.executable, "-m", "zeroforget"]


@dataclass(frozen=True)
class Job:
    """One method of one experiment, to be begun in so many minutes or not at all."""

    experiment: str
    method: str
    latest: float = math.inf

    @staticmethod
    def parse(text: str) -> Job:
        """From NAME:METHOD or NAME:METHOD@MINUTES."""
        named, _, latest = text.partition("@")
        experiment, _, method = named.partition(":")
        try:
            job = Job(experiment, method, float(latest) if "@" in text else math.inf)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' does not end in @MINUTES, a number") from None
        if not method or not Path(f"experiments/{experiment}.toml").is_file():
            raise argparse.ArgumentTypeError(f"'{text}' is not NAME:METHOD with a file experiments/NAME.toml")
        return job

    def start(self, args: argparse.Namespace, others: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Begin it, without changes that begin with others' names; what it says goes to a file beside its runs."""
        words = ["run", f"experiments/{self.experiment}.toml", "--methods", self.method, "--out", str(args.out)]
        words += [word for change in args.set if not change.startswith(others) for word in ("--set", change)]
        words += ["--device", args.device] if args.device else []
        words += ["--data-root", str(args.data_root)] if args.data_root else []
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / f"{self.experiment}-{self.method}.log").open("ab") as log:
            return subprocess.Popen([*ZEROFORGET, *words], stdout=log, stderr=log, start_new_session=True)

    def archive(self, args: argparse.Namespace) -> None:
        """Write down what is finished of its experiment."""
        file = args.results / f"{self.experiment}.json"
        args.results.mkdir(parents=True, exist_ok=True)
        subprocess.run([*ZEROFORGET, "archive", str(args.out / self.experiment), "-o", str(file)], check=False)


def run(jobs: list[Job], args: argparse.Namespace) -> list[Job]:
    """Those that did not come to their end."""
    began = time.monotonic()
    waiting, running = list(jobs), dict[Job, subprocess.Popen[bytes]]()
    unfinished: list[Job] = []
    try:
        while (waiting or running) and time.monotonic() < began + 60 * args.minutes:
            while waiting and len(running) < args.parallel:
                job = waiting.pop(0)
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
    print(f"{time.monotonic() - began:6.0f} s  {job.experiment} {job.method} {what}", flush=True)


def main() -> None:
    """Run them; the status tells whether all came to their end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Job.parse, metavar="NAME:METHOD[@MINUTES]")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `zeroforget run`")
    parser.add_argument("--device")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=Path("runs/finished"), help="where to write what is finished")
    args = parser.parse_args()
    left = run(args.jobs, args)
    if left:
        sys.exit("not finished: " + " ".join(f"{job.experiment}:{job.method}" for job in left))


if __name__ == "__main__":
    main()
