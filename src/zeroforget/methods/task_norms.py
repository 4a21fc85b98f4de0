"""Normalization of each task's own, and every other buffer: what training moves in them must not change for a finished
task."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from zeroforget.methods.base import bits
from zeroforget.methods.importance import Kept

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
