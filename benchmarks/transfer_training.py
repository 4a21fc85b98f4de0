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
from zeroforget.training import Regime
from zeroforget.training.graphs import CapturedStep
from zeroforget.training.seeding import generator, seeded

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


def train(model: nn.Module, moving: Callable[[], dict[str, Tensor]], task: Task, regime: Regime, seed: int) -> Took:
    """Train what requires gradients. Batches depend on the seed, the task and the epoch alone: all see the same ones.

    An epoch's images are augmented at once and lie on the device, so that a step is the network and nothing else.
    """
    began, times = time.perf_counter(), []
    device, size = torch.device(regime.device), min(regime.batch_size, len(task.train))
    steps = len(task.train) // size
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = regime.make_optimizer(parameters, regime.lr, captured=regime.can_capture())
    images = torch.empty(len(task.train), *_shape(task), device=device)
    labels = task.train.labels.to(device)

    def step(rows: Tensor) -> Tensor:
        x, y = images[rows], labels[rows]
        if device.type == "cuda":
            x = x.contiguous(memory_format=torch.channels_last)
        with regime.autocast():
            loss = F.cross_entropy(model(x), y, label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    act = step
    mean = math.nan
    with regime.arithmetic():
        for epoch in range(regime.epochs):
            start = time.perf_counter()
            _augment(task, images, seed, epoch)
            if epoch == 0 and regime.can_capture():
                _set_rate(optimizer, 0.0)
                act = CapturedStep(step, size, moving(), optimizer)
            order = torch.randperm(len(images), generator=generator("order", seed, task.name, epoch)).to(device)
            total = torch.zeros((), device=device)
            for number, rows in enumerate(order[: steps * size].split(size)):
                _set_rate(optimizer, regime.lr * one_cycle((epoch + number / steps) / regime.epochs))
                total += act(rows)
            mean = float(total) / steps  # waits for the device
            times.append(time.perf_counter() - start)
    ms = 1000 * statistics.median(times) / steps
    return Took(time.perf_counter() - began, ms, mean)


def _shape(task: Task) -> tuple[int, ...]:
    return tuple(task.prepare.test(task.train.batch(torch.arange(1))[0]).shape[1:])


def _augment(task: Task, images: Tensor, seed: int, epoch: int) -> None:
    with seeded("augment", seed, task.name, epoch):
        for index in torch.arange(len(images)).split(8192):
            raw, _ = task.train.batch(index)
            images[int(index[0]) : int(index[-1]) + 1] = task.prepare.train(raw.to(images.device))


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
        images, labels = split.batch(torch.arange(len(split)))
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
