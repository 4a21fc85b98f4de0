"""The one training loop: batches, loss, step, validation, decision, checkpoint.

`Fit` trains a learner, or several that race; `_Training` is one learner's training, an epoch at a time. What becomes of
a batch is `_Training.step`. What a method may change is called by name, where it happens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.operators.recorded import RecordedStep, backward, ways
from zeroforget.processes import Processes, current
from zeroforget.progress import Epoch, Progress
from zeroforget.training.checkpoint import PAUSE, Later, PhaseFile, restore_optimizer
from zeroforget.training.clip import clip
from zeroforget.training.feed import Feed, feeds
from zeroforget.training.learner import (
    Diverged,
    Learner,
    check_loss,
    check_shared,
    copied,
    diverged,
    not_one_image,
    other_processes,
    restore,
    state_of,
)
from zeroforget.training.loaded import LoadedTask, moved
from zeroforget.training.log import UNFINISHED, FitLog, Reporter
from zeroforget.training.mixing import mix
from zeroforget.training.phases import Phases
from zeroforget.training.regime import Regime
from zeroforget.training.seeding import generator, seeded

_VALIDATED = 256
"""So many images are validated at a time."""

Turns = Callable[[list[FitLog]], Iterable[int]]
"""Of learners that race: given their logs so far, the positions of those that train an epoch next."""


@dataclass
class Fit:
    """Trains a method on a task under one regime: `fit(method, task, index)`.

    Everything random follows from `seed`. With a `folder`, each epoch leaves a checkpoint there. A second run of the
    same calls, or a second try with the same `Fit` after an interruption, goes on from the last finished one.
    `progress` hears of each epoch and, in between, of steps, `pause` seconds apart. `save_every` so many seconds a
    checkpoint is written beside training (None: after every epoch on a CPU, every 20 seconds on a GPU). `optimizer`
    makes another one than the regime's out of parameters and learning rate. `after_epoch` hears of each epoch that is
    trained, and ends training when it returns True.

    Where torch.distributed has joined several processes, each calls the same and learns from its part of every batch.

    Example:
        >>> import torch, zeroforget
        >>> x, y = torch.randn(64, 3, 8, 8), torch.arange(64) % 2
        >>> part = zeroforget.Split(x, y)
        >>> task = zeroforget.Task("signs", ("stop", "go"), train=part, val=part, test=part)
        >>> body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.ReLU())
        >>> method = zeroforget.Method(body, x)
        >>> fit = zeroforget.Fit(zeroforget.Regime(epochs=2), seed=0)
        >>> log = method.learn(task, fit)
        >>> len(log.epochs)
        2
    """

    regime: Regime = field(default_factory=Regime)
    seed: int = 0
    progress: Callable[[Progress], None] | None = None
    folder: Path | None = None
    pause: float = 0.0
    save_every: float | None = None
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer] | None = None
    after_epoch: Callable[[Epoch], object] | None = None
    _phases: Phases = field(default_factory=Phases, repr=False, compare=False)
    _later: Later = field(default_factory=Later, init=False, repr=False, compare=False)

    def __call__(self, learner: Learner, task: Task | LoadedTask, index: int, **changes: Any) -> FitLog:
        """Train; `changes` override parts of the regime for this call only, such as lr=0.005."""
        return self.race([learner], task, index, **changes)[0]

    def race(
        self,
        learners: Sequence[Learner],
        task: Task | LoadedTask,
        index: int,
        turns: Turns | None = None,
        **changes: Any,
    ) -> list[FitLog]:
        """Train several, an epoch at a time: all of them, or those whose turn it is, until it is nobody's.

        `turns` sees what a run that was never interrupted would show it, so a resumed race takes the same course.
        """
        task.check()
        regime = replace(self.regime, **changes)
        processes = current()
        check_shared(task, regime, processes)
        images = feeds(task.parts, (regime.batch_size, _VALIDATED), torch.device(regime.device), processes)
        numbers, trainings = self._phases.take(learners, index), list[_Training]()
        try:
            shared = *images, len(learners), processes
            for learner, phase in zip(learners, numbers, strict=True):
                trainings.append(_Training(self, regime, learner, task, index, phase, *shared))
            for training in trainings:
                training.begin()
            done = [0] * len(trainings)
            while True:
                logs = [each.log.until(count, regime.keep) for each, count in zip(trainings, done, strict=True)]
                going = [i for i in (turns(logs) if turns else range(len(logs))) if not logs[i].stopped]
                if not going:
                    break
                for i in going:
                    done[i] += 1
                    if len(trainings[i].log.epochs) < done[i]:  # after an interruption there may be more
                        trainings[i].epoch()
            self._later.wait()
            return [training.finish() for training in trainings]
        except BaseException as error:  # Ctrl-C included: nobody is left with half-trained weights
            if isinstance(error, Diverged):
                self._phases.forget(index)
            else:
                self._phases.give_back(numbers, index)
            for training in trainings:
                training.undo()
            raise
        finally:
            with suppress(Exception):  # where it matters it was raised above
                self._later.wait()


@dataclass
class _Training:
    """One learner's, of one phase of a task."""

    fit: Fit
    regime: Regime
    learner: Learner
    task: Task | LoadedTask
    index: int
    phase: int
    training: Feed
    validation: Feed
    abreast: int
    processes: Processes

    def __post_init__(self) -> None:
        fit, self.device = self.fit, torch.device(self.regime.device)
        self.on_cpu = self.device.type == "cpu"
        pause = fit.save_every if self.on_cpu or fit.save_every is not None else PAUSE
        place = self.phase, self.index, fit._later, pause
        self.file = None if fit.folder is None else PhaseFile(fit.folder, *place)
        self.sizes = self.training.sizes(self.regime.batch_size, self.processes)
        where = self.task.name, self.index, self.phase, 0, self.regime.epochs, 0, len(self.sizes), self.regime.lr
        self.report = Reporter(fit.progress, fit.pause, Progress(*where, None, self.abreast))
        self.log, self.lr, self.best_loss, self.waited = FitLog(), self.regime.lr, math.inf, 0
        self.losses = torch.zeros(1, dtype=torch.float64, device=self.device)  # of this epoch's images, added up
        self.order: Tensor | None = None  # the next epoch's, if it is there already
        self.recorded: dict[object, RecordedStep] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.start: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Make the optimizer, and go to where an interrupted run stopped."""
        learner, regime = self.learner, self.regime
        if not self.on_cpu and isinstance(learner, nn.Module):
            learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = [p for p in learner.trainable() if p.requires_grad]
        alone = self.processes.alone  # what processes tell each other is not recorded
        safe = learner.graph_safe and self.fit.optimizer is None and alone
        self.records = regime.can_capture() and safe and bool(self.parameters)
        if self.parameters:
            self.optimizer = self._make_optimizer()
        learner.smoothing, learner.share, learner.coupled = regime.label_smoothing, None, regime.couples
        self.best = self.start = copied(learner.moving())
        advice = "Build the network with the same seed, or from the same file, in every process"
        self.processes.check_same(state_of(learner), f"task '{self.task.name}' was to be learned", advice)
        self._resume()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        if self.fit.optimizer is None:
            return self.regime.make_optimizer(self.parameters, self.lr, captured=self.records)
        made = self.fit.optimizer(list(self.parameters), self.lr)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"optimizer must make a torch.optim.Optimizer of parameters and rate, not {made!r}")
        return made

    def epoch(self) -> None:
        """Train on every image once, validate, decide, write a checkpoint."""
        number, began = len(self.log.epochs), time.perf_counter()
        noise = "noise", self.fit.seed, self.index, self.phase, number, *self.processes.key
        with seeded(*noise), self.regime.arithmetic():
            self.train(number)
        if not self.processes.alone:
            self.processes.average(self._statistics())
        outcome = torch.cat([self.losses / self.seen, self.validate()])
        # A GPU is still at work. Meanwhile: the weights, should they be the best, and the order of the next epoch.
        weights, self.order = copied(self.learner.moving()), self._order(number + 1)
        loss, val_loss, val_accuracy = outcome.tolist()
        self._check(loss, number, len(self.sizes))
        val_loss = math.inf if math.isnan(val_loss) else val_loss
        seconds = time.perf_counter() - began
        self.decide(Epoch(number, self.lr, loss, val_loss, val_accuracy, seconds), weights)
        self.report(number, len(self.sizes), self.lr, self.log)
        self._save()

    def train(self, number: int) -> None:
        """One pass over the training data, step by step."""
        order = self._order(number) if self.order is None else self.order
        # On a GPU augmentation draws there, from the seed of the epoch's noise.
        seed = "augment", self.fit.seed, self.index, number, *self.processes.key
        self.draws = generator(*seed) if self.on_cpu else None
        self.mixes, steps, sizes = self.regime.mixes(number), len(self.sizes), self.processes.sizes(self.sizes)
        self.losses.zero_()
        self.seen = 0
        self.learner.train()
        way = (self.mixes, ways(self.learner.modules())) if self.records else None
        with closing(self.training.batches(order, sizes)) as batches:
            for step, rows in enumerate(batches):
                self.together = self.sizes[step] or int(self.processes.sum(torch.tensor(len(rows), device=self.device)))
                self.seen += self.together
                if len(rows) != sizes[0]:  # one step an epoch: trying algorithms for its size costs more
                    torch.backends.cudnn.benchmark = False
                if self.regime.schedule == "cosine":
                    self.lr = self.regime.cosine(number + step / steps, 1 / steps)
                    self.regime.set_rate(self.optimizer, self.lr)
                self.learner.before_step(step / steps)
                loss = self._recorded(len(rows), way)(rows) if self.records else self.step(rows)
                if self.on_cpu:
                    self._check(float(loss), number, step + 1)
                self.report(number, step + 1, self.lr, self.log)

    def step(self, rows: Tensor) -> Tensor:
        """One step on the images in these rows; returns the loss."""
        images, y = self.training.window.batch(rows)
        x = self.task.prepare.train(moved(images, self.device), self.draws)
        if not self.on_cpu and isinstance(x, Tensor) and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if self.mixes:
            x, self.learner.share = mix(x, self.regime.cutmix, self.regime.mixup, self.draws)
        with self.regime.autocast(), not_one_image(self.task, self.regime, len(rows)):
            loss = self.learner.loss(x, moved(y, self.device), self.index)
        self.learner.share = None
        if self.optimizer is not None:
            check_loss(self.learner, loss)
            self.optimizer.zero_grad()
            backward(loss)
        loss = loss.detach().reshape(())
        loss = self.processes.mean_gradients(self.parameters, loss, len(rows) / self.together)
        if self.optimizer is not None:
            self.learner.after_backward()
            if self.regime.clip is not None:
                clip(self.optimizer, self.parameters, self.regime.clip)
            self.optimizer.step()
            self.learner.after_step()
        self.losses.add_(loss, alpha=self.together)
        return loss

    def _recorded(self, size: int, way: object) -> RecordedStep:
        """The step as a GPU replays it, for batches of this size; what it draws starts from the epoch's seed."""
        if (size, way) not in self.recorded:
            assert self.optimizer is not None
            self.fit._later.wait()  # nobody else may use the GPU while a step is recorded
            state = self.learner.moving() | {"(the epoch's losses)": self.losses}
            self.recorded[size, way] = RecordedStep(self.step, size, state, self.optimizer, self.learner.modules())
        return self.recorded[size, way]

    @torch.no_grad()
    def validate(self) -> Tensor:
        """Mean loss and accuracy on the validation data, still on the device."""
        self.learner.train(False)
        predictor = self.learner.predictor(self.index)
        total, seen = torch.zeros(3, device=self.device, dtype=torch.float64), 0
        with closing(self.validation.batches(self.validation.in_order(self.processes), _VALIDATED)) as batches:
            for rows in batches:
                images, y = self.validation.window.batch(rows)
                x, y = self.task.prepare.test(moved(images, self.device)), moved(y, self.device)
                with self.regime.autocast():
                    losses, correct = self.learner.score(predictor, x, y, self.index)
                total[:2] += torch.stack([losses.double().sum(), correct.double().sum()])
                seen += len(rows)
        total[2] = seen
        total = self.processes.sum(total)
        return total[:2] / total[2]

    def decide(self, epoch: Epoch, weights: dict[str, Tensor]) -> None:
        """Whether these weights are to be kept, whether training is over, and at which rate it goes on."""
        self.waited = 0 if epoch.val_loss < self.best_loss else self.waited + 1
        self.best_loss = min(self.best_loss, epoch.val_loss)
        if self.log.add(epoch, self.regime.keep):
            self.best = weights
        if self.fit.after_epoch is not None and self.fit.after_epoch(epoch) is True:
            self.log.stopped = "a callback ended it"
        plateau = self.regime.schedule == "patience" and self.waited >= self.regime.patience
        lr = self.lr / self.regime.decay if plateau else self.lr
        if plateau and lr < self.regime.min_lr:
            self.log.stopped = "learning rate below its bound"
        elif epoch.epoch + 1 >= self.regime.epochs:
            self.log.stopped = "all epochs done"
        if self.log.stopped and self.regime.keep == "last":
            self._check(epoch.val_loss, epoch.epoch, len(self.sizes), "the validation loss")
            for ruined in (p.detach()[~p.isfinite()] for p in self.parameters):
                self._check(float(ruined[0]) if len(ruined) else 0.0, epoch.epoch, len(self.sizes), "a weight")
        if plateau:
            self.waited = 0
            if self.regime.rewind:
                restore(self.learner.moving(), self.best)
                if self.optimizer is not None and any(self.optimizer.state.values()):  # of steps not made, now
                    self.optimizer = self._make_optimizer()
                    self.recorded.clear()
            self.lr = lr
            self.regime.set_rate(self.optimizer, lr)

    def undo(self) -> None:
        """Put back the weights from before the first epoch, if it came to that."""
        restore(self.learner.moving() if self.start else {}, self.start)

    def finish(self) -> FitLog:
        """Put the best weights in place."""
        restore(self.learner.moving(), self.best)
        self.log.stopped = self.log.stopped or UNFINISHED
        advice = "Does the method draw, or keep numbers of its own, where only a loss or a gradient is meant to differ?"
        self.processes.check_same(self.learner.moving(), f"task '{self.task.name}' was learned", advice)
        return self.log

    def _statistics(self) -> list[Tensor]:
        """What moves beside the weights: each process has seen other images."""
        learned = {parameter.data_ptr() for parameter in self.parameters}
        return [tensor for _, tensor in sorted(self.learner.moving().items()) if tensor.data_ptr() not in learned]

    def _order(self, number: int) -> Tensor:
        """The positions of all images as they come in this epoch."""
        draws = generator("shuffle", self.fit.seed, self.index, number)
        return self.training.shuffled(draws, self.sizes, self.processes)

    def _check(self, value: float, epoch: int, step: int, what: str = "the loss") -> None:
        if not math.isfinite(value):
            where = f"in epoch {epoch + 1}, step {step} of {len(self.sizes)}, at learning rate {self.lr:g}"
            raise diverged(self.task, self.regime, f"{what} became {value} {where}")

    def _save(self) -> None:
        if self.file is None or not self.processes.first:
            return
        ended = bool(self.log.stopped)
        now = self.best if ended else self.learner.moving()
        best = None if ended or self.log.best == len(self.log.epochs) - 1 else self.best
        facts = {"lr": self.lr, "best_loss": self.best_loss, "waited": self.waited, "log": self.log.to_dict()}
        facts |= {} if self.processes.alone else {"processes": self.processes.world}
        self.file.save(now, best, None if ended else self.optimizer, facts, ended=ended)

    def _resume(self) -> None:
        file = self.file
        saved = None if file is None else self.processes.by_first(file.load)
        if saved is None:
            return
        tensors, facts = saved
        if (before := facts.get("processes", 1)) != self.processes.world:
            raise other_processes(before, self.processes.world, self.task, self.fit.folder)
        restore(self.learner.moving(), tensors["now"])
        self.best = {name: tensor.to(self.device) for name, tensor in tensors["best"].items()}
        self.lr, self.best_loss, self.waited = facts["lr"], facts["best_loss"], facts["waited"]
        self.log = FitLog.from_dict(facts["log"])
        if self.optimizer is not None and not self.log.stopped:
            restore_optimizer(self.optimizer, tensors["optimizer"], facts["optimizer"])
            self.regime.set_rate(self.optimizer, self.lr)
