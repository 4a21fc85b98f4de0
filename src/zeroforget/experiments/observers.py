"""Who looks on while an experiment runs: files of TensorBoard, trackers, and bars or lines for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from zeroforget.experiments.experiment import RunConfig
from zeroforget.experiments.results import Results
from zeroforget.experiments.tables import signed
from zeroforget.progress import Progress, Show, bars, epoch_line, figures, has_bars
from zeroforget.tracking import FIGURES, Tracker, event_writer


class Observer:
    """Looks on and does nothing."""

    every = 0.1
    """Seconds between reports of progress within an epoch; each epoch's end is reported in any case."""

    def notice(self, text: str) -> None:
        """Something worth a line."""

    def loading(self, what: str, done: int, total: int) -> None:
        """Data are being read; a total of 0 is not known."""

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """A run starts, or goes on after `finished` tasks."""

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        """After each epoch, and now and then within it; `trial` names a trial of the hyperparameter search."""

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """A task is learned, evaluated and saved."""

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        """A run is finished; `repeated` if it already was before."""

    def run_failed(self, config: RunConfig, error: Exception) -> None:
        """A run stopped, because its training diverged or its process died; the others go on."""


class TensorBoardObserver(Observer):
    """Scalars for TensorBoard, in the folder `tensorboard` of each run."""

    def __init__(self, out: Path) -> None:
        self._make = event_writer()
        self._out = out
        self._writers: dict[Path, Any] = {}
        self._seen: set[tuple[Any, ...]] = set()

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """Open the run's event file."""
        self._writers[config.folder] = self._make(str(self._out / config.folder / "tensorboard"))

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        """Each epoch once."""
        last = progress.last
        key = (config.folder, progress.index, progress.phase, trial, last.epoch if last else None)
        if last is None or key in self._seen:
            return
        self._seen.add(key)
        name = f"task-{progress.index + 1}" + (f"/{trial}" if trial else "") + f"/phase-{progress.phase}"
        for what in FIGURES:
            self._writers[config.folder].add_scalar(f"{name}/{what}", getattr(last, what), last.epoch)

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """The accuracy of every task so far."""
        for index, value in enumerate(record["accuracy"]):
            self._writers[config.folder].add_scalar(f"accuracy/task-{index + 1}", value, record["index"] + 1)
        average = sum(record["accuracy"]) / len(record["accuracy"])
        self._writers[config.folder].add_scalar("accuracy/average", average, record["index"] + 1)

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        """Close the event file."""
        self._close(config)

    def run_failed(self, config: RunConfig, error: Exception) -> None:
        """Close the event file."""
        self._close(config)

    def _close(self, config: RunConfig) -> None:
        if (writer := self._writers.pop(config.folder, None)) is not None:
            writer.close()


class Tracked(Observer):
    """Tells a tracker, such as the module `wandb`, of each run's epochs and of every task's accuracy."""

    def __init__(self, to: Tracker) -> None:
        self.to = to
        self._begun = False
        self._seen: set[tuple[Any, ...]] = set()

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """Begin with the run's name and options."""
        self._seen.clear()
        name = config.folder.as_posix().replace("/", "-")
        self.to.init(project="zeroforget", name=name, config=config.to_dict())
        self._begun = True

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        """Each epoch once."""
        last = progress.last
        key = (progress.index, progress.phase, trial, last.epoch if last else None)
        if last is None or key in self._seen:
            return
        self._seen.add(key)
        name = f"task-{progress.index + 1}" + (f"/{trial}" if trial else "") + f"/phase-{progress.phase}"
        self.to.log({"epoch": last.epoch} | {f"{name}/{what}": getattr(last, what) for what in FIGURES})

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """The accuracy of every task so far."""
        self.to.log({f"accuracy/task-{index + 1}": value for index, value in enumerate(record["accuracy"])})

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        """End, if it has begun: a run that was finished before has not."""
        self._end()

    def run_failed(self, config: RunConfig, error: Exception) -> None:
        """End, if it has begun."""
        self._end()

    def _end(self) -> None:
        if self._begun:
            self.to.finish()
        self._begun = False


class Observers(Observer):
    """Several watchers as one."""

    def __init__(self, *watches: Observer) -> None:
        self.watches = watches
        self.every = min(watch.every for watch in watches)

    def notice(self, text: str) -> None:
        """Tell each."""
        for watch in self.watches:
            watch.notice(text)

    def loading(self, what: str, done: int, total: int) -> None:
        """Tell each."""
        for watch in self.watches:
            watch.loading(what, done, total)

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """Tell each."""
        for watch in self.watches:
            watch.run_begins(config, tasks, finished)

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        """Tell each."""
        for watch in self.watches:
            watch.progress(config, progress, trial)

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """Tell each."""
        for watch in self.watches:
            watch.task_done(config, record)

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        """Tell each."""
        for watch in self.watches:
            watch.run_done(config, results, repeated)

    def run_failed(self, config: RunConfig, error: Exception) -> None:
        """Tell each."""
        for watch in self.watches:
            watch.run_failed(config, error)


_PAUSE = 10.0
"""Seconds between lines about data that are being read."""


@dataclass
class _Running:
    """A run under way."""

    tasks: int
    done: float = 0.0
    """How many of its tasks, the one being learned in part."""
    told: float = field(default_factory=time.monotonic)
    bar: TaskID | None = None
    learning: tuple[int, str | None] | None = None
    """The task and, in a search of a trade-off, the trial."""
    newest: dict[int, Progress] = field(default_factory=dict)
    """Of each that learns it, by phase: where it stands."""

    def hear(self, progress: Progress, trial: str | None) -> list[Progress]:
        """Where all stand that learn the same thing side by side."""
        if self.learning != (progress.index, trial):
            self.learning, self.newest = (progress.index, trial), {}
        self.newest[progress.phase] = progress
        return list(self.newest.values()) if progress.abreast > 1 else [progress]


class ExperimentDisplay(Observer):
    """Bars for the whole experiment and for each run under way; where none can be, a line for each epoch (unless
    `epochs` is False). When a run begins and when a task is learned there is a line in any case.

    With `parallel` runs at the same time, every line says which one it is about.
    """

    def __init__(self, console: Console, runs: int, parallel: int = 1, *, epochs: bool = True) -> None:
        self.console, self.runs, self.parallel, self.epochs = console, runs, parallel, epochs
        self.done = 0
        self.running: dict[Path, _Running] = {}
        self._told = time.monotonic()
        self.bars = bars(console, transient=True) if has_bars(console) else None
        if self.bars is not None:
            self.whole = self.bars.add_task("experiment", total=runs, figures="")
            self.data = self.bars.add_task("data", total=None, figures="", visible=False)

    def __enter__(self) -> Self:
        self._advance()
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bars is not None:
            self.bars.stop()

    def notice(self, text: str) -> None:
        """As it is."""
        self.say(text)

    def loading(self, what: str, done: int, total: int) -> None:
        """How far the data are read: a bar that is there meanwhile, or a line now and then."""
        if self.bars is not None:
            counted = f"{done}/{total}" if total else str(done)
            self.bars.update(
                self.data, description=escape(what), total=total or None, completed=done, figures=counted, visible=True
            )
        elif time.monotonic() - self._told >= _PAUSE:
            self._told = time.monotonic()
            self.say(f"    {what}: {done}{f' of {total}' if total else ''}")

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """Which run, and where it stands."""
        run = self.running[config.folder] = _Running(len(tasks), finished)
        went = f", going on after {finished} of {len(tasks)} tasks" if finished else ""
        self.say(f"[{self.done + len(self.running)}/{self.runs}] {_title(config)}{went}")
        if self.bars is not None:
            self.bars.update(self.data, visible=False)
            run.bar = self.bars.add_task(escape(self._name(config)), total=None, figures="")
        self._advance()

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        """Move the bars, ten times a second at most; or print the epoch that has just ended."""
        run, now = self.running[config.folder], time.monotonic()
        together = run.hear(progress, trial)
        if self.bars is None:
            self._print(config, progress, trial)
            return
        if now - run.told < 0.1:
            return
        run.told = now
        epochs = max(each.done for each in together)
        run.done = progress.index + epochs / progress.epochs
        what = f"{self._name(config)} · task {progress.index + 1}/{run.tasks}"
        what += "" if self.parallel > 1 else f" {progress.task}"
        what += f" · {trial}" if trial else ""
        if run.bar is not None:
            self.bars.update(
                run.bar, description=escape(what), total=progress.epochs, completed=epochs, figures=figures(together)
            )
        self._advance()

    def _print(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        if self.epochs and (line := epoch_line(progress)) is not None:
            task = f"task {progress.index + 1}/{self.running[config.folder].tasks}{f' {trial}' if trial else ''}"
            self.say(f"    {self._which(config)}{task}, {line}")

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """The new task's accuracy and the average so far; a fresh bar for the next task."""
        run = self.running[config.folder]
        self.say(f"  {self._which(config)}{summary(record, run.tasks)}")
        run.done = record["index"] + 1
        if self.bars is not None and run.bar is not None:
            self.bars.reset(run.bar, total=None, figures="")
        self._advance()

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        """The average and what was forgotten."""
        self._ended(config)
        if repeated:
            self.say(f"[{self.done}/{self.runs}] {_title(config)}: finished before, {_outcome(results)}")
        else:
            self.say(f"  {self._which(config)}{_outcome(results)}")

    def run_failed(self, config: RunConfig, error: Exception) -> None:
        """Why it stopped."""
        self._ended(config)
        self.say(f"[{self.done}/{self.runs}] {_title(config)} failed: {error}")

    def say(self, text: str) -> None:
        """Print one line, however long."""
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def _ended(self, config: RunConfig) -> None:
        self.done += 1
        run = self.running.pop(config.folder, None)
        if self.bars is not None and run is not None and run.bar is not None:
            self.bars.remove_task(run.bar)
        self._advance()

    def _which(self, config: RunConfig) -> str:
        return f"{_title(config)}: " if self.parallel > 1 else ""

    def _name(self, config: RunConfig) -> str:
        return _title(config) if self.parallel > 1 else config.choice.label

    def _advance(self) -> None:
        if self.bars is None:
            return
        part = sum(run.done / run.tasks for run in self.running.values())
        now = self.done + max(1, len(self.running))
        counted = (
            f"run {min(now, self.runs)}/{self.runs}" if self.parallel == 1 else f"{self.done}/{self.runs} runs done"
        )
        self.bars.update(self.whole, completed=self.done + part, figures=counted)


class _Hearing(Observer):
    """Hands progress on to a function."""

    def __init__(self, told: Callable[[Progress], None]) -> None:
        self.told = told

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        """As it is."""
        self.told(progress)


@contextmanager
def watching(show: Show, runs: int, parallel: int = 1) -> Iterator[Observer]:
    """Inside, who looks on, as `show` says: see `zeroforget.progress.Show`."""
    console = Console(stderr=True)
    if callable(show):
        yield _Hearing(show)
    elif show or (show is None and has_bars(console)):
        with ExperimentDisplay(console, runs, parallel) as display:
            yield display
    else:
        yield Observer()


def summary(record: dict[str, Any], tasks: int) -> str:
    """One line about a task that was just learned."""
    row = record["accuracy"]
    kept = sum(record["unchanged"][:-1])
    before = f", {kept} of {len(row) - 1} earlier ones bit-equal" if len(row) > 1 else ""
    return (
        f"task {record['index'] + 1}/{tasks} {record['name']}: {100 * row[-1]:.1f} %, "
        f"average {100 * sum(row) / len(row):.1f} %{before}{_found(record)}, {record['seconds']:.1f} s"
    )


def _found(record: dict[str, Any]) -> str:
    """What a search came to: a growth, a trade-off."""
    notes = record["log"]["notes"]
    text = ""
    if tried := notes.get("search"):
        growths = ", ".join(f"{100 * each['growth']:g}" for each in tried)
        text += f", grown by {100 * notes['growth']:g} % ({growths} tried)"
    if (searched := notes.get("hyperparameters")) and searched["value"] is not None:
        text += f", {searched['option']} {searched['value']:g} found"
    return text


def _title(config: RunConfig) -> str:
    return f"{config.choice.label} on {config.scenario.name}, seed {config.seed}"


def _outcome(results: Results) -> str:
    worst = 100 * min(results.forgetting)
    return f"average {100 * results.average:.1f} %, most forgotten {signed(worst)}"
