"""The one recipe that every contestant of the transfer check is trained by, and how their answers are judged."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.data import Split, Task
from zeroforget.operators.recorded import RecordedStep
from zeroforget.training import Regime
from zeroforget.training.seeding import generator, seeded

Moving = Callable[[], dict[str, Tensor]]
Told = Callable[[int, float, float], None]
"""Hears after each epoch how many are done, the mean loss, and the seconds it took."""

WARM = 0.25
"""The share of training in which the rate rises."""
SMOOTHING = 0.1


@dataclass(frozen=True)
class Took:
    """What a training cost: all of it, preparations included, and a step once it ran."""

    seconds: float
    ms_per_step: float
    loss: float


def one_cycle(done: float) -> float:
    """The share of the highest rate: a straight rise, then half a cosine down to nothing."""
    if done < WARM:
        return done / WARM
    return 0.5 * (1 + math.cos(math.pi * (done - WARM) / (1 - WARM)))


class Training:
    """What requires gradients in a model learns a task. `moving` names all tensors that a step changes.

    Batches depend on the seed, the task and the epoch alone: all contestants see the same ones. An epoch's images are
    augmented at once and lie on the device, so that a step is the network and nothing else.
    """

    def __init__(self, model: nn.Module, moving: Moving, task: Task, regime: Regime, seed: int) -> None:
        self.model, self.moving, self.task, self.regime, self.seed = model, moving, task, regime, seed
        self.device = torch.device(regime.device)
        self.size = min(regime.batch_size, len(task.train))
        self.steps = len(task.train) // self.size  # what is left over waits for another epoch's shuffling
        if self.device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = regime.make_optimizer(parameters, regime.lr, captured=regime.can_capture())
        self.images = torch.empty(len(task.train), *_shape(task), device=self.device)
        self.labels = task.train.labels.to(self.device)

    def step(self, rows: Tensor) -> Tensor:
        """A step on the images at these places; its loss."""
        x, y = self.images[rows], self.labels[rows]
        if self.device.type == "cuda":
            x = x.contiguous(memory_format=torch.channels_last)
        with self.regime.autocast():
            loss = F.cross_entropy(self.model(x), y, label_smoothing=SMOOTHING)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, told: Told) -> float:
        """All epochs; the last one's mean loss."""
        self.model.train()
        act: Callable[[Tensor], Tensor] = self.step
        mean = math.nan
        with self.regime.arithmetic():
            for epoch in range(self.regime.epochs):
                start = time.perf_counter()
                self._augment(epoch)
                if epoch == 0 and self.regime.can_capture():
                    _set_rate(self.optimizer, 0.0)
                    act = RecordedStep(self.step, self.size, self.moving(), self.optimizer, self.model.modules())
                mean = self._epoch(epoch, act)
                told(epoch + 1, mean, time.perf_counter() - start)
        return mean

    def _epoch(self, epoch: int, act: Callable[[Tensor], Tensor]) -> float:
        order = torch.randperm(len(self.images), generator=generator("order", self.seed, self.task.name, epoch))
        total = torch.zeros((), device=self.device)
        for number, rows in enumerate(order.to(self.device)[: self.steps * self.size].split(self.size)):
            done = (epoch + number / self.steps) / self.regime.epochs
            _set_rate(self.optimizer, self.regime.lr * one_cycle(done))
            total += act(rows)
        return float(total) / self.steps  # waits for the device

    def _augment(self, epoch: int) -> None:
        with seeded("augment", self.seed, self.task.name, epoch):
            for index in torch.arange(len(self.images), device=self.task.train.labels.device).split(8192):
                raw, _ = self.task.train.batch(index)
                self.images[int(index[0]) : int(index[-1]) + 1] = self.task.prepare.train(raw.to(self.device))


def train(
    model: nn.Module, moving: Moving, task: Task, regime: Regime, seed: int, told: Told = lambda *_: None
) -> Took:
    """Train, and take the time."""
    began, times = time.perf_counter(), []

    def note(epoch: int, loss: float, seconds: float) -> None:
        times.append(seconds)
        told(epoch, loss, seconds)

    training = Training(model, moving, task, regime, seed)
    loss = training.run(note)
    ms = 1000 * statistics.median(times) / training.steps
    return Took(time.perf_counter() - began, ms, loss)


def _shape(task: Task) -> tuple[int, ...]:
    return tuple(task.prepare.test(task.train.batch(torch.arange(1, device=task.train.labels.device))[0]).shape[1:])


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@contextmanager
def exact() -> Iterator[None]:
    """Answers that can be compared bit for bit: full precision, algorithms that do not depend on a trial run."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = False, False, False, True
    try:
        with torch.no_grad():
            yield
    finally:
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def resident(task: Task, device: str) -> Task:
    """The task with its own images on the device."""

    def moved(split: Split) -> Split:
        images, labels = split.batch(torch.arange(len(split), device=split.labels.device))
        return Split(images.to(device), labels.to(device))

    return replace(task, train=moved(task.train), val=moved(task.val), test=moved(task.test))


def fewer(task: Task, classes: int, images: int) -> Task:
    """A part of a task: its first classes, and at most so many images of each in every split."""

    def some(split: Split) -> Split:
        index = torch.cat([(split.labels == label).nonzero().squeeze(1)[:images] for label in range(classes)])
        return Split(*split.batch(index))

    return replace(
        task, classes=task.classes[:classes], train=some(task.train), val=some(task.val), test=some(task.test)
    )
