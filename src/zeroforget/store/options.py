"""What may be chosen about learning a task, and who is told how it goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zeroforget.nets.registry import nearest
from zeroforget.store.assembly import Addition
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import as_path
from zeroforget.store.images import Told
from zeroforget.store.schema import MOST_ALIGN, MOST_PIXELS, MOST_SEED, MOST_WIDTH
from zeroforget.training import Progress, Regime

GROWTH = 0.1
SEARCH = (0.0, 0.05, 0.1, 0.2)
"""The growths that a search tries."""


@dataclass(frozen=True)
class Options:
    """How to learn. What concerns the network itself counts when the model is made, with its first task."""

    network: str | None = None
    """A network by name; by default one that fits the size of the pictures."""
    width: float | None = None
    """Its width, as a share of the published one."""
    size: int | None = None
    """Pixels of each side of its pictures; 64 by default."""
    gray: bool | None = None
    """One channel instead of three."""
    weights: Path | None = None
    """A file of weights to start from: safetensors, or a state dict in a .pt or .pth file."""
    pretrained: bool | None = None
    """Whether to start from published weights: those in the package, or a library's own; by default the package's, for
    color pictures, unless a network is named."""
    frozen: bool | None = None
    """Of weights to start from: whether they stay as they are in every task, so that a first task learns a head alone
    and later ones what they add (the default); else the first task tunes them."""
    align: int | None = None
    """Layers grow to multiples of this; by default of 8 in a model that is made on a GPU, else of 1."""
    growth: float | Sequence[float] | None = None
    """The share of the first network that a later task adds, 0.1 by default; several are tried, and the smallest good
    one is taken. A first task makes the network and adds nothing to it."""
    margin: float = 0.015
    """How much accuracy a search may give up for a smaller growth."""
    epochs: int = 60
    lr: float = 0.02
    batch_size: int = 32
    patience: int = 4
    seed: int = 0
    held_out: float = 0.2
    """The share of each class that is set apart to measure by: the test part."""
    selection: float = 0.15
    """The share of the rest that chooses which weights are kept, and when to stop: the selection part."""
    test: Path | None = None
    """A folder of class folders to measure by instead."""
    flip: bool = False
    """Also learn from pictures mirrored left to right."""
    shift: int | None = None
    """Also learn from pictures moved by so many pixels; by default a sixteenth of the size."""
    strict: bool = False
    """Refuse unreadable pictures and classes with few."""
    unreadable: float = 0.05
    """The share of the pictures that may be unreadable; they are named and left out."""
    finish: bool = False
    """Of training that was interrupted, take the best so far after one more epoch."""
    device: str = "cpu"
    precision: str = "float32"
    """How a step computes: float32, tf32 (a GPU's faster float32) or bf16 (mixed); answers are always in float32."""

    def __post_init__(self) -> None:
        self._plain_numbers()
        for name in ("weights", "test"):  # from Python it may be a word
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_path(path))
        if self.pretrained is False and self.frozen:
            raise ModelError("frozen keeps weights that training starts from, and pretrained=False starts from none")
        if not 0 < self.held_out < 1:
            raise ModelError(f"held_out is a share of each class, between 0 and 1, not {self.held_out}")
        if not 0 < self.selection < 1:
            raise ModelError(f"selection is a share of each class, between 0 and 1, not {self.selection}")
        if not 0 <= self.unreadable <= 1:
            raise ModelError(f"unreadable is a share of the pictures, from 0 to 1, not {self.unreadable}")
        if self.size is not None and not 4 <= self.size <= MOST_PIXELS:
            raise ModelError(f"size is from 4 to {MOST_PIXELS} pixels, not {self.size}")
        if self.shift is not None and not 0 <= self.shift <= MOST_PIXELS:
            raise ModelError(f"shift is from 0 to {MOST_PIXELS} pixels, not {self.shift}")
        if self.width is not None and not 0 < self.width <= MOST_WIDTH:
            raise ModelError(
                f"width is a share of the published one, above 0 and at most {MOST_WIDTH}, not {self.width}"
            )
        if self.align is not None and not 1 <= self.align <= MOST_ALIGN:
            raise ModelError(f"align is from 1 to {MOST_ALIGN} features, not {self.align}")
        if not 0 <= self.seed <= MOST_SEED:
            raise ModelError(f"seed is a whole number from 0 to {MOST_SEED}, not {self.seed}")
        if not self.growths or any(not 0 <= g <= 4 for g in self.growths):
            raise ModelError(f"growth is a share of the network, from 0 to 4, not {self.growth}")
        self.regime()  # its own mistakes are found here, before any picture is read

    def _plain_numbers(self) -> None:
        """The same number is the same text on disk, be it given as 1, 1.0 or numpy's."""
        for name, kind in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _number(name, value, kind))

    @staticmethod
    def of(**chosen: Any) -> Options:
        """From keyword arguments; a misspelt one names the nearest."""
        known = [field.name for field in fields(Options)]
        for key in chosen:
            if key not in known:
                raise ModelError(f"learn has no option '{key}'{nearest(key, known)} (its options: {', '.join(known)})")
        return Options(**chosen)

    @property
    def growths(self) -> tuple[float, ...]:
        """Those to try."""
        if self.growth is None:
            return (GROWTH,)
        return (float(self.growth),) if isinstance(self.growth, (int, float)) else tuple(map(float, self.growth))

    def regime(self) -> Regime:
        """How to train."""
        return Regime(
            optimizer="sgd",
            lr=self.lr,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=self.batch_size,
            epochs=1 if self.finish else self.epochs,
            patience=self.patience,
            keep="accurate",
            min_lr=self.lr / 100,
            clip=5.0,
            device=self.device,
            precision=self.precision,
        )


_NUMBERS: dict[str, type[int] | type[float]] = dict.fromkeys(
    ("size", "align", "epochs", "batch_size", "patience", "seed", "shift"), int
) | dict.fromkeys(("width", "margin", "lr", "held_out", "selection", "unreadable"), float)


def _number(name: str, value: Any, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(value)
        if number == value and math.isfinite(number):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ModelError(f"{name} is a {'whole' if kind is int else 'finite'} number, not {value!r}")


@dataclass(frozen=True)
class Watch:
    """Who is told what happens."""

    say: Callable[[str], None] = lambda text: None
    decoding: Told | None = None
    training: Callable[[Progress], None] | None = None
    wait: float | None = None
    """Seconds to wait for another process that changes the model; None waits as long as it takes."""
    adds: Callable[[Sequence[Addition]], None] = lambda additions: None


def default_network(size: int) -> tuple[str, float]:
    """A network that fits pictures of this size and little data, and its width.

    In one run each on 283 pictures of two digits at 64×64, LeNet at twice its width had all of 71 held-out ones right
    after 25 epochs and 17 seconds, a ResNet-18 at a quarter of its width 68 % after 6 epochs and 66 seconds.
    """
    if size <= 40:
        return "small", 1.0
    return ("lenet", 2.0) if size <= 96 else ("resnet18", 0.5)
