"""What may be chosen about learning a task. Each option is written here and nowhere else: the command line,
`Model.learn` and the docs' table take it from here."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_type_hints

from zeroforget.files import paths
from zeroforget.files.text import nearest
from zeroforget.store.errors import BadOption, ModelError

if TYPE_CHECKING:
    from zeroforget.training import Regime

MOST_PIXELS = 512
MOST_SEED = 2**63
MOST_WIDTH = 16
"""Of a network of ours, as a share of the published one."""
MOST_ALIGN = 1024
MOST_RANK = 4096
MOST_FOLDS = 100
GROWTH = 0.1
SEARCH = (0.0, 0.05, 0.1, 0.2)
"""The growths that a search tries."""
Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


def option(default: Value, about: str, *, flag: str | None = None) -> Value:
    """A field of `Options`: its default, what it is for, and its name on the command line if that is another one."""
    made: Value = field(default=default, metadata={"about": about, "flag": flag})
    return made


@dataclass(frozen=True)
class Options:
    """How to learn. What concerns the network itself counts when the model is made, with its first task."""

    network: str | None = option(
        None,
        "The network to begin with (zeroforget networks lists them); by default the one that `weights` are of, "
        "`compact` with the package's weights for color photos of 32 pixels and more, or one that fits `size`.",
    )
    width: float | None = option(None, "Its width, as a share of the published one.")
    size: int | None = option(None, "Pixels of each side of its pictures; 64 by default.")
    gray: bool | None = option(None, "One channel, or three.", flag="--gray/--color")
    weights: Path | None = option(
        None, "A file of weights to start from: safetensors, or a state dict in a .pt or .pth file."
    )
    pretrained: bool | None = option(
        None,
        "Whether to start from published weights: those in the package, or a library's own; by default the package's, "
        "for color pictures, unless a network is named.",
        flag="--pretrained/--scratch",
    )
    frozen: bool | None = option(
        None,
        "Whether the weights to start from stay as they are in every task (the default): a first task then learns a "
        "head alone, and later ones what they add. Otherwise the first task trains them.",
        flag="--frozen/--tune",
    )
    align: int | None = option(
        None, "Layers grow to multiples of this; 8 by default on a GPU. Counts when the model is made."
    )
    growth: float | Sequence[float] | str | None = option(
        None,
        "What a later task adds, as a share of the first network, 0.1 by default; or 'search', or several to try: "
        "0,0.05,0.1. A first task makes the network and adds nothing to it.",
    )
    rank: int = option(
        0, "The rank of the step by which older weights lean towards a later task; 16 is usual, 0 is none."
    )
    budget: int | str | None = option(
        None,
        "What a later task may add, such as 5MB: tries it as growth, as rank and half as each, and keeps the best.",
    )
    margin: float = option(0.015, "How much accuracy a search may give up for a smaller growth.")
    epochs: int | None = option(
        None, "Epochs at most: 60 by default, and 10, all of them, for what a task adds to frozen features."
    )
    lr: float | None = option(
        None,
        "Learning rate to begin with: 0.02 by default, and 0.0005, by AdamW, for what a task adds to frozen features.",
    )
    batch_size: int = option(32, "Pictures in a step.")
    patience: int = option(4, "Epochs without a better loss on what is held out before the learning rate is divided.")
    seed: int = option(0, "Decides all that is random.")
    held_out: float = option(0.2, "The share of each class that is set apart to measure by: the test part.")
    selection: float = option(
        0.15, "The share of the rest that chooses which weights are kept, and when to stop: the selection part."
    )
    test: Path | None = option(None, "A folder of class folders to measure by instead.")
    folds: int | None = option(
        None,
        "Parts of a cross-validation, which tests every picture once; 0 is none. 5 by default for a head on frozen "
        "features with fewer than 200 test pictures. What is trained is trained once more for each part.",
    )
    flip: bool | None = option(
        None,
        "Also learn from pictures mirrored left to right; by default only what is added to frozen features does, where "
        "pictures are in color.",
        flag="--flip/--no-flip",
    )
    shift: int | None = option(
        None, "Also learn from pictures moved by so many pixels; by default a sixteenth of the size."
    )
    strict: bool = option(False, "Refuse unreadable pictures and small classes.")
    unreadable: float = option(0.05, "The share of the pictures that may be unreadable; they are named and left out.")
    again: bool = option(
        False, "Learn a task again as a new version, such as dogs@2: both stay, and the newest answers to dogs."
    )
    finish: bool = option(False, "End an interrupted training: take the best so far, after one more epoch.")
    device: str = option("auto", "cpu, cuda or cuda:1; auto is a GPU where torch sees one, else cpu.")
    precision: Literal["float32", "tf32", "bf16"] = option(
        "float32", "How steps compute: tf32 and bf16 are faster on a GPU. Answers stay in float32."
    )

    def __post_init__(self) -> None:
        self._plain_numbers()
        for name in ("weights", "test"):  # from Python it may be a word
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, paths.as_path(path, ModelError))
        if self.pretrained is False and self.frozen:
            raise ModelError("frozen keeps weights that training starts from, and pretrained=False starts from none")
        if self.device == "auto":
            object.__setattr__(self, "device", _device())
        if isinstance(self.growth, str):
            object.__setattr__(self, "growth", _growth(self.growth))
        if self.budget is not None:
            object.__setattr__(self, "budget", _bytes(self.budget))
        if self.budget is not None and (self.growth is not None or self.rank):
            raise BadOption("budget", "says how much to grow and to lean: leave out growth and rank")
        self._within("rank", "a whole number from", 0, MOST_RANK)
        self._within("size", "from", 4, MOST_PIXELS, " pixels")
        self._within("shift", "from", 0, MOST_PIXELS, " pixels")
        self._within("align", "from", 1, MOST_ALIGN, " features")
        self._within("folds", "none (0) or a whole number from", 0, MOST_FOLDS)
        if self.folds == 1:
            raise BadOption("folds", "is none (0), or parts of which each is tested by the others: 2 or more")
        self._within("seed", "a whole number from", 0, MOST_SEED)
        if not 0 < self.held_out < 1:
            raise BadOption("held_out", f"is a share of each class, between 0 and 1, not {self.held_out}")
        if not 0 < self.selection < 1:
            raise BadOption("selection", f"is a share of each class, between 0 and 1, not {self.selection}")
        if not 0 <= self.unreadable <= 1:
            raise BadOption("unreadable", f"is a share of the pictures, from 0 to 1, not {self.unreadable}")
        if self.width is not None and not 0 < self.width <= MOST_WIDTH:
            raise BadOption(
                "width", f"is a share of the published one, above 0 and at most {MOST_WIDTH}, not {self.width}"
            )
        if not self.growths or any(not 0 <= g <= 4 for g in self.growths):
            raise BadOption("growth", f"is a share of the network, from 0 to 4, not {self.growth}")
        for name in ("lr", "epochs"):
            if (given := getattr(self, name)) is not None and given <= 0:
                raise BadOption(name, f"must be positive, not {given}")
        self.regime()  # its own mistakes are found here, before any picture is read

    def _within(self, name: str, what: str, low: int, high: int, unit: str = "") -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise BadOption(name, f"is {what} {low} to {high}{unit}, not {value}")

    def _plain_numbers(self) -> None:
        """The same number is the same text on disk, be it given as 1, 1.0 or numpy's."""
        for each, hint in described():
            value, kinds = getattr(self, each.name), {hint, *get_args(hint)} & {int, float}
            if len(kinds) == 1 and each.name not in {"growth", "budget"} and value is not None:
                object.__setattr__(self, each.name, _number(each.name, value, kinds.pop()))

    @staticmethod
    def of(**chosen: Any) -> Options:
        """From keyword arguments; a misspelt one names the nearest."""
        known = [each.name for each in fields(Options)]
        for key in chosen:
            if key not in known:
                raise ModelError(f"learn has no option '{key}'{nearest(key, known)} (its options: {', '.join(known)})")
        return Options(**chosen)

    @property
    def adds(self) -> bool:
        """Whether a later task is asked to add more than a head."""
        return self.growth is not None or self.budget is not None or self.rank > 0

    @property
    def growths(self) -> tuple[float, ...]:
        """Those to try."""
        if self.growth is None:
            return (GROWTH,)
        return (float(self.growth),) if isinstance(self.growth, (int, float)) else tuple(map(float, self.growth))

    def regime(self, *, added: bool = False) -> Regime:
        """How to train; what is added to frozen features starts from a head that fits, and moves less."""
        from zeroforget.training import Regime  # needs torch, which the command line's --help does not

        rate, epochs, optimizer, schedule, keep = (
            (0.0005, 10, "adamw", "cosine", "last") if added else (0.02, 60, "sgd", "patience", "accurate")
        )
        rate, epochs = self.lr or rate, self.epochs or epochs
        return Regime(
            optimizer=optimizer,
            lr=rate,
            options={} if added else {"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=self.batch_size,
            epochs=1 if self.finish else epochs,
            schedule=schedule,
            patience=self.patience,
            keep=keep,
            min_lr=rate / 100,
            clip=5.0,
            device=self.device,
            precision=self.precision,
        )


def described() -> Iterator[tuple[Field[Any], Any]]:
    """Each option with its type."""
    hints = get_type_hints(Options)
    yield from ((each, hints[each.name]) for each in fields(Options))


def about(name: str) -> str:
    """What an option is for."""
    return str(next(each.metadata["about"] for each in fields(Options) if each.name == name))


def with_options(
    kind: Callable[[Field[Any], Any], tuple[Any, Any]] = lambda each, hint: (hint, each.default),
) -> Callable[[Function], Function]:
    """Decorate a function that ends with `**chosen`: its signature shows each option as a keyword argument of its own,
    of the type and with the default that `kind` gives."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        first = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        for each, hint in described():
            annotation, default = kind(each, hint)
            first.append(
                inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        everything = [*first, *(p for p in own if p not in first)]
        function.__signature__ = signature.replace(parameters=everything)  # type: ignore[attr-defined]
        return function

    return decorate


def _growth(text: str) -> float | Sequence[float]:
    if text == "search":
        return SEARCH
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        wanted = "wants a share such as 0.1, several such as 0,0.05,0.1, or 'search'"
        raise BadOption("growth", f"{wanted}; got '{text}'") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _bytes(value: int | str) -> int:
    """A number of bytes: 5000000, 500kB, 5MB."""
    text = str(value).strip().lower().removesuffix("b")
    scale = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:], 1)
    try:
        found = round(float(text.rstrip("kmg")) * scale)
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise BadOption("budget", f"is a number of bytes, such as 500kB or 5MB, not {value!r}")
    return found


def _number(name: str, value: Any, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(value)
        if number == value and math.isfinite(number):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadOption(name, f"is a {'whole' if kind is int else 'finite'} number, not {value!r}")


def _device() -> str:
    """A GPU where there is one."""
    import torch  # the command line's --help does without

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_network(size: int) -> tuple[str, float]:
    """A network that fits pictures of this size and little data, and its width, where no weights are to start from.

    In one run each on 283 pictures of two digits at 64×64, LeNet at twice its width had all of 71 held-out ones right
    after 25 epochs and 17 seconds, a ResNet-18 at a quarter of its width 68 % after 6 epochs and 66 seconds.
    """
    if size <= 40:
        return "small", 1.0
    return ("lenet", 2.0) if size <= 96 else ("resnet18", 0.5)
