"""Running experiments: which runs there are, which of them are finished, and who trains the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroforget.data import Scenario
from zeroforget.experiments.cluster import Cluster
from zeroforget.experiments.experiment import Experiment, Part, RunConfig
from zeroforget.experiments.folder import Busy, RunFolder
from zeroforget.experiments.observers import Observer, watching
from zeroforget.experiments.one_run import Broken, Refused, run_one
from zeroforget.experiments.parallel import RunProcesses
from zeroforget.experiments.resolve import NamedPart, check_data, make_scenario
from zeroforget.experiments.results import Results
from zeroforget.experiments.scheduling import Engine, Job, schedule, tell_end
from zeroforget.methods import registry
from zeroforget.processes import current
from zeroforget.progress import Show


class Failed(ValueError):
    """Some runs of an experiment did not get to their end; `results` has those of the others."""

    def __init__(self, why: str, results: list[Results]) -> None:
        super().__init__(why)
        self.results = results


def run(
    experiment: Experiment,
    out: Path,
    *,
    data_root: Path | None = None,
    watch: Observer | None = None,
    parallel: int = 1,
    cluster: Cluster | None = None,
    part: Part | None = None,
    progress: Show = None,
) -> list[Results]:
    """Every run of the experiment below `out`; those that are finished are read, those begun go on, and those that
    another process works on are waited for.

    With `parallel`, so many at the same time, each in a process of its own; with a `cluster`, on Ray's hosts. A `part`
    is some of the runs. `progress` is True to show it, False to hide it, or a function; by default it is shown in a
    terminal and in a notebook. A `watch` hears of it instead.
    """
    processes = current()
    configs = experiment.runs() if part is None else part.of(experiment.runs())
    more: dict[str, Any] = {"data_root": data_root, "parallel": parallel, "cluster": cluster, "part": part}
    if watch is None:
        together = parallel if cluster is None else max(2, len(configs))
        with watching(progress if processes.first else False, len(configs), together) as display:
            return run(experiment, out, watch=display, **more)
    root = data_root or experiment.data_root
    if parallel < 1:
        raise ValueError(f"parallel is how many runs to train at the same time, so at least 1, not {parallel}")
    if not processes.alone:
        watch = watch if processes.first else Observer()
        if parallel > 1 or cluster is not None:
            way = "--parallel" if cluster is None else "--ray"
            raise ValueError(f"{processes.world} processes train one run together: leave out {way}, or torchrun")
    begun = processes.by_first(lambda: _begin(configs, out, root, watch))
    left = [config for config, before in zip(configs, begun, strict=True) if before is None]
    engine = _engine(_Elsewhere(out, root), parallel, cluster, len(configs), watch)
    now = iter(schedule(left, engine, lambda config: _look(config, out, watch), watch, patient=processes.alone))
    outcomes = [before or next(now) for before in begun]
    pairs = zip(configs, outcomes, strict=True)
    failures = [f"{out / config.folder}: {why}" for config, why in pairs if isinstance(why, str)]
    found = [results for results in outcomes if isinstance(results, Results)]
    _complain(failures, found)
    return found


def _engine(work: _Elsewhere, parallel: int, cluster: Cluster | None, runs: int, watch: Observer) -> Engine:
    if cluster is not None:
        work = _Elsewhere(work.out.absolute(), work.root and work.root.absolute())
        return cluster.engine(work, work.out, parallel if parallel > 1 else None, watch)
    return RunProcesses(work, parallel) if parallel > 1 else _InTurn(work.out, work.root, only=runs == 1)


@dataclass
class _InTurn:
    """Runs one after another, in this process; of several processes that train together, in each."""

    out: Path
    root: Path | None
    only: bool
    """Whether there is one run alone: a mistake in somebody's code is then raised as it is."""
    data: _Data | None = None
    _done: list[Job] = field(default_factory=list)

    def has_room(self, running: int) -> bool:
        """One at a time."""
        return running == 0

    def opened(self) -> AbstractContextManager[object]:
        """There is nothing to prepare."""
        return nullcontext()

    def start(self, config: RunConfig, watch: Observer) -> Job:
        """Train it."""
        self.data = self.data or _Data(self.root, watch)
        self._done.append(Job(config))
        try:
            self._done[-1].outcome = run_one(config, self.out, self.data, watch)
        except Busy as busy:
            self._done[-1].outcome = busy
        except (Refused, torch.OutOfMemoryError) as error:
            if not current().alone and (isinstance(error, (Broken, torch.OutOfMemoryError))):
                raise  # the others may not have met it, and wait
            if isinstance(error, Broken) and error.__cause__ is not None and self.only:
                raise error.__cause__ from None
            full = isinstance(error, torch.OutOfMemoryError)
            why = f"the GPU's memory is full: {str(error).splitlines()[0]}" if full else str(error) or repr(error)
            self._done[-1].outcome = why
            tell_end(self._done[-1], watch)
        return self._done[-1]

    def ended(self, watch: Observer) -> list[Job]:
        """That one."""
        done, self._done = self._done, []
        return done


def _begin(configs: Sequence[RunConfig], out: Path, root: Path | None, watch: Observer) -> list[Results | None]:
    """What those runs found that are finished. Other configurations in their folders, and data that are not there, are
    met before anything is trained."""
    found: list[Results | None] = []
    for config in configs:
        try:
            found.append(_finished(config, out, watch))
        except Busy:
            if not current().alone:
                raise
            found.append(None)
    parts = [config.scenario for config, results in zip(configs, found, strict=True) if results is None]
    for number, part in enumerate(parts):
        if part not in parts[:number]:
            check_data(part, root)
    return found


def _look(config: RunConfig, out: Path, watch: Observer) -> Results | None:
    """Whether another process has finished a run since this one began. `Busy` if one works on it."""

    def found() -> Results | None:
        folder = RunFolder(out / config.folder)
        if not folder.begun():
            return None
        with folder.locked():
            return folder.results()

    if (results := current().by_first(found)) is not None:
        watch.run_done(config, results, True)
    return results


def _finished(config: RunConfig, out: Path, watch: Observer) -> Results | None:
    """What a run found, if it came to its end before."""
    folder = RunFolder(out / config.folder)
    if not folder.begun():
        return None
    with folder.locked():
        folder.claim(config.to_dict(), config.defaults(), current().world)
        results = folder.results()
        code = results.environment.get("code") if results is not None else folder.code()
    if code is not None and code != registry.code(config.choice.method):
        watch.notice(
            f"{folder.path} was {'made' if results is not None else 'begun'} with other code of "
            f"'{config.choice.method}'; for results of what it is now, delete that folder or choose another --out"
        )
    if results is not None:
        watch.run_done(config, results, True)
    return results


def _complain(failures: list[str], results: list[Results]) -> None:
    runs = len(failures) + len(results)
    if failures and runs == 1:
        raise Failed(failures[0], results)
    if failures:
        more = "\n".join(failures)
        raise Failed(f"{len(failures)} of {runs} runs failed, the others are finished:\n{more}", results)


@dataclass(frozen=True)
class _Elsewhere:
    """What a process of its own does with a run."""

    out: Path
    root: Path | None

    def __call__(self, config: RunConfig, watch: Observer) -> Results:
        return run_one(config, self.out, _Data(self.root, watch), watch)


@dataclass
class _Data:
    """Scenarios, read when they are first needed: a run that is finished needs none."""

    root: Path | None
    watch: Observer
    part: NamedPart | None = None
    scenario: Scenario | None = None

    def __call__(self, part: NamedPart) -> Scenario:
        if self.scenario is None or part != self.part:
            self.scenario = None  # one data set in memory at a time
            made = make_scenario(part, self.root, self.watch.loading)
            made.check()
            self.part, self.scenario = part, made
        return self.scenario
