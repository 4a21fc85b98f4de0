"""Progress for people: live bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from zeroforget import training
from zeroforget.experiments.experiment import RunConfig
from zeroforget.experiments.results import Results
from zeroforget.experiments.tables import signed
from zeroforget.experiments.watch import Watch


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
    newest: dict[int, training.Progress] = field(default_factory=dict)
    """Of each that learns it, by phase: where it stands."""

    def hear(self, progress: training.Progress, trial: str | None) -> list[training.Progress]:
        """Where all stand that learn the same thing side by side."""
        if self.learning != (progress.index, trial):
            self.learning, self.newest = (progress.index, trial), {}
        self.newest[progress.phase] = progress
        return list(self.newest.values()) if progress.abreast > 1 else [progress]


class Lines(Watch):
    """A line when a run begins, when a task is learned, and every `pause` seconds in between.

    With `parallel` runs at the same time, every line says which one it is about.
    """

    def __init__(self, console: Console, runs: int, parallel: int = 1, pause: float = 10.0) -> None:
        self.console, self.runs, self.parallel, self.pause = console, runs, parallel, pause
        self.done = 0
        self.running: dict[Path, _Running] = {}
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def notice(self, text: str) -> None:
        """As it is."""
        self.say(text)

    def loading(self, what: str, done: int, total: int) -> None:
        """How far the data are read, now and then."""
        if time.monotonic() - self._told >= self.pause:
            self._told = time.monotonic()
            self.say(f"    {what}: {done}{f' of {total}' if total else ''}")

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """Which run, and where it stands."""
        self.running[config.folder] = _Running(len(tasks), finished)
        went = f", going on after {finished} of {len(tasks)} tasks" if finished else ""
        self.say(f"[{self.done + len(self.running)}/{self.runs}] {_title(config)}{went}")

    def progress(self, config: RunConfig, progress: training.Progress, trial: str | None) -> None:
        """Epoch, loss and accuracy, now and then."""
        run = self.running[config.folder]
        together = run.hear(progress, trial)
        if progress.last is None or time.monotonic() - run.told < self.pause:
            return
        run.told = time.monotonic()
        self.say(
            f"    {self._which(config)}task {progress.index + 1}/{run.tasks}{f' {trial}' if trial else ''}: "
            f"{_figures(together)}, at most {_left(progress):.0f} s left for it"
        )

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """The new task's accuracy and the average so far."""
        self.say(f"  {self._which(config)}{summary(record, self.running[config.folder].tasks)}")

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

    def _ended(self, config: RunConfig) -> _Running | None:
        self.done += 1
        return self.running.pop(config.folder, None)

    def _which(self, config: RunConfig) -> str:
        return f"{_title(config)}: " if self.parallel > 1 else ""


class Live(Lines):
    """Bars: the whole experiment, with the time it may take yet, and below it every run that is under way."""

    def __init__(self, console: Console, runs: int, parallel: int = 1) -> None:
        super().__init__(console, runs, parallel)
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.whole: TaskID = self.bars.add_task("experiment", total=runs, figures="")
        self.data: TaskID = self.bars.add_task("data", total=None, figures="", visible=False)

    def __enter__(self) -> Self:
        self._advance()
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bars.stop()

    def loading(self, what: str, done: int, total: int) -> None:
        """A bar that is there as long as data are read."""
        figures = f"{done}/{total}" if total else str(done)
        self.bars.update(
            self.data, description=escape(what), total=total or None, completed=done, figures=figures, visible=True
        )

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """A bar for it."""
        super().run_begins(config, tasks, finished)
        self.bars.update(self.data, visible=False)
        self.running[config.folder].bar = self.bars.add_task(escape(self._name(config)), total=None, figures="")
        self._advance()

    def progress(self, config: RunConfig, progress: training.Progress, trial: str | None) -> None:
        """Move the bars, ten times a second at most."""
        run, now = self.running[config.folder], time.monotonic()
        together = run.hear(progress, trial)
        if now - run.told < 0.1:
            return
        run.told = now
        epochs = min(max(each.epoch + each.step / each.steps for each in together), progress.epochs)
        run.done = progress.index + epochs / progress.epochs
        what = f"{self._name(config)} · task {progress.index + 1}/{run.tasks}"
        what += "" if self.parallel > 1 else f" {progress.task}"
        what += f" · {trial}" if trial else ""
        if run.bar is not None:
            figures = _figures(together)
            self.bars.update(
                run.bar, description=escape(what), total=progress.epochs, completed=epochs, figures=figures
            )
        self._advance()

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """A line above the bars, and a fresh bar for the next task."""
        super().task_done(config, record)
        run = self.running[config.folder]
        run.done = record["index"] + 1
        if run.bar is not None:
            self.bars.reset(run.bar, total=None, figures="")
        self._advance()

    def _ended(self, config: RunConfig) -> _Running | None:
        run = super()._ended(config)
        if run is not None and run.bar is not None:
            self.bars.remove_task(run.bar)
        self._advance()
        return run

    def _name(self, config: RunConfig) -> str:
        return _title(config) if self.parallel > 1 else config.choice.label

    def _advance(self) -> None:
        part = sum(run.done / run.tasks for run in self.running.values())
        now = self.done + max(1, len(self.running))
        figures = (
            f"run {min(now, self.runs)}/{self.runs}" if self.parallel == 1 else f"{self.done}/{self.runs} runs done"
        )
        self.bars.update(self.whole, completed=self.done + part, figures=figures)


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


def _figures(together: Sequence[training.Progress]) -> str:
    """Of one, or of those that learn a task side by side: the farthest epoch, and the range of what they come to."""
    farthest = max(together, key=lambda each: each.epoch)
    text = f"epoch {farthest.epoch + 1}/{farthest.epochs}"
    last = [each.last for each in together if each.last is not None]
    if farthest.abreast > 1:
        text += f", {farthest.abreast} candidates"
        accuracies = sorted(100 * epoch.val_accuracy for epoch in last)
        ends = dict.fromkeys(f"{accuracy:.1f}" for accuracy in accuracies[:1] + accuracies[-1:])
        return f"{text} {'–'.join(ends)} %" if ends else text
    return text + "".join(f" loss {epoch.loss:.3f} accuracy {100 * epoch.val_accuracy:.1f} %" for epoch in last)


def _left(progress: training.Progress) -> float:
    """Seconds until the last epoch, at the pace of the last one; candidates may train one after the other."""
    pace = progress.abreast * progress.last.seconds if progress.last else 0.0
    return pace * (progress.epochs - progress.epoch - progress.step / progress.steps)
