"""What the training loop is told and what it needs of a method, and what it says when that goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.processes import Processes
from zeroforget.progress import Epoch, Progress
from zeroforget.training.checkpoint import Later
from zeroforget.training.evaluate import Predictor
from zeroforget.training.feed import LoadedTask
from zeroforget.training.regime import Regime


@dataclass
class FitSettings:
    """How a task is trained, and who hears of it: the fields of `Fit`, which tells what each is for."""

    regime: Regime = field(default_factory=Regime)
    seed: int = 0
    progress: Callable[[Progress], None] | None = None
    folder: Path | None = None
    pause: float = 0.0
    save_every: float | None = None
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer] | None = None
    after_epoch: Callable[[Epoch], object] | None = None
    later: Later = field(default_factory=Later, init=False, repr=False, compare=False)
    """Writes checkpoints beside training."""

    def make_optimizer(
        self, regime: Regime, parameters: list[nn.Parameter], lr: float, captured: bool
    ) -> torch.optim.Optimizer:
        """The regime's, or the user's own."""
        if self.optimizer is None:
            return regime.make_optimizer(parameters, lr, captured=captured)
        made = self.optimizer(list(parameters), lr)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"optimizer must make a torch.optim.Optimizer of parameters and rate, not {made!r}")
        return made


class Learner(Protocol):
    """A loss, hooks that the loop calls by name, and the tensors that training may change."""

    def trainable(self) -> Iterable[nn.Parameter]: ...
    def moving(self) -> dict[str, Tensor]: ...
    def before_step(self, done: float) -> None: ...
    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor: ...
    def after_backward(self) -> None: ...
    def after_step(self) -> None: ...
    def predictor(self, task: int) -> Predictor: ...
    def score(self, predictor: Predictor, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]: ...
    def train(self, mode: bool = True) -> Any: ...
    def modules(self) -> Iterator[nn.Module]: ...

    smoothing: float
    """The regime's label smoothing: set before training begins."""
    share: Tensor | None
    """Where a step mixes images, each one's share of itself; the rest is its partner's."""
    coupled: bool
    """Whether the gradient of one weight has a say in how another one moves: set before training begins."""
    step_rate: float
    """How far a step carries a weight by its gradient, momentum included: set before each `before_step`."""
    graph_safe: ClassVar[bool]
    """Whether a step is the same operators on the same tensors every time."""


class Diverged(ValueError):
    """Training met NaN or infinity and was stopped; what had been learned before is as it was.

    Example:
        >>> import zeroforget
        >>> issubclass(zeroforget.Diverged, ValueError)
        True
    """


def diverged(task: Task | LoadedTask, regime: Regime, what: str) -> Diverged:
    """What happened, and what to do about it."""
    return Diverged(
        f"task '{task.name}': {what}. Try a lower lr, clip=1.0 to bound the gradient"
        + (", or precision='float32'" if regime.precision == "bf16" else "")
        + ". What was learned before this task is unchanged."
    )


def check_loss(learner: Learner, loss: Any) -> None:
    """Refuse what no gradient can be found of."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        without = " without one" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise ValueError(f"{type(learner).__name__}.loss must return one number with a gradient, not {found}{without}")


def check_shared(task: Task | LoadedTask, regime: Regime, processes: Processes) -> None:
    """Refuse what several processes cannot learn together. Each of them raises the same."""
    if processes.alone:
        return
    told = processes.told((task.name, len(task.train), len(task.val), str(regime)))
    if other := next((rank for rank, theirs in enumerate(told) if theirs != told[0]), 0):
        raise ValueError(f"process 0 was to learn {told[0]}, process {other} {told[other]}; give all of them the same")
    if isinstance(task, LoadedTask):  # each process has a loader of its own
        return
    smallest = min(regime.batch_size, len(task.train))
    if smallest < processes.world:
        raise ValueError(
            f"task '{task.name}': {processes.world} processes share each batch, and the smallest has {smallest} images "
            f"(batch_size is {regime.batch_size}); start fewer processes, or give a larger batch_size"
        )


def other_processes(before: int, now: int, task: Task | LoadedTask, folder: Path | None) -> ValueError:
    """A training cannot go on where its batches are shared otherwise: it would end with other numbers."""
    several = "es" if before > 1 else ""
    return ValueError(
        f"the training of '{task.name}' in {folder} was begun by {before} process{several} and would go on with {now}: "
        f"what they draw would differ. Start it with {before}, or delete that folder to begin anew"
    )


def state_of(learner: Learner) -> dict[str, Tensor]:
    """All that training begins from."""
    return dict(learner.state_dict()) if isinstance(learner, nn.Module) else learner.moving()


@contextmanager
def not_one_image(task: Task | LoadedTask, regime: Regime, images: int) -> Iterator[None]:
    """Around a loss over so many images: batch normalization that finds one value alone says so in the task's words."""
    try:
        yield
    except ValueError as error:
        if images > 1:
            raise
        raise ValueError(
            f"task '{task.name}': a batch of one image cannot be learned from ({error}). Give the task at least 2 "
            f"training images (it has {len(task.train)}) and the regime a batch_size of at least 2 (it is "
            f"{regime.batch_size})"
        ) from error


@torch.no_grad()
def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies; on a GPU most of them at once."""
    copies = {n: torch.empty_like(t) if t.dtype == torch.float32 else t.clone() for n, t in tensors.items()}
    if many := [name for name, tensor in tensors.items() if tensor.dtype == torch.float32]:
        torch._foreach_copy_([copies[name] for name in many], [tensors[name] for name in many])
    return copies


@torch.no_grad()
def restore(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Put back what was copied, or saved by another process."""
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in each.items()} for each in (tensors, saved)]
    if other := sorted({name for name, _ in kinds[0].items() ^ kinds[1].items()}):
        raise ValueError(f"the checkpoint belongs to another network: {', '.join(other[:4])} do not match")
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
