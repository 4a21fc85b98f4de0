"""Several runs of an experiment at the same time, each in a process of its own: started, heard, stopped and, where one
dies, explained. What a run finds does not depend on its neighbours."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from zeroforget.experiments.experiment import RunConfig
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.results import Results
from zeroforget.training import Progress

Work = Callable[[RunConfig, Observer], object]
"""What a process does with its run. It travels to the process by name, so it is a function of a module."""

PATIENCE_S = 10.0
"""How long processes may take to end when they are asked to; then they are killed, which costs an epoch at most."""


def side_by_side(configs: Sequence[RunConfig], work: Work, most: int, watch: Observer) -> list[Results | str]:
    """Do the work for every configuration, at most so many at a time; returns what each found, or why it failed.

    However this ends, Ctrl-C included, no process is left behind.
    """
    waiting = list(enumerate(configs))[::-1]
    running: list[_Child] = []
    outcomes: dict[int, Results | str] = {}
    threads = max(1, min(torch.get_num_threads(), _cores() // most))
    with _terminable():
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    position, config = waiting.pop()
                    running.append(_start(position, config, work, threads))
                for child in _heard(running, watch):
                    running.remove(child)
                    outcomes[child.position] = child.ended(watch)
        finally:
            _stop(running)
    return [outcomes[position] for position in range(len(configs))]


# The process that runs ----------------------------------------------------------------------------------------------


class _Voice(Observer):
    """Tells the process that started this one what happens here."""

    def __init__(self, ears: Connection) -> None:
        self.ears = ears

    def loading(self, what: str, done: int, total: int) -> None:
        self.ears.send(("loading", what, done, total))

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        self.ears.send(("run_begins", tasks, finished))

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        self.ears.send(("progress", progress, trial))

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        self.ears.send(("task_done", record))

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        self.ears.send(("done", results))


def _live(work: Work, config: RunConfig, ears: Connection, threads: int) -> None:
    """All that a process does. If the one that started it is gone, its next word fails, and it ends."""
    try:
        signal.signal(signal.SIGTERM, _asked_to_end)
        torch.set_num_threads(threads)
        _work(work, config, ears)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway
        if torch.cuda.is_initialized():  # one that leaves work behind can harm its neighbours under MPS
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()


def _work(work: Work, config: RunConfig, ears: Connection) -> None:
    try:
        work(config, _Voice(ears))
    except torch.OutOfMemoryError as error:
        _last_word(ears, f"the GPU's memory is full: {str(error).splitlines()[0]} {_FEWER}")
    except MemoryError:
        _last_word(ears, f"memory is full. {_FEWER}")
    except (ValueError, OSError) as error:
        _last_word(ears, str(error) or traceback.format_exc().rstrip())
    except Exception:
        _last_word(ears, traceback.format_exc().rstrip())


_FEWER = "Start it again with a lower --parallel: it goes on where it stopped"


def _asked_to_end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)  # which, unlike an exception of our own, nobody reports wherever it is raised


def _last_word(ears: Connection, why: str) -> None:
    with contextlib.suppress(OSError):
        ears.send(("failed", why))


# The process that starts the others ----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Child:
    position: int
    config: RunConfig
    process: SpawnProcess
    ears: Connection
    outcome: Results | str | None = None

    def listen(self, watch: Observer) -> bool:
        """Pass on all it has said; False when it will say no more."""
        while True:
            try:
                if not self.ears.poll():
                    return True
                said = self.ears.recv()
            except (EOFError, OSError):
                return False
            self._pass_on(watch, *said)  # what fails here is the watcher's trouble, not the end of the process

    def _pass_on(self, watch: Observer, what: str, *said: Any) -> None:
        if what in ("done", "failed"):
            self.outcome = said[0]
        elif what == "loading":
            watch.loading(*said)
        else:
            getattr(watch, what)(self.config, *said)

    def ended(self, watch: Observer) -> Results | str:
        """What it found, or why it did not get to its end."""
        self.process.join()
        outcome = self.outcome or _cause(self.process.exitcode or 0)
        if isinstance(outcome, Results):
            watch.run_done(self.config, outcome, False)
        else:
            watch.run_failed(self.config, ValueError(outcome.splitlines()[-1]))  # the whole of it is told at the end
        return outcome


def _cause(code: int) -> str:
    """Why a process that said nothing has ended."""
    if code == 128 + signal.SIGTERM:
        return "its process was asked to end (SIGTERM). Started again, it goes on where it stopped"
    if code >= 0:
        return (
            f"its process ended at once, with exit code {code}. If a script of yours started it, "
            "call run(..., parallel=N) under `if __name__ == '__main__':`, for each process reads the script first"
        )
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return f"its process was killed ({name}), as a system does that runs out of memory. {_FEWER}"
    return f"its process died of {name}. If memory was short: {_FEWER[0].lower()}{_FEWER[1:]}"


def _start(position: int, config: RunConfig, work: Work, threads: int) -> _Child:
    context = multiprocessing.get_context("spawn")  # a fork would inherit CUDA's state, which it cannot use
    ears, mouth = context.Pipe(duplex=False)
    process = context.Process(target=_live, args=(work, config, mouth, threads), daemon=True)
    # Ctrl-C in a terminal goes to every process of it. This one alone shall hear it, and then end the others. (Starting
    # the first process would also start its tracker of resources, which lifts the block.)
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    mouth.close()
    return _Child(position, config, process, ears)


def _heard(running: list[_Child], watch: Observer) -> list[_Child]:
    """Wait until someone speaks, pass it on; returns those that have ended."""
    wait([each for child in running for each in (child.ears, child.process.sentinel)], timeout=1.0)
    ended = [child for child in running if child.process.exitcode is not None]  # and then listen once more
    return [child for child in running if not child.listen(watch) or child in ended]


def _stop(running: list[_Child]) -> None:
    try:
        for child in running:
            child.process.terminate()
        end = time.monotonic() + PATIENCE_S
        for child in running:
            child.ears.close()
            child.process.join(max(0.0, end - time.monotonic()))
    finally:  # also when a second Ctrl-C cuts the wait short
        for child in running:
            child.process.kill()
            child.process.join()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, a request to end (SIGTERM) unwinds the stack like Ctrl-C, so that what was started is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
