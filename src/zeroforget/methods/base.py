"""The hooks that every method has. Unchanged, the base class is fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.data import Task
from zeroforget.training import Fit, FitLog, Regime
from zeroforget.training.evaluate import Predictor
from zeroforget.training.step import partner


@dataclass(frozen=True)
class TaskSpec:
    """All of a task that decides structure."""

    name: str
    classes: int


@dataclass(frozen=True)
class Overhead:
    """Bits that a method keeps beside the network and its heads, counted from the tensors it really holds."""

    training: int = 0
    """While a task is learned."""
    inference: int = 0
    """To serve every task afterwards."""
    packed: int | None = None
    """The same in the smallest code that the method's paper or a plain index gives it, where there is one."""
    spared: int = 0
    """Bits of the network itself that need not be kept, since a seed makes them again."""


def bits(*tensors: Tensor) -> int:
    """How many bits these tensors occupy."""
    return sum(t.numel() * t.element_size() * 8 for t in tensors)


def finite(low: float = -math.inf, **options: float) -> None:
    """Raise ValueError for an option of a method that is no finite number, or below `low`."""
    for name, value in options.items():
        if not (math.isfinite(value) and value >= low):
            least = "" if low == -math.inf else f"{low:g} or more, and "
            raise ValueError(f"{name} must be {least}finite, not {value}")


def adams_rate(lr: float | None) -> float | None:
    """A learning rate for Adam in the place of the regime's optimizer; None: the regime's."""
    if lr is not None and not 0 < lr < math.inf:
        raise ValueError(f"lr is Adam's learning rate, so above 0 (or None for the regime's optimizer), not {lr}")
    return lr


def learn_only(given: Iterable[nn.Parameter], learning: Iterable[nn.Parameter]) -> None:
    """Of the parameters given, those that learn get gradients; for the others none is even computed."""
    chosen = {id(parameter) for parameter in learning}
    for parameter in given:
        parameter.requires_grad_(id(parameter) in chosen)


class Method(nn.Module):
    """A network with a head for each task, and how it learns the next one.

    A subclass says only what differs. Its options are the keyword arguments of its `__init__`; what it claims are class
    attributes, which one test suite holds it to. Tensors it keeps belong in parameters or buffers, so that saving,
    resuming and moving to a device need no further code.

    Example:
        >>> import torch, zeroforget
        >>> class Shrinking(zeroforget.Method):
        ...     \"\"\"Fine-tuning that also keeps weights small.\"\"\"
        ...     def __init__(self, net, example, *, strength: float = 0.001):
        ...         super().__init__(net, example)
        ...         self.strength = strength
        ...     def loss(self, x, y, task):
        ...         small = sum(weight.square().sum() for weight in self.trainable())
        ...         return super().loss(x, y, task) + self.strength * small
        >>> body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU())
        >>> method = Shrinking(body, torch.randn(2, 4), strength=0.01)
    """

    name: ClassVar[str] = ""
    """What the command line calls it."""
    family: ClassVar[str] = "baseline"
    zero_forgetting: ClassVar[bool] = False
    uses_past_data: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    needs_backbone: ClassVar[bool] = False
    overhead_formula: ClassVar[str] = "none"
    """As the paper's table S1 says it."""
    graph_safe: ClassVar[bool] = False
    """Whether every step runs the same operators on the same tensors, so that a GPU may record and replay it.

    In `loss`, `after_backward` and `after_step`: no number that changes from step to step but in a tensor that
    `before_step` fills, no look at a tensor's value, nothing kept for the next step but in place and in `moving`.
    """
    revision: ClassVar[int] = 0
    """Raised when the same options learn otherwise than before: a run that older code began does not go on."""
    tradeoff: ClassVar[str | None] = None
    """The option that trades stability for plasticity, if there is one: larger means less forgetting."""

    @classmethod
    def names(cls) -> dict[str, dict[str, Any]]:
        """Every name on the command line, with the options that it implies."""
        return {cls.name: {}} if cls.__dict__.get("name") else {}

    @classmethod
    def settled(cls, options: Mapping[str, Any], regime: Regime) -> dict[str, Any]:
        """The options in force under a regime: what one of them leaves open may depend on the device."""
        return dict(options)

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.specs: list[TaskSpec] = []
        self.heads = nn.ModuleList()
        self.smoothing = 0.0
        self.share: Tensor | None = None
        self.coupled = True
        self.step_rate = 0.0
        self.net = net
        self._set_example(example)

    def _set_example(self, example: Tensor) -> None:
        self.register_buffer("example", example.detach().clone()[:2], persistent=False)

    def features(self) -> int:
        """The width of what the network hands to a head."""
        was = self.net.training
        with torch.no_grad():
            out: Tensor = self.net.eval()(self.get_buffer("example"))
        self.net.train(was)
        if out.dim() != 2:
            raise ValueError(f"the network must return (batch, features) for a head; it returned {tuple(out.shape)}")
        return out.shape[1]

    # Structure -------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec) -> None:
        """Make room for a task: structure only, so that loading can replay it."""
        for head in self.heads:
            head.requires_grad_(False)
        like = next(self.parameters(), self.get_buffer("example"))  # a network may have no parameters
        self.heads.append(nn.Linear(self.features(), spec.classes, device=like.device, dtype=like.dtype))
        self.specs.append(spec)

    def drop_task(self) -> None:
        """Take back the newest task's structure."""
        self.specs.pop()
        del self.heads[-1]
        if len(self.heads):
            self.heads[-1].requires_grad_(True)

    def structure(self) -> list[dict[str, Any]]:
        """What `replay` needs, as plain JSON values: one entry for each task, here its name and its classes.

        A method whose shapes follow from more than that (how much it grew, say) adds it to each task's entry.
        """
        return [asdict(spec) for spec in self.specs]

    def replay(self, structure: Sequence[dict[str, Any]]) -> None:
        """Make room for these tasks again, in a method as it is built: afterwards saved tensors fit by name."""
        for entry in structure:
            self.add_task(TaskSpec(entry["name"], entry["classes"]))

    # Learning --------------------------------------------------------------------------------------------------

    def learn(self, task: Task, fit: Fit, past: Sequence[Task] = ()) -> FitLog:
        """Learn one more task. `past` is handed only to methods that declare `uses_past_data`.

        Whatever interrupts it, at whatever phase, leaves the method as it was before.
        """
        task.check()
        before = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        self.add_task(TaskSpec(task.name, len(task.classes)))
        try:
            log = self.train_task(task, fit)
            self.end_task(task, fit)
        except BaseException:
            self.drop_task()
            self.load_state_dict(before)
            raise
        return log

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """The phases of training: one, unless a method says otherwise. The log returned is that of the task."""
        return fit(self, task, len(self.specs) - 1)

    def end_task(self, task: Task, fit: Fit) -> None:
        """After training: estimate importance, prune, merge."""

    def trainable(self) -> Iterable[nn.Parameter]:
        """All that the optimizer may touch. Old heads never are."""
        yield from self.net.parameters()
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """All tensors that training may change: saved each epoch, put back to those of the best one."""
        return dict(self.state_dict())

    def tensors_of(self, *parts: str) -> dict[str, Tensor]:
        """Those tensors of the state that belong to these modules, or are these parameters, given by their paths."""
        inside = tuple(f"{part}." for part in parts)
        return {name: t for name, t in self.state_dict().items() if name.startswith(inside) or name in parts}

    def newest_head(self) -> str:
        """The path of the head that is being learned."""
        return f"heads.{len(self.heads) - 1}"

    def before_step(self, done: float) -> None:
        """Before each batch; `done` is the share of the epoch that has passed."""

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """What a step of training makes smaller."""
        return self.cross_entropy(self(x, task), y)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean over a batch, with the regime's label smoothing; of mixed images, for both labels of each."""
        if self.share is None:
            logits = self.own(logits, y)
            return self._smooth(logits, y).mean() if self.smoothing else F.cross_entropy(logits, y)
        other = partner(y)
        both = self._smooth(self.own(logits, y), y), self._smooth(self.own(logits, other), other)
        return torch.lerp(both[1], both[0], self.share).mean()

    def own(self, logits: Tensor, y: Tensor) -> Tensor:
        """The logits among which an image with this label is told: minus infinity elsewhere."""
        return logits

    def _smooth(self, logits: Tensor, y: Tensor) -> Tensor:
        """Each image's cross-entropy, smoothed among the classes whose logit is above minus infinity."""
        losses = F.cross_entropy(logits, y, reduction="none")
        if not self.smoothing:
            return losses
        logs = F.log_softmax(logits, 1)
        possible = logits > -torch.inf
        even = -logs.where(possible, 0.0).sum(1) / possible.sum(1)
        return (1 - self.smoothing) * losses + self.smoothing * even

    def after_backward(self) -> None:
        """Gradients are there, the step is not yet made."""

    def after_step(self) -> None:
        """The step is made."""

    # Use -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, task: int) -> Tensor:
        """The logits of one task."""
        logits: Tensor = self.heads[task](self.net(x))
        return logits

    def predictor(self, task: int) -> Predictor:
        """What answers for a task: evaluation, export and proof use this and nothing else."""
        self.eval()
        return lambda x: self(x, task)

    def score(self, predictor: Predictor, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]:
        """The loss of each image and whether it was classified right."""
        logits = predictor(x)
        return F.cross_entropy(logits, y, reduction="none"), logits.argmax(1) == y

    def overhead(self) -> Overhead:
        """What this method keeps beside the network and its heads."""
        return Overhead()
