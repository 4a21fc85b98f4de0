"""The one training loop. Read it top to bottom: what a method may change is called by name, where it happens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.training.checkpoint import Checkpoint, Later, optimizer_tensors, restore_optimizer
from zeroforget.training.clip import clip
from zeroforget.training.evaluate import Predictor
from zeroforget.training.feed import Feed, feeds
from zeroforget.training.graphs import CapturedStep, Lane, in_turns, lanes, settle
from zeroforget.training.log import Epoch, FitLog, Progress
from zeroforget.training.mixing import mix
from zeroforget.training.phases import Phases
from zeroforget.training.regime import Regime
from zeroforget.training.seeding import Draws, generator

_PAUSE = 20.0
"""Seconds of training on a GPU that an interruption may cost."""

_VALIDATED = 256
"""So many images are validated at a time."""

_TURN = 4
"""So many steps of one learner are handed over before another's, where they train at the same time."""

UNFINISHED = "its turn did not come again"
"""Why a learner of a race stopped that others decided."""


class Diverged(ValueError):
    """Training met NaN or infinity and was stopped; what had been learned before is as it was."""


class Learner(Protocol):
    """What `fit` needs of a method."""

    def trainable(self) -> Iterable[nn.Parameter]: ...
    def moving(self) -> dict[str, Tensor]: ...
    def before_step(self, done: float) -> None: ...
    def computing(self, recorded: bool) -> AbstractContextManager[Any]: ...
    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor: ...
    def backward(self, loss: Tensor) -> None: ...
    def after_backward(self) -> None: ...
    def after_step(self) -> None: ...
    def predictor(self, task: int) -> Predictor: ...
    def score(self, predictor: Predictor, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]: ...
    def train(self, mode: bool = True) -> Any: ...

    smoothing: float
    """The regime's label smoothing: set before training begins."""
    share: Tensor | None
    """Where a step mixes images, each one's share of itself; the rest is its partner's."""
    coupled: bool
    """Whether the gradient of one weight has a say in how another one moves: set before training begins."""
    graph_safe: ClassVar[bool]
    """Whether a step is the same operators on the same tensors every time, so that it can be recorded."""

    def capture_key(self) -> object: ...


Turns = Callable[[list[FitLog]], Iterable[int]]
"""Of learners that train side by side: given their logs so far, the positions of those that train an epoch next."""


@dataclass
class Fit:
    """Trains a method on a task under one regime: `fit(method, task, index)`.

    Everything random follows from `seed`. With a `folder`, each epoch leaves a checkpoint there. A second run of the
    same calls, or a second try with the same `Fit` after an interruption, goes on from the last finished one.
    `progress` hears of each epoch and, in between, of steps, `pause` seconds apart.
    """

    regime: Regime = field(default_factory=Regime)
    seed: int = 0
    progress: Callable[[Progress], None] | None = None
    folder: Path | None = None
    pause: float = 0.0
    _phases: Phases = field(default_factory=Phases, repr=False, compare=False)
    _later: Later = field(default_factory=Later, init=False, repr=False, compare=False)

    def __call__(self, learner: Learner, task: Task, index: int, **changes: Any) -> FitLog:
        """Train; `changes` override parts of the regime for this call only, such as lr=0.005."""
        return self.race([learner], task, index, **changes)[0]

    def race(
        self, learners: Sequence[Learner], task: Task, index: int, turns: Turns | None = None, **changes: Any
    ) -> list[FitLog]:
        """Train several side by side, an epoch at a time: all of them, or those whose turn it is, until it is nobody's.

        `turns` sees what a run that was never interrupted would show it, so a resumed race takes the same course.
        """
        task.check()
        regime = replace(self.regime, **changes)
        device = torch.device(regime.device)
        feed = feeds((task.train, task.val), (regime.batch_size + 1, _VALIDATED), device)
        fed = [feed() for _ in learners]  # before a number is taken: there may not be enough memory
        numbers, loops = self._phases.take(learners, index), list[_Loop]()
        try:
            many = len(learners)
            ways = zip(learners, numbers, fed, lanes(device, many), strict=True)
            loops += [_Loop(self, regime, one, task, index, phase, *own, lane, many) for one, phase, own, lane in ways]
            for loop in loops:
                loop.begin()
            seen = [0] * len(loops)
            while True:
                logs = [loop.so_far(count) for loop, count in zip(loops, seen, strict=True)]
                going = [i for i in (turns(logs) if turns else range(len(loops))) if not logs[i].stopped]
                if not going:
                    break
                for i in going:
                    seen[i] += 1
                due = [loops[i] for i in going if loops[i].is_behind(seen[i])]
                for together in [due] if _train_abreast(device) else [[loop] for loop in due]:
                    in_turns([loop.launch(_TURN if len(together) > 1 else None) for loop in together])
                    for loop in together:
                        loop.land()
            self._later.wait()
            return [loop.finish() for loop in loops]
        except BaseException as error:  # Ctrl-C included: nobody is left with half-trained weights
            if isinstance(error, Diverged):
                self._phases.forget(index)
            else:
                self._phases.give_back(numbers, index)
            for loop in loops:
                loop.undo()
            raise
        finally:
            try:
                settle(device)
            finally:
                with suppress(Exception):  # where it matters it was raised above
                    self._later.wait()


@dataclass
class _Loop:
    """One learner's training, an epoch at a time."""

    fit: Fit
    regime: Regime
    learner: Learner
    task: Task
    index: int
    phase: int
    training: Feed
    validation: Feed
    lane: Lane
    abreast: int

    def __post_init__(self) -> None:
        folder = self.fit.folder
        self.file = None if folder is None else Checkpoint(folder / self._name(self.index))
        self.log = FitLog()
        self.lr = self.regime.lr
        self.best_loss = math.inf
        self.waited = 0
        self.told = -math.inf
        self.device = torch.device(self.regime.device)
        self.on_cpu = self.device.type == "cpu"
        self.beside, self.ahead = _saves_beside(self.device), _works_ahead(self.device)
        self.save_again = time.perf_counter() + _PAUSE if self.beside else -math.inf
        self.sizes = _sizes(len(self.training), self.regime.batch_size)
        self.steps = len(self.sizes)
        self.total = torch.zeros(1, dtype=torch.float64, device=self.device)
        """The losses of this epoch's images so far."""
        self.order: Tensor | None = None
        """The next epoch's, if it is there already."""
        self.newest: dict[str, Tensor] | None = None
        self.recorded: dict[tuple[int, object], CapturedStep] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.start: dict[str, Tensor] = {}

    def _name(self, index: int) -> str:
        """The checkpoint's. The first task's is what earlier versions called that of any task."""
        return f"phase-{self.phase:03d}" + (f"-task-{index:03d}" if index else "") + ".safetensors"

    def begin(self) -> None:
        """Make the optimizer, and go to where an interrupted run stopped."""
        if self.device.type == "cuda" and isinstance(self.learner, nn.Module):
            self.learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = [p for p in self.learner.trainable() if p.requires_grad]
        self.captured = self.regime.can_capture() and self.learner.graph_safe and bool(self.parameters)
        if self.parameters:
            self.optimizer = self.regime.make_optimizer(self.parameters, self.lr, captured=self.captured)
        self.learner.smoothing, self.learner.share = self.regime.label_smoothing, None
        self.learner.coupled = self.regime.couples
        self.best = self.start = _copy(self.learner.moving())
        self._resume()

    def so_far(self, count: int) -> FitLog:
        """The log as it was after so many epochs; a run that was interrupted may have left more."""
        if len(self.log.epochs) <= count:
            return self.log
        log = FitLog()
        for epoch in self.log.epochs[:count]:
            log.add(epoch, self.regime.keep)
        return log

    def is_behind(self, count: int) -> bool:
        """Whether fewer epochs are done than that; after an interruption there may be more."""
        return len(self.log.epochs) < count

    def undo(self) -> None:
        """Put back the weights from before the first epoch."""
        if self.start:
            with self.lane():
                _restore(self.learner.moving(), self.start)

    def finish(self) -> FitLog:
        """Put the best weights in place."""
        with self.lane():
            _restore(self.learner.moving(), self.best)
        self.log.stopped = self.log.stopped or UNFINISHED
        return self.log

    def launch(self, turn: int | None) -> Generator[None]:
        """Hand the next epoch to the device: all steps, or so many at a time, and validation. In between others may
        hand over theirs. Where all images are on a GPU nothing here waits for it; images that are brought over are.

        What the next epoch needs is got ready meanwhile: the weights, should they be the best, and the order.
        """
        self.began = time.perf_counter()
        number = len(self.log.epochs)
        noise, going = Draws(self.device, "noise", self.fit.seed, self.index, self.phase, number), True
        with closing(self._train(number)) as steps:
            while going:
                with self.lane(), noise(), self.regime.arithmetic():
                    going = sum(1 for _ in islice(steps, turn)) == turn
                yield
        with self.lane():
            self.outcome = torch.cat([self.total / len(self.training), self._validate()])
            self.newest = _copy(self.learner.moving()) if self.ahead else None
            self.order = self._order(number + 1) if self.ahead else None

    def land(self) -> None:
        """Wait for the epoch, and draw the consequences."""
        with self.lane():
            self._end(len(self.log.epochs), *self.outcome.tolist())

    def _end(self, number: int, loss: float, val_loss: float, val_accuracy: float) -> None:
        self._check(loss, number, self.steps - 1)
        val_loss = math.inf if math.isnan(val_loss) else val_loss
        self.waited = 0 if val_loss < self.best_loss else self.waited + 1
        self.best_loss = min(self.best_loss, val_loss)
        seconds = time.perf_counter() - self.began
        if self.log.add(Epoch(number, self.lr, loss, val_loss, val_accuracy, seconds), self.regime.keep):
            self.best = self.newest or _copy(self.learner.moving())
        self.newest = None
        plateau = self.regime.schedule == "patience" and self.waited >= self.regime.patience
        lr = self.lr / self.regime.decay if plateau else self.lr
        if plateau and lr < self.regime.min_lr:
            self.log.stopped = "learning rate below its bound"
        elif number + 1 >= self.regime.epochs:
            self.log.stopped = "all epochs done"
        if self.log.stopped and self.regime.keep == "last":
            self._check(val_loss, number, self.steps - 1, "the validation loss")
            for ruined in (p.detach()[~p.isfinite()] for p in self.parameters):
                self._check(float(ruined[0]) if len(ruined) else 0.0, number, self.steps - 1, "a weight")
        if plateau:
            self.lr, self.waited = lr, 0
            if self.regime.rewind:
                _restore(self.learner.moving(), self.best)
                self._forget_steps()
            self._set_lr()
        self._report(number, self.steps)
        self._save()

    def _train(self, number: int) -> Generator[None]:
        """One pass over the training data, step by step; their losses are added up on the device."""
        order = self._order(number) if self.order is None else self.order
        # On a GPU augmentation draws there, from the seed of the epoch's noise.
        self.draws = generator("augment", self.fit.seed, self.index, number) if self.on_cpu else None
        self.total.zero_()
        self.learner.train()
        self.mixes = self.regime.mixes(number)
        key = (self.learner.capture_key(), self.mixes) if self.captured else None
        with closing(self.training.batches(order, self.sizes)) as batches:
            for step, rows in enumerate(batches):
                if len(rows) != self.regime.batch_size:  # one step an epoch: trying algorithms for its size costs more
                    torch.backends.cudnn.benchmark = False
                if self.regime.schedule == "cosine":
                    self.lr = self.regime.cosine(number + step / self.steps, 1 / self.steps)
                    self._set_lr()
                self.learner.before_step(step / self.steps)
                loss = self._recorded(len(rows), key)(rows) if self.captured else self._step(rows)
                if self.on_cpu:
                    self._check(float(loss), number, step)
                self._report(number, step + 1)
                yield

    def _order(self, number: int) -> Tensor:
        """The positions of all images as they come in this epoch."""
        draws = generator("shuffle", self.fit.seed, self.index, number)
        return self.training.placed(torch.randperm(len(self.training), generator=draws))

    def _step(self, rows: Tensor) -> Tensor:
        """One step on the images at these positions; returns the loss."""
        images, y = self.training.window.batch(rows)
        x = self.task.prepare.train(images.to(self.device), self.draws)
        if self.device.type == "cuda" and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if self.mixes:
            x, self.learner.share = mix(x, self.regime.cutmix, self.regime.mixup, self.draws)
        with self.learner.computing(self.captured), self.regime.autocast(), self._spread():
            loss = self.learner.loss(x, y.to(self.device), self.index)
        self.learner.share = None
        if self.optimizer is not None:
            _check_loss(self.learner, loss)
            self.optimizer.zero_grad()
            self.learner.backward(loss)
            self.learner.after_backward()
            if self.regime.clip is not None:
                clip(self.optimizer, self.parameters, self.regime.clip)
            self.optimizer.step()
            self.learner.after_step()
        loss = loss.detach().reshape(())
        self.total.add_(loss, alpha=len(rows))
        return loss

    @contextmanager
    def _spread(self) -> Iterator[None]:
        """Batch normalization that finds one value alone says so in the task's words."""
        try:
            yield
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"task '{self.task.name}': batch normalization cannot learn from one image at a time. Give the task at "
                f"least 2 training images (it has {len(self.training)}) and the regime a batch_size of at least 2 "
                f"(it is {self.regime.batch_size})"
            ) from error

    def _recorded(self, size: int, key: object) -> CapturedStep:
        """The recorded step for batches of this size; what it draws starts from the epoch's seed all the same."""
        if (size, key) not in self.recorded:
            assert self.optimizer is not None
            self.fit._later.wait()  # nobody else may use the GPU while a step is recorded
            state = self.learner.moving() | {"(the epoch's losses)": self.total}
            self.recorded[size, key] = CapturedStep(self._step, size, state, self.optimizer)
        return self.recorded[size, key]

    @torch.no_grad()
    def _validate(self) -> Tensor:
        """Mean loss and accuracy on the validation data, still on the device."""
        self.learner.train(False)
        predictor = self.learner.predictor(self.index)
        total = torch.zeros(2, device=self.device, dtype=torch.float64)
        order = self.validation.placed(torch.arange(len(self.validation)))
        with closing(self.validation.batches(order, _VALIDATED)) as batches:
            for rows in batches:
                images, y = self.validation.window.batch(rows)
                x, y = self.task.prepare.test(images.to(self.device)), y.to(self.device)
                with self.regime.autocast():
                    losses, correct = self.learner.score(predictor, x, y, self.index)
                total += torch.stack([losses.double().sum(), correct.double().sum()])
        return total / len(self.validation)

    def _check(self, loss: float, epoch: int, step: int, what: str = "the loss") -> None:
        if math.isfinite(loss):
            return
        raise Diverged(
            f"task '{self.task.name}': {what} became {loss} in epoch {epoch + 1}, step {step + 1} of {self.steps}, "
            f"at learning rate {self.lr:g}. Try a lower lr, clip=1.0 to bound the gradient"
            + (", or precision='float32'" if self.regime.precision == "bf16" else "")
            + ". What was learned before this task is unchanged."
        )

    def _forget_steps(self) -> None:
        """An optimizer that remembers steps (momentum, say) begins anew; recorded steps are those of the old one."""
        if self.optimizer is not None and any(self.optimizer.state.values()):
            self.optimizer = self.regime.make_optimizer(self.parameters, self.lr, captured=self.captured)
            self.recorded.clear()

    def _set_lr(self) -> None:
        for group in self.optimizer.param_groups if self.optimizer else ():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.lr)
            else:
                group["lr"] = self.lr

    def _report(self, number: int, step: int) -> None:
        if self.fit.progress is None or (step < self.steps and time.monotonic() < self.told + self.fit.pause):
            return
        self.told = time.monotonic()
        last = self.log.epochs[-1] if self.log.epochs else None
        where = self.task.name, self.index, self.phase, number, self.regime.epochs, step, self.steps
        self.fit.progress(Progress(*where, self.lr, last, self.abreast))

    def _save(self) -> None:
        """After every epoch; on a GPU, where writing takes longer than that, every now and then, beside the next ones.

        At the end always, and at once: what a later phase does may depend on every bit of this one.
        """
        began, ended, later = time.perf_counter(), bool(self.log.stopped), self.fit._later
        soon = began < self.save_again or (later.busy and began < self.save_again + _PAUSE)
        if self.file is None or (soon and not ended):
            return
        tensors = {f"now/{n}": t for n, t in (self.best if ended else self.learner.moving()).items()}
        numbers: dict[str, Any] = {}
        if not ended and self.log.best != len(self.log.epochs) - 1:  # else the best is what it is now
            tensors |= {f"best/{n}": t for n, t in self.best.items()}
        if not ended and self.optimizer is not None:
            state, numbers = optimizer_tensors(self.optimizer)
            tensors |= {f"optimizer/{n}": t for n, t in state.items()}
        facts = {"lr": self.lr, "best_loss": self.best_loss, "waited": self.waited, "optimizer": numbers}
        facts |= {"task": self.index, "log": self.log.to_dict()}
        if self.beside and not ended:
            later.save(self.file, tensors, facts, self.device)
            self.save_again = time.perf_counter() + _PAUSE
        else:
            later.wait()
            self.file.save(tensors, facts)

    def _resume(self) -> None:
        if self.file is None:
            return
        saved = self.file.load() or Checkpoint(self.file.path.with_name(self._name(0))).load()
        if saved is None or saved[1].get("task", self.index) != self.index:
            return
        tensors, facts = saved
        part: dict[str, dict[str, Tensor]] = {"now": {}, "best": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            kind, rest = name.split("/", 1)
            part[kind][rest] = tensor
        _restore(self.learner.moving(), part["now"])
        self.best = {n: t.to(self.device) for n, t in (part["best"] or part["now"]).items()}
        self.lr, self.best_loss, self.waited = facts["lr"], facts["best_loss"], facts["waited"]
        self.log = FitLog.from_dict(facts["log"])
        if self.optimizer is not None and not self.log.stopped:
            restore_optimizer(self.optimizer, part["optimizer"], facts["optimizer"])
            self._set_lr()


def _saves_beside(device: torch.device) -> bool:
    """Whether checkpoints are written while training goes on: where an epoch takes less time than to write one."""
    return device.type == "cuda"


def _train_abreast(device: torch.device) -> bool:
    """Whether learners that race train at the same time."""
    return device.type == "cuda"


def _works_ahead(device: torch.device) -> bool:
    """Whether an epoch is handed over before it is done, so that there is time until it is."""
    return device.type == "cuda"


def _check_loss(learner: Learner, loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        without = " without one" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise ValueError(f"{type(learner).__name__}.loss must return one number with a gradient, not {found}{without}")


def _sizes(images: int, batch: int) -> list[int]:
    """How many images each step sees. One that is left over joins the batch before: alone it has no spread."""
    whole, rest = divmod(images, batch)
    if rest == 1 and whole:
        return [batch] * (whole - 1) + [batch + 1]
    return [batch] * whole + [rest] * (rest > 0)


@torch.no_grad()
def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On a GPU most of them at once."""
    copies = {n: torch.empty_like(t) if t.dtype == torch.float32 else t.clone() for n, t in tensors.items()}
    if many := [name for name, tensor in tensors.items() if tensor.dtype == torch.float32]:
        torch._foreach_copy_([copies[name] for name in many], [tensors[name] for name in many])
    return copies


@torch.no_grad()
def _restore(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in each.items()} for each in (tensors, saved)]
    if other := sorted({name for name, _ in kinds[0].items() ^ kinds[1].items()}):
        raise ValueError(f"the checkpoint belongs to another network: {', '.join(other[:4])} do not match")
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
