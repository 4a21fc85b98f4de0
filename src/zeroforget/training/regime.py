"""How a task is trained: the paper's regime by default (after HAT), every part of it an option."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from zeroforget.files.text import WrongOption

_UNFIT = {
    "lbfgs": "it computes the loss several times a step",
    "muon": "it moves matrices only, and networks have biases and convolutions too",
    "sparseadam": "it wants sparse gradients, and those of networks are dense",
}
_OPTIMIZERS = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and cls is not torch.optim.Optimizer and name.lower() not in _UNFIT
}
_CAPTURABLE = {"sgd", "adam", "adamw"}
_DECOUPLED = {"adamw", "adafactor"}
_ONE_BY_ONE = {"adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"}
"""They move each weight by its own gradient alone."""


_elsewhere: ContextVar[bool] = ContextVar("_elsewhere", default=False)


@contextmanager
def trained_elsewhere() -> Iterator[None]:
    """Inside, a regime may name a device that this host does not have: another one trains."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def _whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a word"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_whole, "a whole number"),
    "float": (_number, "a finite number"),
    "float | None": (lambda value: value is None or _number(value), "a finite number or None"),
    "dict[str, Any]": (lambda value: isinstance(value, dict), "a table of names and values"),
}
"""What the fields of a regime may hold, by the type they declare."""


@dataclass(frozen=True)
class Regime:
    """How to train. By default SGD at 0.05, divided by 3 after 5 epochs without a better loss, until below 1e-4.

    Example:
        >>> import zeroforget
        >>> quick = zeroforget.Regime(optimizer="adamw", lr=0.001, epochs=10, options={"weight_decay": 0.1})
        >>> quick.batch_size
        64
    """

    optimizer: str = "sgd"
    """An optimizer of torch.optim, by its name in any case; LBFGS, Muon and SparseAdam cannot train networks here."""
    lr: float = 0.05
    """The learning rate to begin with; with a warm-up, the highest."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer, such as momentum or weight_decay."""
    batch_size: int = 64
    """Images of a step."""
    epochs: int = 200
    """At most so many for a task; with the cosine schedule exactly so many."""
    schedule: str = "patience"
    """patience: divide the rate when validation stops getting better, and stop early. cosine: all epochs are run, the
    rate falls to nothing along half a cosine (Loshchilov and Hutter, 2017), step by step."""
    warmup: float = 0.0
    """Epochs at the beginning in which the rate of the cosine schedule rises evenly to `lr`."""
    keep: str = "best"
    """Which weights training ends with: those of the best validation loss; the most "accurate" ones; the "last".

    The loss of a network that is too sure of itself rises while its accuracy does too, so the first keeps weights from
    early on. HAT's code does so, whose setup the paper follows."""
    patience: int = 5
    """Epochs without a better validation loss before the learning rate is divided."""
    decay: float = 3.0
    """What the learning rate is divided by, above 1."""
    rewind: bool = False
    """Whether training goes on from the weights it would keep, with a fresh optimizer, when the rate is divided."""
    min_lr: float = 1e-4
    """Training stops when the learning rate is divided and falls below this."""
    settle: bool = False
    """Whether batch norms look at the training images once more before each validation, with nothing dropped. Where
    dropout stands before batch norm, the statistics of training do not fit answers, for which nothing is dropped."""
    label_smoothing: float = 0.0
    """The share of each label that is spread evenly over the task's classes, in training (Szegedy et al., 2016)."""
    cutmix: float = 0.0
    """The share of training images with a rectangle from another one, their labels in proportion (Yun et al., 2019)."""
    mixup: float = 0.0
    """The share of training images that are blended with another one, their labels too (Zhang et al., 2018)."""
    mix_until: float = 1.0
    """The share of the epochs in which images are mixed. In the rest, at the end, each one is itself alone."""
    clip: float | None = None
    """Bound on the norm of the whole gradient, above 0. None: no bound."""
    precision: str = "float32"
    """float32; tf32 for faster products of float32 on a GPU; bf16 for automatic mixed precision."""
    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1."""
    capture: bool = True
    """On a GPU, record the step as a CUDA graph where method and optimizer allow it."""

    def __post_init__(self) -> None:
        for each in fields(self):
            fits, kind = _KINDS[each.type]
            if not fits(getattr(self, each.name)):
                raise WrongOption(each.name, f"must be {kind}, not {getattr(self, each.name)!r}")
        self._check_optimizer()
        if self.precision not in {"float32", "tf32", "bf16"}:
            raise WrongOption("precision", f"is 'float32', 'tf32' or 'bf16', not '{self.precision}'")
        for name, known in (("schedule", ("patience", "cosine")), ("keep", ("best", "accurate", "last"))):
            if getattr(self, name) not in known:
                words = ", ".join(f"'{word}'" for word in known[:-1])
                raise WrongOption(name, f"is {words} or '{known[-1]}', not '{getattr(self, name)}'")
        for name in ("lr", "batch_size", "epochs", "patience", "min_lr"):
            if not getattr(self, name) > 0:
                raise WrongOption(name, f"must be positive, not {getattr(self, name)}")
        if not 0 <= self.warmup < self.epochs:
            raise ValueError(f"warmup must be at least 0 and below the {self.epochs} epochs, not {self.warmup}")
        if self.warmup and self.schedule == "patience":
            raise ValueError("warmup belongs to schedule='cosine'; the patience schedule begins at its full rate")
        if self.rewind and (self.schedule, self.keep) not in {("patience", "best"), ("patience", "accurate")}:
            raise ValueError(
                "rewind goes back to better weights: it wants schedule='patience' and keep 'best' or 'accurate'"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, not {self.label_smoothing}")
        if min(self.cutmix, self.mixup) < 0 or self.cutmix + self.mixup > 1:
            raise ValueError(
                f"cutmix and mixup are shares of the images, together at most 1, not {self.cutmix} and {self.mixup}"
            )
        if not 0 <= self.mix_until <= 1:
            raise ValueError(f"mix_until is a share of the epochs, from 0 to 1, not {self.mix_until}")
        if self.decay <= 1:
            raise ValueError(f"decay divides the learning rate, so it must be above 1, not {self.decay}")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip bounds the norm of the gradient, so it must be above 0 or None, not {self.clip}")
        self._check_device()

    def _check_device(self) -> None:
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ValueError(f"there is no device '{self.device}'; use 'cpu', 'cuda' or 'cuda:0'") from None
        if device.type not in {"cpu", "cuda"}:
            raise ValueError(f"training runs on 'cpu' or 'cuda', not on '{self.device}'")
        if device.type == "cuda" and _elsewhere.get():
            return
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device '{self.device}' was asked for, but torch sees no GPU; use 'cpu'")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"there is no '{self.device}': torch sees {torch.cuda.device_count()} of them, from cuda:0 on"
            )

    def with_adam(self, lr: float | None) -> dict[str, Any]:
        """What is to be changed for Adam at this rate, its bound in proportion; nothing for None."""
        if lr is None:
            return {}
        return {"optimizer": "adam", "options": {}, "lr": lr, "min_lr": self.min_lr * lr / self.lr}

    def _check_optimizer(self) -> None:
        name = self.optimizer.lower()
        if name in _UNFIT:
            raise ValueError(f"{self.optimizer} cannot be used here: {_UNFIT[name]}. Take sgd or adamw, for instance")
        if name not in _OPTIMIZERS:
            names = ", ".join(sorted(cls.__name__ for cls in _OPTIMIZERS.values()))
            raise ValueError(f"no optimizer '{self.optimizer}'; there are: {names}")
        known = [key for key in inspect.signature(_OPTIMIZERS[name]).parameters if key not in {"params", "lr"}]
        if unknown := [key for key in self.options if key not in known]:
            raise ValueError(f"options: {self.optimizer} has no '{unknown[0]}' beside lr; it has: {', '.join(known)}")

    @property
    def reach(self) -> float:
        """How far a steady gradient carries a weight in each step to begin with."""
        return self.carries(self.lr)

    def carries(self, lr: float) -> float:
        """The rate with which plain SGD would go as far: momentum adds its steps up, dampening makes them shorter."""
        momentum, dampening = self._inertia
        return lr * (1 - dampening) / (1 - momentum) if momentum < 1 else math.inf

    @property
    def _inertia(self) -> tuple[float, float]:
        """Momentum and dampening; torch heeds no dampening without momentum."""
        momentum = float(self.options.get("momentum", 0.0))
        return momentum, float(self.options.get("dampening", 0.0)) if momentum else 0.0

    @property
    def weight_decay(self) -> float:
        """What the optimizer is told, or its own default."""
        own = inspect.signature(_OPTIMIZERS[self.optimizer.lower()]).parameters.get("weight_decay")
        return float(self.options.get("weight_decay", 0.0 if own is None else own.default))

    @property
    def decays_apart(self) -> bool:
        """Whether weights decay beside the gradient, not through it (Loshchilov and Hutter, 2019)."""
        apart = self.optimizer.lower() in _DECOUPLED or bool(self.options.get("decoupled_weight_decay"))
        return apart and self.weight_decay != 0

    @property
    def couples(self) -> bool:
        """Whether the gradient of one weight has a say in how another one moves."""
        return self.clip is not None or self.optimizer.lower() not in _ONE_BY_ONE

    def cosine(self, done: float, step: float) -> float:
        """The rate of the cosine schedule for the step that begins after `done` epochs and lasts `step` of one."""
        if done < self.warmup:
            return self.lr * min(1.0, (done + step) / self.warmup)
        return self.lr * (1 + math.cos(math.pi * (done - self.warmup) / (self.epochs - self.warmup))) / 2

    def mixes(self, epoch: int) -> bool:
        """Whether images are mixed in this epoch, counted from 0."""
        return self.cutmix + self.mixup > 0 and epoch < round(self.mix_until * self.epochs)

    def can_capture(self) -> bool:
        """Whether a step under this regime can be recorded as a CUDA graph."""
        plain = not self.options.get("dampening") and not self.options.get("nesterov")
        return self.capture and self.device.startswith("cuda") and self.optimizer.lower() in _CAPTURABLE and plain

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter], lr: float, *, captured: bool = False
    ) -> torch.optim.Optimizer:
        """The optimizer over exactly these parameters; for a captured step, one that reads its rate from the device."""
        options: dict[str, Any] = dict(self.options) | {"lr": lr}
        if captured:
            options["lr"] = torch.tensor(lr, device=self.device)
            options["fused"] = True
            if self.optimizer.lower() != "sgd":
                options["capturable"] = True
        try:
            optimizer: torch.optim.Optimizer = _OPTIMIZERS[self.optimizer.lower()](list(parameters), **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"options: {self.optimizer} does not take {self.options}: {error}") from error
        return optimizer

    def set_rate(self, optimizer: torch.optim.Optimizer | None, lr: float) -> None:
        """From now on its steps are made at this learning rate."""
        for group in optimizer.param_groups if optimizer else ():
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision's context: bf16 autocast, or nothing."""
        if self.precision == "bf16":
            # Casts are not cached: a captured step must hold all that it does.
            kind = torch.device(self.device).type
            return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=not self.can_capture())
        return nullcontext()

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """How a GPU computes while training; afterwards all is as it was.

        Evaluation stays outside: it is exact and always the same.
        """
        cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
        fast = self.precision == "tf32"
        try:
            cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = fast, fast, self.device.startswith("cuda")
            yield
        finally:
            cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
