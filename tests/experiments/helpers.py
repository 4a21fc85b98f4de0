"""Small parts that the tests of experiments share; TOML names them as `tests.experiments.helpers:...`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from zeroforget.data import Scenario, Split, Task
from zeroforget.experiments.results import Results
from zeroforget.methods import Method
from zeroforget.methods.base import Overhead, TaskSpec, bits
from zeroforget.training import FitLog


def tiny_net(shape: tuple[int, int, int], *, width: int = 8) -> nn.Module:
    """A few hundred weights, with dropout so that noise must be resumed too."""
    pixels = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Dropout(0.2))


def three_digits(*, tasks: int = 3, images: int = 60) -> Scenario:
    """Pairs of scikit-learn's digits: 0 and 1, 2 and 3, ..., a few images each."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    made = []
    for first in range(0, 2 * tasks, 2):
        rows = ((y == first) | (y == first + 1)).nonzero().squeeze(1)
        parts = [Split(x[part], y[part] - first) for part in rows[: 3 * images].split(images)]
        made.append(Task(f"digits-{first}", (str(first), str(first + 1)), *parts))
    return Scenario("three", (1, 8, 8), tuple(made))


def unlearnable() -> Scenario:
    """A second task that no method can learn."""
    first, second, *_ = three_digits().tasks
    return Scenario("unlearnable", (1, 8, 8), (first, dataclasses.replace(second, classes=("2",))))


class Pulled(Method):
    """Stays near where the last task ended; keeps an anchor as a buffer, and trains in two phases."""

    tradeoff = "strength"

    def __init__(self, net: nn.Module, example: Tensor, *, strength: float = 1.0, second: bool = True) -> None:
        super().__init__(net, example)
        self.strength = strength
        self.second = second
        for index, parameter in enumerate(self.net.parameters()):
            self.register_buffer(f"anchor{index}", parameter.detach().clone())

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """Cross-entropy and a pull."""
        loss = super().loss(x, y, task)
        if task:
            pairs = zip(self.net.parameters(), self._anchors(), strict=True)
            loss = loss + self.strength * sum((p - a).square().sum() for p, a in pairs)
        return loss

    def train_task(self, task: Task, fit: object) -> FitLog:
        """Train, then train again at a tenth of the rate."""
        log: FitLog = super().train_task(task, fit)  # type: ignore[arg-type]
        if self.second:
            log.notes["second"] = fit(self, task, len(self.specs) - 1, lr=fit.regime.lr / 10).to_dict()  # type: ignore
        return log

    def end_task(self, task: Task, fit: object) -> None:
        """A new anchor."""
        with torch.no_grad():
            for parameter, anchor in zip(self.net.parameters(), self._anchors(), strict=True):
                anchor.copy_(parameter)

    def _anchors(self) -> Iterator[Tensor]:
        for index, _ in enumerate(self.net.parameters()):
            yield self.get_buffer(f"anchor{index}")

    def overhead(self) -> Overhead:
        """The anchor."""
        return Overhead(training=bits(*self._anchors()))


class Drawing(Method):
    """Notes what it draws when it is made and when it learns."""

    drawn: ClassVar[list[float]] = []

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        super().__init__(net, example)
        self.drawn.append(float(torch.rand(())))

    def end_task(self, task: Task, fit: object) -> None:
        """After training, which leaves the random state alone."""
        self.drawn.append(float(torch.rand(())))


class Picky(Method):
    """Takes shares only."""

    def __init__(self, net: nn.Module, example: Tensor, *, share: float = 1.0) -> None:
        super().__init__(net, example)
        if share > 1:
            raise ValueError(f"share is at most 1, not {share}")


class Refusing(Method):
    """Finds out late that it cannot learn."""

    def end_task(self, task: Task, fit: object) -> None:
        """Never comes to its end."""
        raise ValueError("labels are wrong")


class Misspelt(Method):
    """A mistake in somebody's own code."""

    def end_task(self, task: Task, fit: object) -> None:
        """There is no such attribute."""
        self.anchorr.zero_()  # type: ignore[operator, union-attr]


class Hasty(Method):
    """Never calls the base class's `__init__`."""

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        self.rate = 1.0


class Blind(Method):
    """Wants no example."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, torch.zeros(2, 1, 8, 8))


class Late(Method):
    """Makes a tensor where replay does not come by."""

    def end_task(self, task: Task, fit: object) -> None:
        """A buffer more."""
        self.register_buffer(f"late{len(self.specs)}", torch.zeros(3))


def classifier(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A network that wants to know more than it is told."""
    return nn.Sequential(tiny_net(shape), nn.Linear(8, classes))


def placed(*, where: str, root: Path | None) -> Scenario:
    """A scenario that must be told something."""
    return three_digits()


class Exploding(Method):
    """Diverges on the second task."""

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """Infinite from the second task on."""
        return super().loss(x, y, task) * (float("inf") if task else 1.0)


class Widening(Method):
    """Gets one extra vector a task, longer each time by `more`, so that add_task alone cannot rebuild it."""

    def __init__(self, net: nn.Module, example: Tensor, *, more: int = 1) -> None:
        super().__init__(net, example)
        self.more = more
        self.lengths: list[int] = []

    def add_task(self, spec: TaskSpec) -> None:
        """One vector more."""
        super().add_task(spec)
        self._add(len(self.specs) * self.more)

    def _add(self, length: int) -> None:
        self.lengths.append(length)
        self.register_buffer(f"extra{len(self.lengths)}", torch.full((length,), float(length)))


TOML = """
name = "short"
scenario = {{ name = "tests.experiments.helpers:three_digits", tasks = {tasks}, images = 60 }}
network = {{ name = "tests.experiments.helpers:tiny_net", width = 8 }}
seeds = [0]

[methods.finetuning]

[methods.pulled]
method = "tests.experiments.helpers:Pulled"
strength = 0.1

[regime]
epochs = {epochs}
lr = 0.1
batch_size = 16
options = {{ momentum = 0.9 }}
"""


def write_toml(folder: Path, *, tasks: int = 3, epochs: int = 3, more: str = "") -> Path:
    """A short experiment as a file."""
    path = folder / "short.toml"
    path.write_text(TOML.format(tasks=tasks, epochs=epochs) + more)
    return path


def results(
    method: str = "finetuning",
    seed: int = 0,
    accuracy: list[list[float]] | None = None,
    scenario: str = "digits/5",
) -> Results:
    """Results made by hand."""
    accuracy = accuracy or [[1.0], [0.5, 0.75]]
    count = len(accuracy)
    return Results(
        scenario=scenario,
        network="small",
        method=method,
        options={},
        regime={},
        seed=seed,
        tasks=[{"name": f"t{k + 1}", "classes": 2} for k in range(count)],
        accuracy=accuracy,
        logs=[FitLog().to_dict() for _ in range(count)],
        seconds=[1.0] * count,
        parameters=[10] * count,
        overhead=[{"training": 0, "inference": 0}] * count,
        unchanged=[True] * count,
    )
