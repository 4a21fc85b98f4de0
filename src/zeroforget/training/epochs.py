"""One learner's training, an epoch at a time: batches, loss, step, validation, decision, checkpoint.

What becomes of a batch is `Training.step`. What a method may change is called by name, where it happens.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.operators.recorded import RecordedStep, backward, ways
from zeroforget.processes import Processes
from zeroforget.progress import Epoch, Progress
from zeroforget.training.checkpoint import PAUSE, PhaseFile, restore_optimizer
from zeroforget.training.feed import Feed, LoadedTask, moved, prepared
from zeroforget.training.learner import (
    FitSettings,
    Learner,
    check_loss,
    copied,
    diverged,
    not_one_image,
    other_processes,
    restore,
    state_of,
)
from zeroforget.training.log import UNFINISHED, FitLog, Reporter
from zeroforget.training.regime import Regime
from zeroforget.training.seeding import generator, seeded
from zeroforget.training.step import clip, mix, settling

VALIDATED = 256
"""So many images are validated at a time."""


@dataclass
class Training:
    """One learner's, of one phase of a task."""

    settings: FitSettings
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
        settings, self.device = self.settings, torch.device(self.regime.device)
        self.on_cpu = self.device.type == "cpu"
        pause = settings.save_every if self.on_cpu or settings.save_every is not None else PAUSE
        place = self.phase, self.index, settings.later, pause
        self.file = None if settings.folder is None else PhaseFile(settings.folder, *place)
        self.sizes = self.training.sizes(self.regime.batch_size, self.processes)
        where = self.task.name, self.index, self.phase, 0, self.regime.epochs, 0, len(self.sizes), self.regime.lr
        self.report = Reporter(settings.progress, settings.pause, Progress(*where, None, self.abreast))
        self.log, self.lr, self.best_loss, self.waited = FitLog(), self.regime.lr, math.inf, 0
        self.losses = torch.zeros(1, dtype=torch.float64, device=self.device)  # of this epoch's images, added up
        self.order: Tensor | None = None  # the next epoch's, if it is there already
        self.recorded: dict[object, RecordedStep] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.start: dict[str, Tensor] = {}
        self.at, self.seen = 0, 0  # steps and images of this epoch that are done

    def begin(self) -> None:
        """Make the optimizer, and go to where an interrupted run stopped."""
        learner, regime = self.learner, self.regime
        if not self.on_cpu and isinstance(learner, nn.Module):
            learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = [p for p in learner.trainable() if p.requires_grad]
        safe = self.processes.alone and learner.graph_safe and self.settings.optimizer is None
        self.records = regime.can_capture() and safe and bool(self.parameters)
        if self.parameters:
            self.optimizer = self.settings.make_optimizer(self.regime, self.parameters, self.lr, self.records)
        learner.smoothing, learner.share, learner.coupled = regime.label_smoothing, None, regime.couples
        self.best = self.start = copied(learner.moving())
        advice = "Build the network with the same seed, or from the same file, in every process"
        self.processes.check_same(state_of(learner), f"task '{self.task.name}' was to be learned", advice)
        self._resume()

    def epoch(self) -> None:
        """Train on every image once, validate, decide, write a checkpoint."""
        number, began = len(self.log.epochs), time.perf_counter()
        self.train(number)
        if self.regime.settle:
            self.settle()
        outcome = torch.cat([self.losses / self.seen, self.validate()])
        # A GPU is still at work. Meanwhile: the weights, should they be the best, and the order of the next epoch.
        weights, self.order = copied(self.learner.moving()), self._order(number + 1)
        loss, val_loss, val_accuracy = outcome.tolist()
        self._check(loss, number, len(self.sizes))
        val_loss = math.inf if math.isnan(val_loss) else val_loss
        self.decide(Epoch(number, self.lr, loss, val_loss, val_accuracy, time.perf_counter() - began), weights)
        self.report(number, len(self.sizes), self.lr, self.log)
        self._save()

    def train(self, number: int) -> None:
        """One pass over the training data: in one go, or in legs, between which a checkpoint is written."""
        order = self._order(number) if self.order is None else self.order
        if not self.at:
            self.losses.zero_()
            self.seen = 0
        steps = len(self.sizes)
        leg = self.training.leg or steps
        while self.at < steps:
            end = min(self.at + leg, steps)
            # Draws start anew in each leg, so that one that is gone on with needs no state of a generator.
            key = self.settings.seed, self.index
            later = (number, *(("step", self.at) if self.at else ()), *self.processes.key)
            # On a GPU augmentation draws there, from the seed of the epoch's noise.
            self.draws = generator("augment", *key, *later) if self.on_cpu else None
            with seeded("noise", *key, self.phase, *later), self.regime.arithmetic():
                self.train_leg(number, order, end)
            self.at = end
            self.agree()
            if end < steps:
                self._save()
        self.at = 0

    def train_leg(self, number: int, order: Tensor, end: int) -> None:
        """On to this step of the epoch, step by step."""
        self.mixes, steps, sizes = self.regime.mixes(number), len(self.sizes), self.processes.sizes(self.sizes)
        left = order[sum(sizes[: self.at]) :] if self.at else order
        left = left if end == steps else left[: sum(sizes[self.at : end])]
        self.learner.train()
        way = (self.mixes, ways(self.learner.modules())) if self.records else None
        with closing(self.training.batches(left, sizes[self.at : end])) as batches:
            for step, rows in enumerate(batches, self.at):
                self.together = self.sizes[step] or int(self.processes.sum(torch.tensor(len(rows), device=self.device)))
                self.seen += self.together
                if len(rows) != sizes[0]:  # one step an epoch: trying algorithms for its size costs more
                    torch.backends.cudnn.benchmark = False
                if self.regime.schedule == "cosine":
                    self.lr = self.regime.cosine(number + step / steps, 1 / steps)
                    self.regime.set_rate(self.optimizer, self.lr)
                self.learner.step_rate = self.regime.carries(self.lr)
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
            self.settings.later.wait()  # nobody else may use the GPU while a step is recorded
            state = self.learner.moving() | {"(the epoch's losses)": self.losses}
            self.recorded[size, way] = RecordedStep(self.step, size, state, self.optimizer, self.learner.modules())
        return self.recorded[size, way]

    @torch.no_grad()
    def settle(self) -> None:
        """Look at the training images once more with nothing dropped, so that batch norms know them as answers do."""
        order, sizes = self._order(0), self.processes.sizes(self.sizes)
        with settling(self.learner), seeded("settle", self.settings.seed, *self.processes.key):
            for x, y in prepared(self.training, order, sizes, self.task.prepare, self.device):
                with self.regime.arithmetic(), self.regime.autocast():
                    self.learner.loss(x, y, self.index)
        self.agree()

    def agree(self) -> None:
        """Make one of the statistics of several processes: each has seen other images."""
        if not self.processes.alone:
            learned = {parameter.data_ptr() for parameter in self.parameters}
            moving = (tensor for _, tensor in sorted(self.learner.moving().items()))
            self.processes.average([tensor for tensor in moving if tensor.data_ptr() not in learned])

    @torch.no_grad()
    def validate(self) -> Tensor:
        """Mean loss and accuracy on the validation data, still on the device."""
        self.learner.train(False)
        predictor = self.learner.predictor(self.index)
        total, seen = torch.zeros(3, device=self.device, dtype=torch.float64), 0
        order = self.validation.in_order(self.processes)
        for x, y in prepared(self.validation, order, VALIDATED, self.task.prepare, self.device):
            with self.regime.autocast():
                losses, correct = self.learner.score(predictor, x, y, self.index)
            total[:2] += torch.stack([losses.double().sum(), correct.double().sum()])
            seen += len(y)
        total[2] = seen
        total = self.processes.sum(total)
        return total[:2] / total[2]

    def decide(self, epoch: Epoch, weights: dict[str, Tensor]) -> None:
        """Whether these weights are to be kept, whether training is over, and at which rate it goes on."""
        self.waited = 0 if epoch.val_loss < self.best_loss else self.waited + 1
        self.best_loss = min(self.best_loss, epoch.val_loss)
        if self.log.add(epoch, self.regime.keep):
            self.best = weights
        if self.settings.after_epoch is not None and self.settings.after_epoch(epoch) is True:
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
                    self.optimizer = self.settings.make_optimizer(self.regime, self.parameters, self.lr, self.records)
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

    def _order(self, number: int) -> Tensor:
        """The positions of all images as they come in this epoch."""
        draws = generator("shuffle", self.settings.seed, self.index, number)
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
        best = None if ended or (not self.at and self.log.best == len(self.log.epochs) - 1) else self.best
        within = {"step": self.at, "seen": self.seen, "losses": float(self.losses)}
        facts = {"lr": self.lr, "best_loss": self.best_loss, "waited": self.waited, "log": self.log.to_dict()}
        facts |= {"within": within} if self.at else {}
        facts |= {} if self.processes.alone else {"processes": self.processes.world}
        self.file.save(now, best, None if ended else self.optimizer, facts, ended=ended)

    def _resume(self) -> None:
        file = self.file
        saved = None if file is None else self.processes.by_first(file.load)
        if saved is None:
            return
        tensors, facts = saved
        if (before := facts.get("processes", 1)) != self.processes.world:
            raise other_processes(before, self.processes.world, self.task, self.settings.folder)
        restore(self.learner.moving(), tensors["now"])
        self.best = {name: tensor.to(self.device) for name, tensor in tensors["best"].items()}
        self.lr, self.best_loss, self.waited = facts["lr"], facts["best_loss"], facts["waited"]
        self.log = FitLog.from_dict(facts["log"])
        if within := facts.get("within"):
            self.at, self.seen = within["step"], within["seen"]
            self.losses.fill_(within["losses"])
        if self.optimizer is not None and not self.log.stopped:
            restore_optimizer(self.optimizer, tensors["optimizer"], facts["optimizer"])
            self.regime.set_rate(self.optimizer, self.lr)
