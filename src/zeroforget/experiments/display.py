"""Progress for people: live bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
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


class Lines(Watch):
    """A line when a run begins, when a task is learned, and every `pause` seconds in between."""

    def __init__(self, console: Console, runs: int, pause: float = 10.0) -> None:
        self.console, self.runs, self.pause = console, runs, pause
        self.done = 0
        self.tasks: list[str] = []
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def loading(self, what: str, done: int, total: int) -> None:
        """How far the data are read, now and then."""
        if time.monotonic() - self._told >= self.pause:
            self._told = time.monotonic()
            self.say(f"    {what}: {done}{f' of {total}' if total else ''}")

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """Which run, and where it stands."""
        self.tasks = tasks
        went = f", going on after {finished} of {len(tasks)} tasks" if finished else ""
        self.say(f"[{self.done + 1}/{self.runs}] {_title(config)}{went}")

    def progress(self, config: RunConfig, progress: training.Progress, trial: str | None) -> None:
        """Epoch, loss and accuracy, now and then."""
        if progress.last is None or time.monotonic() - self._told < self.pause:
            return
        self._told = time.monotonic()
        rest = _left(progress)
        self.say(
            f"    task {progress.index + 1}/{len(self.tasks)}{f' {trial}' if trial else ''}: {_figures(progress)}"
            f", at most {rest:.0f} s left for it"
        )

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """The new task's accuracy and the average so far."""
        self.say(f"  {summary(record, len(self.tasks))}")

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        """The average and what was forgotten."""
        self.done += 1
        if repeated:
            self.say(f"[{self.done}/{self.runs}] {_title(config)}: finished before, {_outcome(results)}")
        else:
            self.say(f"  {_outcome(results)}")

    def run_failed(self, config: RunConfig, error: Exception) -> None:
        """Why it stopped."""
        self.done += 1
        self.say(f"[{self.done}/{self.runs}] {_title(config)} failed: {error}")

    def say(self, text: str) -> None:
        """Print one line, however long."""
        self.console.print(escape(text), soft_wrap=True, highlight=False)


class Live(Lines):
    """Two bars: the whole experiment, with the time it may take yet, and the task that is being learned."""

    def __init__(self, console: Console, runs: int) -> None:
        super().__init__(console, runs)
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
        self.whole: TaskID = self.bars.add_task("experiment", total=None, figures=f"run 1/{runs}")
        self.task: TaskID = self.bars.add_task("task", total=None, figures="")
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bars.stop()

    def loading(self, what: str, done: int, total: int) -> None:
        """The lower bar."""
        figures = f"{done}/{total}" if total else str(done)
        self.bars.update(self.task, description=escape(what), total=total or None, completed=done, figures=figures)

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        """Set the whole bar's length."""
        super().run_begins(config, tasks, finished)
        self.bars.update(self.whole, total=self.runs * len(tasks), figures=f"run {self.done + 1}/{self.runs}")
        self.bars.reset(self.task, total=None, figures="")
        self._advance(finished)

    def progress(self, config: RunConfig, progress: training.Progress, trial: str | None) -> None:
        """Move the bars, ten times a second at most."""
        now = time.monotonic()
        if now - self._drawn < 0.1:
            return
        self._drawn = now
        epochs = progress.epoch + progress.step / progress.steps
        what = f"{config.choice.label} · task {progress.index + 1}/{len(self.tasks)} {progress.task}"
        self.bars.update(
            self.task,
            description=escape(what + (f" · {trial}" if trial else "")),
            total=progress.epochs,
            completed=min(epochs, progress.epochs),
            figures=_figures(progress),
        )
        self._advance(progress.index + min(epochs / progress.epochs, 1.0))

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        """A line above the bars, and a fresh bar for the next task."""
        super().task_done(config, record)
        self.bars.reset(self.task, total=None, figures="")
        self._advance(record["index"] + 1)

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        """A line above the bars."""
        self.tasks = self.tasks or results.names
        super().run_done(config, results, repeated)
        self.bars.update(self.whole, total=self.runs * len(self.tasks))
        self._advance(0)

    def _advance(self, tasks: float) -> None:
        self.bars.update(self.whole, completed=self.done * len(self.tasks) + tasks)


def summary(record: dict[str, Any], tasks: int) -> str:
    """One line about a task that was just learned."""
    row = record["accuracy"]
    kept = sum(record["unchanged"][:-1])
    before = f", {kept} of {len(row) - 1} earlier ones bit-equal" if len(row) > 1 else ""
    return (
        f"task {record['index'] + 1}/{tasks} {record['name']}: {100 * row[-1]:.1f} %, "
        f"average {100 * sum(row) / len(row):.1f} %{before}, {record['seconds']:.1f} s"
    )


def _title(config: RunConfig) -> str:
    return f"{config.choice.label} on {config.scenario.name}, seed {config.seed}"


def _outcome(results: Results) -> str:
    worst = 100 * min(results.forgetting)
    return f"average {100 * results.average:.1f} %, most forgotten {signed(worst)}"


def _figures(progress: training.Progress) -> str:
    text = f"epoch {progress.epoch + 1}/{progress.epochs}"
    if progress.last is not None:
        text += f" loss {progress.last.loss:.3f} accuracy {100 * progress.last.val_accuracy:.1f} %"
    return text


def _left(progress: training.Progress) -> float:
    """Seconds until the last epoch, at the pace of the last one."""
    pace = progress.last.seconds if progress.last else 0.0
    return pace * (progress.epochs - progress.epoch - progress.step / progress.steps)
