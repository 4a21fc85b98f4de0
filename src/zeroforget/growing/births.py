"""Births: for each feature the task it was born with, counted from 0. Everything else about forgetting follows.

Task k uses exactly what is born at or before k; learning task t trains exactly what is born at t. The paper's masks
are views of that: three states a feature, and the weights that each equation selects. What a network tells of its
tasks comes from there too: widths, masks, what they cost; one line by `repr`, a table by `print`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import torch
from torch import Tensor, nn

from zeroforget.axes.labels import births_of
from zeroforget.files.text import SmallTable
from zeroforget.growing import user_buffers
from zeroforget.growing.convert import Homes
from zeroforget.growing.growth import GrowthLimits, GrowthOverhead, TaskRecord, whole
from zeroforget.growing.layers import GrowingLayer, GrowingNorm, bits
from zeroforget.growing.rank_births import Rank, RankBirth, ranks_of
from zeroforget.growing.tensors import GrowingTensor


class State(IntEnum):
    """What a feature is to a task: the values of `GrowingNetwork.masks`.

    Example:
        >>> import zeroforget
        >>> zeroforget.State(2).name
        'NORMAL'
    """

    MASKED = 0
    """Born later: it does not exist for this task."""
    FORWARD_ONLY = 1
    """Born earlier: used, never changed."""
    NORMAL = 2
    """Born with this task: used and learned."""


def weight_births(*dims: Tensor) -> Tensor:
    """The birth of each weight: the latest of the births along its dimensions (out, in, ...)."""
    out = dims[0]
    for births in dims[1:]:
        out = torch.maximum(out.unsqueeze(-1), births)
    return out


def states(births: Tensor, task: int) -> Tensor:
    """The ternary mask of a task: State of each feature, as bytes."""
    return ((births <= task).to(torch.uint8) + (births == task).to(torch.uint8)).to(torch.uint8)


def learnable(births: Tensor, task: int) -> Tensor:
    """The binary mask m of equation 1: the features that are this task's own. Masks of two tasks never overlap."""
    return births == task


def used(births: Tensor, task: int) -> Tensor:
    """The mask n of equation 3: the features that this task or an earlier one created."""
    return births <= task


def own_weights(out: Tensor, into: Tensor, task: int) -> Tensor:
    """Equation 2, the binary case: weights between two features of this task alone."""
    return learnable(out, task)[:, None] & learnable(into, task)[None, :]


def newborn_weights(out: Tensor, into: Tensor, task: int) -> Tensor:
    """Equations 5 and 6: weights that this task can use and the one before could not, which are those it trains."""
    return weight_births(out, into) == task


def pack(mask: Tensor) -> Tensor:
    """Four features a byte, two bits each, the first in the lowest bits."""
    if mask.dim() != 1:
        raise ValueError(f"a mask to pack is one vector of states, not a tensor of shape {tuple(mask.shape)}")
    if len(mask) and (int(mask.min()) < State.MASKED or int(mask.max()) > State.NORMAL):
        raise ValueError("a mask to pack holds the states 0, 1 and 2 only")
    padded = torch.zeros(-(-len(mask) // 4) * 4, dtype=torch.uint8)
    padded[: len(mask)] = mask
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return (padded.view(-1, 4) << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, features: int) -> Tensor:
    """The states of `features` features out of their packed form."""
    if len(packed) != -(-features // 4):
        raise ValueError(f"{features} features pack into {-(-features // 4)} bytes, but there are {len(packed)}")
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return ((packed[:, None] >> shifts) & 3).flatten()[:features]


MOST = 32
"""Signs of its classes' names that a row shows."""


class Summary(nn.Module):
    """A network that knows its tasks and when each of its features was born."""

    body: nn.Module
    loose: nn.ModuleDict
    history: list[TaskRecord]
    limits: GrowthLimits
    start: float
    _births: dict[str, Tensor]
    _numbers_of: dict[str, int]
    _shares: list[dict[str, float]]
    _homes: Homes
    _skeleton: tuple[nn.Module]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks, in order."""
        return tuple(record.name for record in self.history)

    @property
    def births(self) -> dict[str, Tensor]:
        """Axis → the task that each of its features was born with."""
        return {axis: births.clone() for axis, births in self._births.items()}

    def births_along(self, layer: GrowingLayer) -> Tensor:
        """The births of a layer's outputs."""
        return births_of(layer.grown.labels[0], self._births)

    def widths(self, task: str | int | None = None) -> dict[str, int]:
        """Axis → how many features a task (the newest by default) uses."""
        if not self.history:
            return dict.fromkeys(self._births, 0)
        return self._widths(len(self.history) - 1 if task is None else self.number(task))

    def masks(self, task: str | int) -> dict[str, Tensor]:
        """Axis → the ternary mask of a task: 0 masked, 1 forward only, 2 normal (`State` names them)."""
        number = self.number(task)
        return {axis: states(births, number) for axis, births in self._births.items()}

    def number(self, task: str | int) -> int:
        """A task's number, counted from 0."""
        if isinstance(task, str) and task in self._numbers_of:
            return self._numbers_of[task]
        if (number := whole(task)) is not None and 0 <= number < len(self.history):
            return number
        known = ", ".join(f"'{name}' ({i})" for i, name in enumerate(self.tasks))
        told = f"the tasks are {known}" if known else "there is none yet, call add_task first"
        raise ValueError(f"no task {task!r}; {told}")

    @property
    def shares(self) -> dict[str, float]:
        """Axis → the share of its full width that is grown, before it was rounded to whole features."""
        return dict(self._shares[-1]) if self.history else dict.fromkeys(self._births, 0.0)

    def left(self) -> float:
        """How much this network may still grow, as a share of the full width or weights (its unit)."""
        return self.limits.left(self.shares) if self.history else self.start

    def overhead(self, task: str | int | None = None) -> GrowthOverhead:
        """The cost of zero forgetting: of one task, or of all."""
        chosen = range(len(self.history)) if task is None else [self.number(task)]
        mask_bits = sum(8 * -(-len(births) // 4) for births in self._births.values())
        layers = [m for m in self.body.modules() if isinstance(m, GrowingLayer)]
        norms = list(self._norms())
        return GrowthOverhead(
            masks=mask_bits * len(chosen),
            feature_norms=sum(bits(layer.norms[k]) for layer in layers for k in chosen),
            norms=sum(bits(norm.tasks[k]) for norm in norms for k in chosen if k > 0),
            rank_births=sum(birth.bits for k in chosen for birth in self._rank_births(k).values()),
        )

    def rank_numbers(self, rank: Rank) -> int:
        """How many numbers rank births of the next task would hold."""
        values = {name: tensor.value for name, tensor in self.leaning().items()}
        sizes = {name: (len(value), value.numel() // len(value)) for name, value in values.items()}
        ranks = ranks_of(rank, {name: min(size) for name, size in sizes.items()})
        return sum(wanted * sum(sizes[name]) for name, wanted in ranks.items())

    def ranks(self, task: str | int | None = None) -> dict[str, int]:
        """Weight → the rank of the step that a task (the newest by default) adds to it, where it adds one."""
        number = len(self.history) - 1 if task is None else self.number(task)
        return {name: birth.rank for name, birth in self._rank_births(number).items()}

    def _rank_births(self, task: int) -> dict[str, RankBirth]:
        births = {name: tensor.rank_birth(task) for name, tensor in self.leaning().items()}
        return {name: birth for name, birth in births.items() if birth is not None}

    def leaning(self) -> dict[str, GrowingTensor]:
        """The weights that may have rank births, by the names that they have in the plain network; tied ones once."""
        found: dict[str, GrowingTensor] = {}
        for path, module in self.body.named_modules():
            if isinstance(module, GrowingLayer):
                found[user_buffers.joined(path, "weight")] = module.grown
        for key, (path, name) in self._homes.items():
            tensor = self.loose[key]
            assert isinstance(tensor, GrowingTensor)
            found[user_buffers.joined(path, name)] = tensor
        first: dict[int, str] = {}
        return {
            name: tensor
            for name, tensor in found.items()
            if tensor.leans and first.setdefault(id(tensor), name) == name
        }

    def __repr__(self) -> str:
        tasks = ", ".join(repr(task.name) for task in self.history) or "none yet"
        return f"GrowingNetwork({self._kind()}; tasks: {tasks}; {self._features(len(self.history) - 1)} features)"

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().to_html()

    def _kind(self) -> str:
        return type(self._skeleton[0]).__name__

    def _features(self, task: int) -> int:
        return sum(self._widths(task).values())

    def _widths(self, task: int) -> dict[str, int]:
        return {axis: int((births <= task).sum()) for axis, births in self._births.items()}

    def _norms(self) -> Iterator[GrowingNorm]:
        return (module for module in self.body.modules() if isinstance(module, GrowingNorm))

    def _table(self) -> SmallTable:
        rows, before = [], 0
        for number, task in enumerate(self.history):
            now = self._features(number)
            rows.append((task.name, _classes(task), str(now), f"+{now - before}"))
            before = now
        tasks = "no task yet; call add_task" if not rows else "1 task" if len(rows) == 1 else f"{len(rows)} tasks"
        return SmallTable(f"GrowingNetwork from {self._kind()}: {tasks}", ("task", "classes", "features", "new"), rows)


def _classes(task: TaskRecord) -> str:
    """How many, and their names as far as there is room."""
    text = ", ".join(task.names)
    return f"{task.classes}" + (f" ({text if len(text) <= MOST else f'{text[:MOST].rstrip()}…'})" if text else "")
