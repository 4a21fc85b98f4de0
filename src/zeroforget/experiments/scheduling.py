"""Which run is trained when: one list of runs, and an engine that trains them here, in processes beside this one or on
a cluster. What a run finds does not depend on the engine."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zeroforget.experiments.experiment import RunConfig
from zeroforget.experiments.folder import Busy
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.results import Results
from zeroforget.training import Progress

Work = Callable[[RunConfig, Observer], Results]
"""What is done with a run. It travels to other processes by name, so it is a function or a class of a module."""

Outcome = Results | str | Busy
"""What a run found, why it failed, or why it must be looked at again later: someone else works on it, say."""

PAUSE_S = 2.0
"""Seconds between looks at a run that another process works on."""


@dataclass(eq=False)
class Job:
    """A run that an engine has begun."""

    config: RunConfig
    outcome: Outcome | None = None


class Engine(Protocol):
    """Where runs are trained."""

    def has_room(self, running: int) -> bool:
        """Whether one more may begin."""

    def start(self, config: RunConfig, watch: Observer) -> Job:
        """Begin a run."""

    def ended(self, watch: Observer) -> list[Job]:
        """Wait a moment, tell the watch what happened meanwhile; those that have an outcome now."""

    def opened(self) -> AbstractContextManager[object]:
        """Inside, runs may be begun. At its end nothing that was begun is left behind; what runs have on disk stays."""


def schedule(
    configs: Sequence[RunConfig],
    engine: Engine,
    look: Callable[[RunConfig], Results | None],
    watch: Observer,
    *,
    patient: bool = True,
) -> list[Results | str]:
    """What each run found, or why it failed.

    `look` says whether another process has finished a run meanwhile, and raises `Busy` if one works on it: that run is
    looked at again later (or, without patience, not).
    """
    table = _Table(configs, look, watch, patient)
    running: dict[Job, int] = {}
    with engine.opened():
        while table.waiting or running:
            while engine.has_room(len(running)) and (place := table.next(idle=not running)) is not None:
                running[engine.start(configs[place], watch)] = place
            for job in engine.ended(watch) if running else ():
                table.note(running.pop(job), job.outcome)
    return [table.outcomes[place] for place in range(len(configs))]


class _Table:
    """The runs that wait, and what became of the others."""

    def __init__(
        self, configs: Sequence[RunConfig], look: Callable[[RunConfig], Results | None], watch: Observer, patient: bool
    ) -> None:
        self.configs, self.look, self.watch, self.patient = configs, look, watch, patient
        self.waiting = list(range(len(configs)))
        self.outcomes: dict[int, Results | str] = {}
        self._busy: dict[int, tuple[float, Busy]] = {}
        """Of a run that another process works on: when to look again."""
        self._told: set[int] = set()

    def next(self, *, idle: bool) -> int | None:
        """The first run that is free. If none is, and nobody else has anything to do, this waits a moment."""
        for place in list(self.waiting):
            if self._busy.get(place, (0.0,))[0] > time.monotonic():
                continue
            try:
                found = self.look(self.configs[place])
            except Busy as error:
                self.note(place, error)
                continue
            self.waiting.remove(place)
            if found is None:
                return place
            self.outcomes[place] = found
        if idle and self.waiting:
            self._wait()
        return None

    def note(self, place: int, outcome: Outcome | None) -> None:
        """What has become of a run."""
        if not isinstance(outcome, Busy):
            self.outcomes[place] = "it ended without a word" if outcome is None else outcome
            return
        if not self.patient:
            raise outcome
        self._busy[place] = time.monotonic() + PAUSE_S, outcome
        if place not in self.waiting:
            self.waiting.append(place)

    def _wait(self) -> None:
        for place in self.waiting:
            if place not in self._told:
                self._told.add(place)
                self.watch.notice(f"waiting: {self._busy[place][1]}")
        time.sleep(max(0.0, min(self._busy[place][0] for place in self.waiting) - time.monotonic()))


# What an engine's process says -------------------------------------------------------------------------------------


class Voice(Observer):
    """Tells the process that started this one what happens here."""

    def __init__(self, tell: Callable[[tuple[Any, ...]], None], every: float = Observer.every) -> None:
        self.tell, self.every = tell, every

    def notice(self, text: str) -> None:
        """A line."""
        self.tell(("notice", text))

    def loading(self, what: str, done: int, total: int) -> None:
        """How far data are read."""
        self.tell(("loading", what, done, total))

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """Where it stands."""
        self.tell(("run_begins", tasks, finished))

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        """Where training stands."""
        self.tell(("progress", progress, trial))

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """What was learned."""
        self.tell(("task_done", record))


def outcome(work: Work, config: RunConfig, watch: Observer, fewer: str) -> Outcome:
    """Do the work, in a process of an engine. `fewer` is what to do where memory is short."""
    try:
        return work(config, watch)
    except Busy as error:
        return Busy(str(error))
    except torch.OutOfMemoryError as error:
        return f"the GPU's memory is full: {str(error).splitlines()[0]} {fewer}"
    except MemoryError:
        return f"memory is full. {fewer}"
    except (ValueError, OSError) as error:
        return str(error) or traceback.format_exc().rstrip()
    except Exception:
        return traceback.format_exc().rstrip()


def pass_on(job: Job, watch: Observer, what: str, *said: Any) -> None:
    """What a voice said about a job, to whoever looks on here."""
    if what in ("loading", "notice"):
        getattr(watch, what)(*said)
    else:
        getattr(watch, what)(job.config, *said)


def tell_end(job: Job, watch: Observer) -> None:
    """A job's outcome, to whoever looks on here; that another process works on it is no end."""
    if isinstance(job.outcome, Results):
        watch.run_done(job.config, job.outcome, False)
    elif isinstance(job.outcome, str):
        watch.run_failed(job.config, ValueError(job.outcome.splitlines()[-1]))  # the whole of it is told at the end
