"""How a task is trained: the paper's regime by default (after HAT), every part of it an option."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_OPTIMIZERS = {name.lower(): cls for name, cls in vars(torch.optim).items() if isinstance(cls, type)}


@dataclass(frozen=True)
class Regime:
    """Plain SGD at 0.05, divided by 3 after 5 epochs without a better validation loss, until below 1e-4."""

    optimizer: str = "sgd"
    """Any optimizer of torch.optim, by its name in any case."""
    lr: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer, such as momentum or weight_decay."""
    batch_size: int = 64
    epochs: int = 200
    patience: int = 5
    """Epochs without a better validation loss before the learning rate is divided."""
    decay: float = 3.0
    min_lr: float = 1e-4
    """Training stops when the learning rate falls below this."""
    clip: float | None = None
    """Bound on the norm of the whole gradient."""
    precision: str = "float32"
    """float32, or bf16 for automatic mixed precision."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.optimizer.lower() not in _OPTIMIZERS or self.optimizer.lower() in {"optimizer", "lbfgs"}:
            names = ", ".join(sorted(cls.__name__ for cls in _OPTIMIZERS.values() if cls.__name__ != "Optimizer"))
            raise ValueError(f"no optimizer '{self.optimizer}'; torch.optim has: {names} (LBFGS cannot be used here)")
        if self.precision not in {"float32", "bf16"}:
            raise ValueError(f"precision is 'float32' or 'bf16', not '{self.precision}'")
        for name in ("lr", "batch_size", "epochs", "patience", "min_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.decay <= 1:
            raise ValueError(f"decay divides the learning rate, so it must be above 1, not {self.decay}")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device '{self.device}' was asked for, but torch sees no GPU; use device='cpu'")

    def make_optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The optimizer over exactly these parameters."""
        optimizer: torch.optim.Optimizer = _OPTIMIZERS[self.optimizer.lower()](list(parameters), lr=lr, **self.options)
        return optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision's context: bf16 autocast, or nothing."""
        if self.precision == "bf16":
            return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16)
        return nullcontext()
