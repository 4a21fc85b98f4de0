"""What methods keep of each task: a bit per weight, packed eight to a byte; normalization and buffers of its own."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from zeroforget.methods.base import bits
from zeroforget.methods.importance import Kept


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


class FrozenWeights:
    """Of a network's named weights only the elements marked in `free` may move; the others keep their bits."""

    def __init__(self, net: nn.Module, free: Mapping[str, Tensor]) -> None:
        self.free = dict(free)
        self.weights = {name: net.get_parameter(name) for name in free}
        self.still = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def silence(self) -> None:
        """After the backward pass: frozen weights have no say in how the others move."""
        for name, free in self.free.items():
            if (gradient := self.weights[name].grad) is not None:
                gradient.masked_fill_(~free, 0.0)

    @torch.no_grad()
    def restore(self) -> None:
        """After a step: momentum and weight decay move weights without a gradient, so the old bits are written back."""
        for name, free in self.free.items():
            weight = self.weights[name]
            torch.where(free, weight, self.still[name], out=weight)


SYMBOL = 7
"""So many tasks' bits are one symbol, as in WSN's paper; more tasks take several codes."""
LENGTH = 8
"""Bits that the length of a code word takes in the code's table: canonical codes follow from their lengths."""


def code_lengths(counts: Sequence[int]) -> list[int]:
    """How long each symbol's code word is, given how often each comes (Huffman's algorithm); 0: it never does."""
    heap = [(count, place, [place]) for place, count in enumerate(counts) if count]
    lengths = [0] * len(counts)
    if len(heap) == 1:
        lengths[heap[0][1]] = 1
        return lengths
    heapq.heapify(heap)
    while len(heap) > 1:
        (a, _, left), (b, place, right) = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in left + right:
            lengths[symbol] += 1
        heapq.heappush(heap, (a + b, place, left + right))
    return lengths


@torch.no_grad()
def coded_bits(masks: BitMasks) -> int | None:
    """What all tasks' masks occupy, coded, the codes' tables included; None while the newest holds nothing."""
    packed = list(masks.buffers())
    if not packed or packed[-1].is_meta or not packed[-1].any():
        return None
    total = 0
    for first in range(0, masks.tasks, SYMBOL):
        tasks = range(first, min(first + SYMBOL, masks.tasks))
        symbols = torch.zeros(masks.count, dtype=torch.uint8, device=packed[0].device)
        for place, task in enumerate(tasks):
            symbols += torch.cat([m.flatten() for m in masks.read(task).values()]).to(torch.uint8) << place
        counts = torch.bincount(symbols.int(), minlength=2 ** len(tasks)).tolist()
        total += sum(n * length for n, length in zip(counts, code_lengths(counts), strict=True))
        total += LENGTH * len(counts)
    return total


NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)


def norms(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every normalization layer, with its path."""
    return ((path, module) for path, module in net.named_modules() if isinstance(module, NORMS))


def norm_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Statistics and affine parameters of every normalization, by their full names."""
    return {f"{path}.{name}": t for path, module in norms(net) for name, t in module.state_dict(keep_vars=True).items()}


def task_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Those of every normalization, and all buffers beside: a running mean of somebody's own, say."""
    return norm_tensors(net) | dict(net.named_buffers())


class TaskNorms(nn.Module):
    """What each finished task's normalization and buffers were; the network holds those of the newest task."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.names = list(task_tensors(net))
        self.tasks = nn.ModuleList()

    def add(self, net: nn.Module) -> None:
        """Room for one more task."""
        self.tasks.append(Kept(task_tensors(net)))

    def drop(self) -> None:
        """Take the newest back."""
        del self.tasks[-1]

    def store(self, task: int, net: nn.Module) -> None:
        """Keep the network's present tensors as this task's."""
        self._of(task).put(task_tensors(net))

    def read(self, task: int) -> dict[str, Tensor]:
        """A task's tensors, by the names that the network gives them."""
        return {name: self._of(task)[name] for name in self.names}

    def bits(self) -> int:
        """What the tasks' tensors occupy beside the network's own."""
        return bits(*self.tasks[1:].buffers())

    def _of(self, task: int) -> Kept:
        kept = self.tasks[task]
        assert isinstance(kept, Kept)
        return kept


@torch.no_grad()
def overwrite(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put values in place into parameters and buffers of these names."""
    own = net.state_dict(keep_vars=True) | dict(net.named_buffers())
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def plain_copy(net: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A network of its own for serving: some tensors replaced, in eval mode, without gradients."""
    twin = copy.deepcopy(net)
    overwrite(twin, tensors)
    return twin.eval().requires_grad_(False)
