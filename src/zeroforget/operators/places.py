"""Positions along a dimension of a tensor, and what else passes over activations are given, whatever computes them: a
layer's scale and shift, a normalization's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LANES = 8
"""Features of a position are read so many at a time, where they begin at a multiple of it."""


@dataclass(frozen=True, eq=False)
class Places:
    """Positions along a dimension; a run of neighbours is a slice, so that reading it copies nothing."""

    index: Tensor
    start: int | None
    _elsewhere: dict[torch.device, Tensor] = field(default_factory=dict)
    _count: int = field(init=False)  # a step asks for it many times, and a tensor is slow to answer

    def __post_init__(self) -> None:
        object.__setattr__(self, "_count", self.index.numel())

    @staticmethod
    def where(chosen: Tensor) -> Places:
        """The positions where a boolean vector is true."""
        index = chosen.nonzero().squeeze(1)
        if len(index) == 0:
            return Places(index, 0)
        run = int(index[-1]) - int(index[0]) + 1 == len(index)
        return Places(index, int(index[0]) if run else None)

    def __len__(self) -> int:
        return self._count

    def on(self, device: torch.device) -> Tensor:
        """The positions on a device, brought there once: a step that is recorded may copy nothing from the host."""
        if device == self.index.device:
            return self.index
        if device not in self._elsewhere:
            self._elsewhere[device] = self.index.to(device)
        return self._elsewhere[device]

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """These positions of a tensor: a view where they are a run, else a copy."""
        if self.start is not None:
            return tensor.narrow(dim, self.start, self._count)
        return tensor.index_select(dim, self.on(tensor.device))

    def put(self, tensor: Tensor, dim: int, values: Tensor) -> None:
        """Write values at these positions, in place."""
        if self.start is not None:
            tensor.narrow(dim, self.start, self._count).copy_(values)
        else:
            tensor.index_copy_(dim, self.on(tensor.device), values.to(tensor.dtype))


def select(tensor: Tensor, chosen: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The part of a tensor where each (dimension, boolean vector) is true, as a contiguous copy of its own."""
    for dim, where in chosen:
        tensor = Places.where(where).take(tensor, dim)
    return tensor.clone(memory_format=torch.contiguous_format)


def every(columns: int) -> Places:
    """The first so many places."""
    return Places(torch.arange(columns), 0)


def positions(places: Places, size: int) -> Tensor:
    """For each of `size` positions its number among the places, or -1."""
    at = torch.full((size,), -1, dtype=torch.int32)
    at[places.index] = torch.arange(len(places), dtype=torch.int32)
    return at


def matrix(x: Tensor) -> Tensor:
    """Of images, one row for each position and one column for each channel: a view. Anything else is a matrix."""
    return x.permute(0, 2, 3, 1).view(-1, x.shape[1]) if x.dim() == 4 else x


@dataclass(frozen=True, eq=False)
class Affine:
    """Scale and shift of a layer's outputs, from its biases and its feature normalization (equation 7)."""

    bias: Tensor | None
    """All biases; those of new outputs are not up to date here."""
    born: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    born_at: Tensor
    """For each output its place in `born`, or -1."""
    covered_at: Tensor
    """For each output its place in `gamma` and `beta`, or -1."""

    @property
    def present(self) -> bool:
        """Whether there is anything to add or to scale by."""
        return self.bias is not None or self.gamma is not None


@dataclass(frozen=True, eq=False)
class Vectors:
    """γ (y + b) + β, written as scale · y + shift."""

    scale: Tensor | None = None
    """γ, and 1 where nothing is covered."""
    beta: Tensor | None = None
    """β, and 0 where nothing is covered."""
    shift: Tensor | None = None
    """γ b + β."""


@dataclass(frozen=True)
class Sums:
    """Gradients that are sums over rows: of γ, of β, and of the bias."""

    gamma: Tensor
    beta: Tensor
    bias: Tensor


@dataclass(frozen=True, eq=False)
class Norm:
    """Batch normalization: what is learned, what is tracked (in place), and its numbers."""

    weight: Tensor
    bias: Tensor
    mean: Tensor | None
    var: Tensor | None
    momentum: float
    eps: float


@dataclass(frozen=True, eq=False)
class Moments:
    """Of each feature of a batch: its mean, and 1 / sqrt(variance + eps)."""

    mean: Tensor
    inverse: Tensor
