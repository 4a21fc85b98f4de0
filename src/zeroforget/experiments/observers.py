"""Who looks on while an experiment runs. Every hook does nothing unless a subclass says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeroforget.experiments.experiment import RunConfig
from zeroforget.experiments.results import Results
from zeroforget.tracking import FIGURES, Tracker, event_writer
from zeroforget.training import Progress


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
