"""A task that was to be learned and was not: its optimizer was made before it, does not know it, and says nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

Begun = tuple[int, Tensor]


def fresh(heads: nn.ModuleList) -> Begun:
    """What tells later whether anybody has written to the newest head: torch's count of that, and its smallest part.

    Neither would do alone. A step may be too small to change a number, and one through `.data` is not counted.
    """
    bias = _bias(heads)
    return bias._version, bias.detach().clone()


def warn_if_untouched(heads: nn.ModuleList, begun: Begun | None, tasks: Sequence[str]) -> None:
    """Say so if gradients have reached the newest head and nobody has used them."""
    if begun is None or torch.compiler.is_compiling():
        return
    bias, (version, value) = _bias(heads), begun
    if bias.grad is None or bias._version != version or bias.dtype != value.dtype:
        return
    if torch.equal(value.to(bias.device), bias.detach()):
        warnings.warn(
            f"task '{tasks[-1]}' has gradients, but no step has changed it: an optimizer made before `add_task` does "
            "not know what is newborn. Make a new one for every task, from `net.newborn()`",
            stacklevel=4,
        )


def _bias(heads: nn.ModuleList) -> Tensor:
    head = heads[-1]
    assert isinstance(head, nn.Linear)
    return head.bias
