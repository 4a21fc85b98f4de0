"""Positions along a dimension of a tensor, and how to read and write there: a slice where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
