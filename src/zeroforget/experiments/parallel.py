"""Several runs of an experiment at the same time, each in a process of its own: started, heard, stopped and, where one
dies, explained."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from zeroforget.experiments.experiment import RunConfig
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.scheduling import Job, Outcome, Voice, Work, outcome, pass_on, tell_end

PATIENCE_S = 10.0
"""How long processes may take to end when they are asked to; then they are killed, which costs an epoch at most."""
ENDED = "ended"
"""The last word of a process, with what came of its run."""
_FEWER = "Start it again with a lower --parallel: it goes on where it stopped"


# The process that runs ----------------------------------------------------------------------------------------------


def _live(work: Work, config: RunConfig, ears: Connection, threads: int) -> None:
    """All that a process does. If the one that started it is gone, its next word fails, and it ends."""
    try:
        signal.signal(signal.SIGTERM, _asked_to_end)
        torch.set_num_threads(threads)
        with contextlib.suppress(OSError):
            ears.send((ENDED, outcome(work, config, Voice(ears.send), _FEWER)))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway
        if torch.cuda.is_initialized():  # one that leaves work behind can harm its neighbours under MPS
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()


def _asked_to_end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)  # which, unlike an exception of our own, nobody reports wherever it is raised


# The process that starts the others ----------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class _Child(Job):
    process: SpawnProcess
    ears: Connection

    def listen(self, watch: Observer) -> bool:
        """Pass on all it has said; False when it will say no more."""
        while True:
            try:
                if not self.ears.poll():
                    return True
                said = self.ears.recv()
            except (EOFError, OSError):
                return False
            if said[0] == ENDED:
                self.outcome = said[1]
                continue
            pass_on(self, watch, *said)  # what fails here is the watcher's trouble, not the end of the process

    def end(self, watch: Observer) -> Outcome:
        """What it found, or why it did not get to its end."""
        self.process.join()
        self.outcome = self.outcome or _cause(self.process.exitcode or 0)
        tell_end(self, watch)
        return self.outcome


@dataclass
class RunProcesses:
    """At most so many runs at a time, each in a process beside this one."""

    work: Work
    most: int
    _children: list[_Child] = field(default_factory=list)

    def has_room(self, running: int) -> bool:
        """As long as there are fewer."""
        return running < self.most

    def start(self, config: RunConfig, watch: Observer) -> Job:
        """A process for it, with its share of the cores."""
        threads = max(1, min(torch.get_num_threads(), _cores() // self.most))
        self._children.append(_start(config, self.work, threads))
        return self._children[-1]

    def ended(self, watch: Observer) -> list[Job]:
        """Wait until someone speaks, pass it on."""
        wait([each for child in self._children for each in (child.ears, child.process.sentinel)], timeout=1.0)
        dead = [child for child in self._children if child.process.exitcode is not None]  # and then listen once more
        gone = [child for child in self._children if not child.listen(watch) or child in dead]
        for child in gone:
            self._children.remove(child)
            child.end(watch)
        return list(gone)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """However this ends, Ctrl-C and SIGTERM included, no process is left behind."""
        with terminable():
            try:
                yield
            finally:
                self._stop()

    def _stop(self) -> None:
        try:
            for child in self._children:
                child.process.terminate()
            end = time.monotonic() + PATIENCE_S
            for child in self._children:
                child.ears.close()
                child.process.join(max(0.0, end - time.monotonic()))
        finally:  # also when a second Ctrl-C cuts the wait short
            for child in self._children:
                child.process.kill()
                child.process.join()


def _start(config: RunConfig, work: Work, threads: int) -> _Child:
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
    return _Child(config, process=process, ears=ears)


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


@contextlib.contextmanager
def terminable() -> Iterator[None]:
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
