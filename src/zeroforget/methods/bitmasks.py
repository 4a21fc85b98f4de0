"""A bit per weight and task, packed eight to a byte: what methods that mask weights really keep."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zeroforget.methods.base import bits


def pack(mask: Tensor) -> Tensor:
    """A vector of booleans as bytes, the first in the lowest bit; the last byte is filled up with zeros."""
    padded = torch.zeros(-(-len(mask) // 8) * 8, dtype=torch.uint8, device=mask.device)
    padded[: len(mask)] = mask
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded.view(-1, 8) * powers).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack`."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 1).bool().flatten()[:count]


class BitMasks(nn.Module):
    """For each task one bit for every element of the named tensors."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        self.tasks = 0

    @property
    def count(self) -> int:
        """How many bits a task takes, before they are packed."""
        return sum(shape.numel() for shape in self.shapes.values())

    def add(self, device: torch.device) -> None:
        """Room for one more task, all zeros."""
        empty = torch.zeros(-(-self.count // 8), dtype=torch.uint8, device=device)
        self.register_buffer(f"task{self.tasks}", empty)
        self.tasks += 1

    def drop(self) -> None:
        """Take the newest back."""
        self.tasks -= 1
        delattr(self, f"task{self.tasks}")

    @torch.no_grad()
    def write(self, task: int, masks: Mapping[str, Tensor]) -> None:
        """Set a task's bits."""
        packed = self._packed(task)
        if self.shapes:
            packed.copy_(pack(torch.cat([masks[name].flatten() for name in self.shapes])))

    def read(self, task: int) -> dict[str, Tensor]:
        """A task's bits as booleans in the tensors' shapes."""
        parts = unpack(self._packed(task), self.count).split([shape.numel() for shape in self.shapes.values()])
        return {n: part.view(shape) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def union(self, tasks: int) -> dict[str, Tensor]:
        """Where any of the first so many tasks has a one."""
        device = self._packed(0).device
        out = {n: torch.zeros(shape, dtype=torch.bool, device=device) for n, shape in self.shapes.items()}
        for task in range(tasks):
            for name, mask in self.read(task).items():
                out[name] |= mask
        return out

    def bits(self) -> int:
        """What all tasks' masks occupy."""
        return bits(*self.buffers())

    def _packed(self, task: int) -> Tensor:
        return self.get_buffer(f"task{task}")


def maskable(net: nn.Module) -> dict[str, torch.Size]:
    """The weights that masks act on: every matrix and kernel that may learn, no bias and no normalization."""
    return {name: p.shape for name, p in net.named_parameters() if p.dim() > 1 and p.requires_grad}
