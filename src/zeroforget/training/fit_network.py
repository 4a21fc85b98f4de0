"""A task for a growing network from anybody's batches: `net.fit(train, val, task="birds", classes=["robin", "wren"])`.

The network is trained by the same loop as everything else: only what is newborn, and back to what it was if anything
ends it early.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.files import atomic
from zeroforget.files.paths import NotRegular, as_path, read_regular
from zeroforget.files.text import nearest
from zeroforget.growing.growth import as_classes
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.rank_births import Rank
from zeroforget.growing.transaction import as_it_was
from zeroforget.processes import current
from zeroforget.progress import Epoch, Show, showing
from zeroforget.training.evaluate import Predictor
from zeroforget.training.feed import Loaded, LoadedTask
from zeroforget.training.fit import Fit
from zeroforget.training.log import FitLog
from zeroforget.training.regime import Regime
from zeroforget.training.seeding import seeded
from zeroforget.training.step import partner

GROWTH = 0.1
"""What a later task adds, as far as there is room."""
REGIME = Regime(optimizer="adamw", lr=1e-3, epochs=60, patience=4)
LOWEST = 1 / 20
"""Training stops when the rate is below this share of the first one."""
AIM = 256
"""So many inputs show a rank birth where to start."""
PLAN = "fit.json"
Score = Callable[[Any, Any], Tensor]


def fit(
    net: GrowingNetwork,
    train: Iterable[Any],
    val: Iterable[Any],
    *,
    task: str,
    classes: int | Sequence[str] | None = None,
    growth: float | Mapping[str, float] | None = None,
    rank: Rank | None = None,
    loss: Score | None = None,
    score: Score | None = None,
    labels: str = "labels",
    regime: Regime | None = None,
    optimizer: str | Callable[[list[nn.Parameter], float], torch.optim.Optimizer] | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: Show = None,
    callbacks: Sequence[Callable[[Epoch], object]] = (),
    **changes: Any,
) -> FitLog:
    """Teach a growing network a task from batches; also `net.fit(train, val, ...)`. Older tasks do not move by one bit.

    The network ends with the weights of the best validation loss, in eval mode. Whatever stops it early, Ctrl-C too,
    leaves it as it was, without the task.

    Args:
        train, val: DataLoaders, or iterables to be gone through again. A batch is (inputs, targets), several inputs and
            then targets, or a dictionary with the targets under `labels`.
        task: a new task, or the newest one, which then learns on. Finished ones never change.
        classes: the names of a new task's classes, or how many there are. One output, for regression, has a name too.
        growth, rank: what a new task adds, as for `add_task`; by default a growth of 0.1, as far as there is room.
        loss: of outputs and targets, one number to make smaller; by default cross-entropy with whole numbers.
        score: of the same, a number an example, recorded as accuracy. By default whether the class is right, or with a
            loss for several labels the share of right ones.
        regime: how to train; by default AdamW at 0.001, divided by 3 after 4 epochs without a better loss.
        changes: parts of the regime alone: `epochs=10`, `lr=0.01`, `precision="bf16"` (mixed precision), `clip=1.0`.
        optimizer: a name in torch.optim, or a function of parameters and rate that makes one.
        device, seed: where to train (by default where it is), and what decides all that is random.
        folder: keeps a checkpoint of each epoch; the same call goes on from there, with the same bits at the end.
        progress: True, False or a function; by default a terminal and a notebook show it.
        callbacks: hear of each epoch; one that returns True ends training.

    Example:
        >>> import torch, zeroforget
        >>> x, batches = torch.randn(32, 8), list(zip(torch.randn(4, 8, 8), torch.arange(32).view(4, 8) % 2))
        >>> net = zeroforget.grow(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()), x[:2], start=0.5)
        >>> len(net.fit(batches, batches, task="birds", classes=["robin", "wren"], epochs=2).epochs)
        2
    """
    chosen = _regime(regime, optimizer, changes, _batch_size(train))
    begin = _beginning(net, task, classes, growth, rank)
    learner = NetworkLearner(net, loss, score, chosen, begin.outputs if begin else net.history[-1].classes)
    given = LoadedTask(task, Loaded(train, "train", labels, learner.check), Loaded(val, "val", labels, learner.check))
    own = None if folder is None else as_path(folder, ValueError)
    made = optimizer if callable(optimizer) else None
    with showing(progress) as told:
        run = Fit(chosen, seed, told, own, optimizer=made, after_epoch=_heard(callbacks))
        return _learn(learner, given, begin, run, device)


@dataclass(frozen=True)
class Beginning:
    """What a new task is to bring."""

    classes: int | Sequence[str]
    growth: float | Mapping[str, float] | None
    rank: Rank | None

    @property
    def outputs(self) -> int:
        """How many classes it has."""
        return as_classes(self.classes)[0]


def _learn(
    learner: NetworkLearner, task: LoadedTask, begin: Beginning | None, run: Fit, device: str | torch.device | None
) -> FitLog:
    """Begin the task if it is new, and train it; a new one is gone again if anything ends this early."""
    task.check()
    net = learner.net
    if device is not None:
        net.to(device)
    where = next((p.device for p in net.parameters()), torch.device("cpu"))
    run = replace(run, regime=replace(run.regime, device=str(where)))
    with as_it_was(net) if begin else nullcontext():
        if begin:
            if run.folder is not None:
                plan, folder = _plan(net, task, begin, run), run.folder
                current().by_first(lambda: _keep_to(plan, folder))
            _begin(net, task, begin, run.seed, where)
        log = run(learner, task, len(net.history) - 1)
    net.eval()
    return log


def _regime(regime: Regime | None, optimizer: Any, changes: Mapping[str, Any], batch: int | None) -> Regime:
    known = set(Regime.__dataclass_fields__) - {"device", "batch_size", "optimizer"}
    if unknown := [key for key in changes if key not in known]:
        raise ValueError(f"fit has no option '{unknown[0]}'{nearest(unknown[0], sorted(known))}")
    if isinstance(optimizer, str):
        changes = {**changes, "optimizer": optimizer}
    made = replace(regime or REGIME, **changes)
    if regime is None and "min_lr" not in changes:
        made = replace(made, min_lr=made.lr * LOWEST)
    return made if batch is None else replace(made, batch_size=batch)


def _batch_size(loader: Any) -> int | None:
    found = getattr(loader, "batch_size", None)
    return found if isinstance(found, int) and found > 0 else None


def _beginning(net: GrowingNetwork, task: str, classes: Any, growth: Any, rank: Any) -> Beginning | None:
    """What a new task is to bring; None for the newest one."""
    if task not in net.tasks:
        if classes is None:
            raise ValueError(f"'{task}' is a new task: name its classes, such as classes=['robin', 'wren']")
        return Beginning(classes, growth, rank)
    next(iter(net.newborn(task)))  # says why, if it is finished
    record = net.history[-1]
    count, names = (record.classes, record.names) if classes is None else as_classes(classes)
    if count != record.classes or (names and record.names and names != record.names):
        raise ValueError(f"task '{task}' is there already, with other classes; leave out classes, or name a new task")
    return None


def _begin(net: GrowingNetwork, task: LoadedTask, begin: Beginning, seed: int, device: torch.device) -> None:
    """Begin the task, with draws that follow from the seed."""
    wanted = begin.growth
    if begin.growth is None and net.history:
        wanted = min(GROWTH, max(0.0, net.left()))
    leans = bool(net.history and (net.rank if begin.rank is None else begin.rank))
    images = task.train.inputs(AIM) if leans else None
    with seeded("task", seed, len(net.history)):
        net.add_task(
            task.name,
            begin.classes,
            wanted,
            begin.rank,
            images=None if images is None else images.to(device),
            quiet=begin.growth is None,
        )


def _heard(callbacks: Sequence[Callable[[Epoch], object]]) -> Callable[[Epoch], bool] | None:
    """All of them as one, each of which hears of every epoch."""

    def heard(epoch: Epoch) -> bool:
        said = [each(epoch) for each in callbacks]
        return any(one is True for one in said)

    return heard if callbacks else None


def _plan(net: GrowingNetwork, task: LoadedTask, begin: Beginning, run: Fit) -> dict[str, Any]:
    """What a training must share with the one whose checkpoints it goes on from."""
    course = {key: value for key, value in asdict(run.regime).items() if key not in {"epochs", "device"}}
    count, names = as_classes(begin.classes)
    return {
        "task": task.name,
        "classes": list(names) or count,
        "growth": str(begin.growth),
        "rank": str(begin.rank),
        "seed": run.seed,
        "before": net.fingerprint(len(net.history) - 1) if net.history else "",
        **course,
    }


def _keep_to(plan: dict[str, Any], folder: Path) -> None:
    """The folder's training is this one, or there is none yet."""
    file = folder / PLAN
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_new(file, json.dumps(plan).encode())
        return
    try:
        begun = json.loads(read_regular(file))
        differs = [key for key, value in plan.items() if begun[key] != value]
    except (ValueError, TypeError, KeyError, NotRegular) as error:
        raise ValueError(f"{file} is damaged ({error}); remove {folder} to start over") from error
    if differs:
        what = "the tasks before it are others" if differs == ["before"] else f"{differs[0]} was {begun[differs[0]]!r}"
        raise ValueError(f"{folder} holds another training: {what}. Name a folder of its own, or remove this one")


class NetworkLearner:
    """The newest task of a growing network, as the loop trains it."""

    graph_safe: ClassVar[bool] = False

    def __init__(
        self, net: GrowingNetwork, loss: Score | None, score: Score | None, regime: Regime, outputs: int
    ) -> None:
        if loss is None and outputs < 2:
            raise ValueError("one output has nothing to choose from: give a loss, such as torch.nn.MSELoss()")
        if loss is not None and (regime.label_smoothing or regime.cutmix or regime.mixup):
            raise ValueError("label_smoothing, cutmix and mixup change labels, which only the default loss knows")
        if regime.keep == "accurate" and loss is not None and score is None and not _many_labels(loss):
            raise ValueError("keep='accurate' needs a score of each example: pass score, or keep='best'")
        self.net, self._loss, self._score, self._outputs = net, loss, score, outputs
        self.smoothing = 0.0
        self.share: Tensor | None = None
        self.coupled = True
        self.step_rate = 0.0

    def trainable(self) -> Iterable[nn.Parameter]:
        """What is born with the newest task."""
        return self.net.newborn()

    def moving(self) -> dict[str, Tensor]:
        """All tensors that training may change."""
        return self.net.moving()

    def train(self, mode: bool = True) -> NetworkLearner:
        """Training mode or not."""
        self.net.train(mode)
        return self

    def modules(self) -> Iterator[nn.Module]:
        """All of the network's."""
        return self.net.modules()

    def before_step(self, done: float) -> None:
        """Nothing."""

    def after_backward(self) -> None:
        """Nothing."""

    def after_step(self) -> None:
        """Nothing."""

    def predictor(self, task: int) -> Predictor:
        """The task's own dense network."""
        return self.net.dense(task)

    def check(self, targets: Any) -> None:
        """ValueError for targets that the default loss cannot take."""
        if self._loss is not None:
            return
        own = "or give a loss of your own"
        if not isinstance(targets, Tensor):
            raise ValueError(f"targets are one tensor, not {type(targets).__name__}; {own}")
        if targets.is_floating_point() and targets.dim() == 2 and targets.shape[1] == self._outputs:
            return  # probabilities
        if targets.is_floating_point() or targets.is_complex() or targets.dim() != 1:
            kind = f"{targets.dtype} of shape {tuple(targets.shape)}"
            raise ValueError(f"targets are a whole number for each example, the place of its class, not {kind}; {own}")
        if targets.device.type == "cpu" and len(targets):
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= self._outputs:
                raise ValueError(
                    f"targets run from {low} to {high}, but the {self._outputs} classes are 0 to {self._outputs - 1}"
                )

    def loss(self, x: Any, y: Any, task: int) -> Tensor:
        """What a step makes smaller."""
        out = self.net(x, task=task)
        if self._loss is not None:
            return self._loss(out, y)
        if self.share is None:
            return self._each(out, y).mean()
        return torch.lerp(self._each(out, partner(y)), self._each(out, y), self.share).mean()

    def _each(self, out: Tensor, y: Tensor) -> Tensor:
        wanted = y if y.is_floating_point() else y.long()
        return F.cross_entropy(out, wanted, reduction="none", label_smoothing=self.smoothing)

    def score(self, predictor: Predictor, x: Any, y: Any, task: int) -> tuple[Tensor, Tensor]:
        """The loss of each example, and what it is worth."""
        out = predictor(x)
        if self._loss is None:
            wanted = y if y.is_floating_point() else y.long()
            losses = F.cross_entropy(out, wanted, reduction="none")
        else:
            losses = self._loss(out, y).reshape(-1)
            losses = losses.expand(len(out)) if losses.numel() == 1 else losses
        return losses, self._worth(out, y)

    def _worth(self, out: Tensor, y: Any) -> Tensor:
        if self._score is not None:
            found = torch.as_tensor(self._score(out, y)).reshape(-1)
            return found.expand(len(out)) if found.numel() == 1 else found
        if self._loss is None:
            right: Tensor = out.argmax(1) == (y.argmax(1) if y.dim() == 2 else y)
            return right
        if _many_labels(self._loss):
            shares: Tensor = ((out > 0) == (y > 0.5)).flatten(1).double().mean(1)
            return shares
        return torch.full((len(out),), math.nan, device=out.device)


def _many_labels(loss: Score) -> bool:
    return isinstance(loss, (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)) or loss in (
        F.binary_cross_entropy_with_logits,
        F.multilabel_soft_margin_loss,
    )


__all__ = ["fit"]
