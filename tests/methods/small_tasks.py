"""Small real tasks (scikit-learn's digits) and small networks for the tests of methods."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from zeroforget.data import Preparation, Split, Task
from zeroforget.methods import Method
from zeroforget.methods.registry import build
from zeroforget.nets.layers import initialize
from zeroforget.training import Fit, Regime, accuracy

CLASSES = ((0, 1), (2, 3, 4), (5, 6, 7, 8, 9))


@cache
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def task(classes: tuple[int, ...], each: int = 60) -> Task:
    images, labels = digits()
    rows = [torch.where(labels == c)[0] for c in classes]

    def part(start: int, stop: int) -> Split:
        index = torch.cat([r[start:stop] for r in rows])
        local = torch.cat([torch.full((stop - start,), i) for i in range(len(classes))])
        return Split(images, local, index)

    name = "digits " + " ".join(map(str, classes))
    return Task(name, tuple(map(str, classes)), part(0, each), part(120, 135), part(135, 165), Preparation())


def tasks(count: int = 3) -> list[Task]:
    return [task(c) for c in CLASSES[:count]]


def example() -> Tensor:
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def net(norm: bool = False, seed: int = 0, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    bn = (lambda n: nn.BatchNorm2d(n)) if norm else (lambda n: nn.Identity())
    layers = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        bn(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        bn(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 32),
        nn.ReLU(),
    )
    initialize(layers)
    return layers


def regime(epochs: int = 4, **changes: object) -> Regime:
    return Regime(**({"epochs": epochs, "batch_size": 32, "lr": 0.1} | changes))  # type: ignore[arg-type]


def learned(name: str, count: int = 3, *, norm: bool = False, epochs: int = 4, **options: object) -> Method:
    """A method that has learned the first so many tasks."""
    method = build(name, net(norm), example(), **options)
    fit = Fit(regime(epochs))
    for each in tasks(count):
        method.learn(each, fit)
    return method


def right(method: Method, index: int) -> float:
    it = task(CLASSES[index])
    return accuracy(method.predictor(index), it.test, it.prepare)


@torch.no_grad()
def answers(method: Method, index: int) -> Tensor:
    it = task(CLASSES[index])
    images, _ = it.test.batch(torch.arange(len(it.test)))
    return method.predictor(index)(it.prepare.test(images))


def replayed(method: Method, name: str, *, norm: bool = False, **options: object) -> Method:
    """A new method of the same structure with the old one's tensors."""
    twin = build(name, net(norm, seed=9), example(), **options)
    for spec in method.specs:
        twin.add_task(spec)
    twin.load_state_dict(method.state_dict())
    return twin
