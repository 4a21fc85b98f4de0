"""Where figures of training go: TensorBoard, Weights & Biases, Trackio, or whatever has the same three calls.

`init` begins, `log` takes the figures of a moment and `finish` ends. The modules `wandb` and `trackio` have them, so
either is a tracker as it is.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from zeroforget.files.imports import look_here
from zeroforget.progress import Progress

FIGURES = ("loss", "val_loss", "val_accuracy", "lr")


class Tracker(Protocol):
    """The three calls."""

    def init(self, *, project: str, name: str, config: dict[str, Any]) -> Any:
        """Begin: a name for what is trained, and the options that it is trained with."""

    def log(self, data: dict[str, Any]) -> Any:
        """The figures of a moment."""

    def finish(self) -> Any:
        """End."""


def event_writer() -> Any:
    """TensorBoard's class that writes event files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("TensorBoard is not installed: pip install 'zeroforget[tensorboard]'") from error
    return SummaryWriter


class TensorBoard:
    """Event files in a folder, one folder below it for each name."""

    def __init__(self, folder: Path) -> None:
        self._make, self._folder = event_writer(), folder
        self._writer: Any = None

    def init(self, *, project: str, name: str, config: dict[str, Any]) -> None:
        """Open an event file."""
        self._writer = self._make(str(self._folder / name))

    def log(self, data: dict[str, Any]) -> None:
        """Each figure at its epoch."""
        assert self._writer is not None
        for name, value in data.items():
            if name != "epoch":
                self._writer.add_scalar(name, value, data.get("epoch", 0))

    def finish(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


def tracker(name: str) -> Tracker:
    """A module with the three calls, by its name: wandb, trackio or one of your own, maybe in the current folder."""
    look_here()
    try:
        module: Any = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"--log {name}: {error}. Install it, or name a module with init, log and finish") from error
    if lacking := [call for call in ("init", "log", "finish") if not callable(getattr(module, call, None))]:
        raise ValueError(f"--log {name}: that module has no {' and no '.join(lacking)}; wandb and trackio do")
    found: Tracker = module
    return found


class Epochs:
    """Hears of a training's progress and tells a tracker of each epoch, once."""

    def __init__(self, to: Tracker) -> None:
        self.to = to
        self._told: set[tuple[int, int, int]] = set()

    def __call__(self, progress: Progress) -> None:
        last = progress.last
        if last is None or (key := (progress.index, progress.phase, last.epoch)) in self._told:
            return
        self._told.add(key)
        phase = f"phase-{progress.phase}/" if progress.phase else ""
        self.to.log({"epoch": last.epoch} | {f"{phase}{what}": getattr(last, what) for what in FIGURES})
