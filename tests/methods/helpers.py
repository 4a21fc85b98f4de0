"""Small real tasks, small networks, and the way every method is taken through them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, overload

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from zeroforget.data import Preparation, Split, Task
from zeroforget.methods import Method
from zeroforget.methods.registry import build
from zeroforget.training import Fit, FitLog, Progress, Regime, accuracy, logits
from zeroforget.training.seeding import seeded

REGIME = Regime(lr=0.05, epochs=10, batch_size=16, patience=4, clip=2.0)
PREPARE = Preparation(mean=(0.3,), std=(0.4,))
EXAMPLE = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@cache
def tasks(groups: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3, 4), (5, 6, 9), (7, 8)), each: int = 80) -> list[Task]:
    """Handwritten digits in tasks of unequal size: `each` images of a class to learn, 15 to choose, 30 to judge by."""
    data = load_digits()
    images = torch.from_numpy(data.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(data.target).long()
    return [_task(f"digits-{'-'.join(map(str, group))}", group, images, labels, each) for group in groups]


def _task(name: str, group: Sequence[int], images: Tensor, labels: Tensor, each: int) -> Task:
    parts: list[list[Tensor]] = [[], [], []]
    for digit in group:
        rows = (labels == digit).nonzero().squeeze(1)
        for part, chosen in zip(parts, rows[: each + 45].split([each, 15, 30]), strict=True):
            part.append(chosen)
    local = {digit: i for i, digit in enumerate(group)}
    splits = [Split(images, torch.tensor([local[int(labels[r])] for r in torch.cat(p)]), torch.cat(p)) for p in parts]
    return Task(name, tuple(map(str, group)), *splits, prepare=PREPARE)


def normed_net(seed: int = 0) -> nn.Module:
    """A convolution, BatchNorm, ReLU, pooling, dropout and two linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 32),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(32, 32),
        nn.ReLU(),
    )


def plain_net(seed: int = 0, width: int = 16) -> nn.Module:
    """Two linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


class Centred(nn.Module):
    """Subtracts a running mean of its own, counted in a buffer; another buffer is not saved with the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """In training the buffers move with every batch."""
        mean, batches, scale = self.get_buffer("mean"), self.get_buffer("batches"), self.get_buffer("scale")
        if self.training:
            mean.lerp_(x.detach().mean(0), 0.1)
            batches.add_(1)
            scale.fill_(1 + 1 / batches)
        return (x - mean) * scale


def centred_net(seed: int = 0) -> nn.Module:
    """Linear layers with buffers in between that training moves, and no normalization layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Centred(), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())


def make(name: str, net: Callable[[], nn.Module] = normed_net, **options: Any) -> Method:
    """A method over a fresh network."""
    return build(name, net(), EXAMPLE, **options)


class Forbidden(Sequence[Task]):
    """Past tasks that nobody may look at."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        raise AssertionError("a method that does not declare uses_past_data asked for the past")

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        raise AssertionError("a method that does not declare uses_past_data touched the past")

    def __iter__(self) -> Iterator[Task]:
        raise AssertionError("a method that does not declare uses_past_data walked through the past")


def learn(method: Method, task: Task, past: Sequence[Task] = (), *, regime: Regime = REGIME, **fit: Any) -> FitLog:
    """One more task, everything random drawn from the seed and the task's place."""
    with seeded("structure", 0, len(method.specs)):
        return method.learn(task, Fit(regime, **fit), past if method.uses_past_data else Forbidden(len(past)))


def answers(method: Method, index: int, task: Task) -> Tensor:
    """The logits of the test images, the way they are served."""
    return logits(method.predictor(index), task.test, task.prepare)


def score(method: Method, index: int, task: Task) -> float:
    """Test accuracy."""
    return accuracy(method.predictor(index), task.test, task.prepare)


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state that later training cannot change."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@dataclass
class Run:
    """A method that went through all tasks: its state, its structure and all logits after each."""

    method: Method
    states: list[dict[str, Tensor]] = field(default_factory=list)
    structures: list[list[dict[str, Any]]] = field(default_factory=list)
    logits: list[list[Tensor]] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    """The accuracy on each task right after learning it."""


@cache
def run(name: str) -> Run:
    """The common run that several tests look at."""
    result = Run(make(name))
    sequence = tasks()
    for k, task in enumerate(sequence):
        learn(result.method, task, sequence[:k])
        result.states.append(copied(dict(result.method.state_dict())))
        result.structures.append(json.loads(json.dumps(result.method.structure())))
        result.logits.append([answers(result.method, j, sequence[j]) for j in range(k + 1)])
        result.fresh.append(score(result.method, k, task))
    return result


def replayed(name: str, after: int, state: dict[str, Tensor], seed: int = 0) -> Method:
    """A fresh method brought to where another one stood after a task: structure replayed, tensors loaded."""
    method = make(name, lambda: normed_net(seed))
    method.replay(run(name).structures[after])
    method.load_state_dict(state)
    return method


class Interrupted(Exception):
    """Somebody pulled the plug."""


def learn_interrupted(method: Method, task: Task, past: Sequence[Task], folder: Path) -> None:
    """Learn until the second epoch is half done."""

    def pull(progress: Progress) -> None:
        if progress.epoch == 1 and progress.step > 1:
            raise Interrupted

    try:
        learn(method, task, past, folder=folder, progress=pull)
    except Interrupted:
        return
    raise AssertionError("training was never interrupted")
