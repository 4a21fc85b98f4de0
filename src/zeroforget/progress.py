"""How far learning has come: what the training loop tells, and how people see it.

In a terminal and in a notebook bars move; anywhere else each epoch is a line with its own figures.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


@dataclass(frozen=True)
class Epoch:
    """One line of the log."""

    epoch: int
    lr: float
    loss: float
    val_loss: float
    val_accuracy: float
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Where training stands, several times a second."""

    task: str
    index: int
    phase: int
    epoch: int
    epochs: int
    step: int
    steps: int
    lr: float
    last: Epoch | None
    abreast: int = 1
    """How many learn the task side by side, this being one of them: candidates of a search."""

    @property
    def done(self) -> float:
        """How many epochs, the one under way in part."""
        return min(self.epoch + self.step / self.steps, self.epochs)

    @property
    def ended(self) -> Epoch | None:
        """The epoch that has just come to its end."""
        done = self.step == self.steps and self.last is not None and self.last.epoch == self.epoch
        return self.last if done else None

    @property
    def left(self) -> float:
        """Seconds until the last epoch, at the pace of the last one; candidates may train one after the other."""
        pace = self.abreast * self.last.seconds if self.last else 0.0
        return pace * (self.epochs - self.epoch - self.step / self.steps)


Show = bool | Callable[[Progress], None] | None
"""What to do about progress: show it (True: as lines where no bars can be), hide it, or tell a function. None: show it
where somebody is looking, in a terminal or a notebook."""


def figures(together: Sequence[Progress]) -> str:
    """Of one, or of those that learn a task side by side: the farthest epoch, and the range of what they come to."""
    farthest = max(together, key=lambda each: each.epoch)
    text = f"epoch {farthest.epoch + 1}/{farthest.epochs}"
    last = [each.last for each in together if each.last is not None]
    if farthest.abreast > 1:
        text += f", {farthest.abreast} candidates"
        accuracies = sorted(100 * epoch.val_accuracy for epoch in last)
        ends = dict.fromkeys(f"{accuracy:.1f}" for accuracy in accuracies[:1] + accuracies[-1:])
        return f"{text} {'–'.join(ends)} %" if ends else text
    return text + "".join(f", {_result(epoch)}" for epoch in last)


def epoch_line(progress: Progress) -> str | None:
    """An epoch that has just ended, with its own figures; None within an epoch."""
    if (epoch := progress.ended) is None:
        return None
    which = f"candidate {progress.phase + 1}, " if progress.abreast > 1 else ""
    return f"{which}epoch {epoch.epoch + 1}/{progress.epochs}: {_result(epoch)}; at most {progress.left:.0f} s left"


def _result(epoch: Epoch) -> str:
    if math.isnan(epoch.val_accuracy):  # a loss of one's own tells no accuracy
        return f"loss {epoch.loss:.3f}, validation {epoch.val_loss:.3f}"
    return f"loss {epoch.loss:.3f}, accuracy {100 * epoch.val_accuracy:.1f} %"


def has_bars(console: Console) -> bool:
    """Whether bars can move there; a notebook needs ipywidgets for them."""
    notebook = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    return notebook or (console.is_terminal and not console.is_jupyter)


def bars(console: Console, *, transient: bool = False) -> Bars:
    """Bars with the time that was and the time that is left."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[figures]}"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(*columns, *times, console=console, transient=transient)


class TrainingDisplay:
    """Shows the reading of pictures and a training, with a bar for each phase that trains."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self.console = console or Console(stderr=True)
        self.bars = bars(self.console) if has_bars(self.console) else None
        self.rows: dict[str, TaskID] = {}
        if self.bars is not None:
            self.rows["reading"] = self.bars.add_task("reading pictures", figures="", visible=False)
        self.drawn: dict[str, float] = {}

    def reading(self, done: int, total: int) -> None:
        """So many pictures are read."""
        if self.bars is not None:
            figures = f"{done}/{total}"
            self.bars.update(self.rows["reading"], completed=done, total=total, visible=done < total, figures=figures)

    def training(self, progress: Progress) -> None:
        """Move its bar, ten times a second at most; or print the epoch that has just ended."""
        if self.bars is None:
            if (line := epoch_line(progress)) is not None:
                self.console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
            return
        name, now = f"training{f' {progress.phase + 1}' if progress.phase else ''}", time.monotonic()
        if now - self.drawn.get(name, 0.0) < 0.1:
            return
        self.drawn[name] = now
        if name not in self.rows:
            self.rows[name] = self.bars.add_task(name, figures="", total=progress.epochs)
        self.bars.update(self.rows[name], completed=progress.done, figures=figures([progress]))

    def __enter__(self) -> TrainingDisplay:
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars is not None:
            self.bars.stop()


@contextmanager
def showing(show: Show) -> Iterator[Callable[[Progress], None] | None]:
    """Inside, what hears of progress, as `show` says."""
    if callable(show) or show is False:
        yield show or None
        return
    with TrainingDisplay() as display:
        yield display.training if show or display.bars is not None else None
