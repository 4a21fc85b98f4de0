"""A task that was to be learned and was not: its optimizer was made before it, does not know it, and says nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def fresh(heads: nn.ModuleList) -> Tensor:
    """What tells later whether the newest head has learned anything: a copy of its smallest part."""
    return _bias(heads).detach().clone()


def warn_if_untouched(heads: nn.ModuleList, begun: Tensor | None, tasks: Sequence[str]) -> None:
    """Say so if gradients have reached the newest head and nobody has used them."""
    if (
        begun is None
        or (bias := _bias(heads)).grad is None
        or bias.dtype != begun.dtype
        or torch.compiler.is_compiling()
    ):
        return
    if torch.equal(begun.to(bias.device), bias.detach()):
        warnings.warn(
            f"task '{tasks[-1]}' has gradients, but no step has changed it: an optimizer made before `add_task` does "
            "not know what is newborn. Make a new one for every task, from `net.newborn()`",
            stacklevel=4,
        )


def _bias(heads: nn.ModuleList) -> Tensor:
    head = heads[-1]
    assert isinstance(head, nn.Linear)
    return head.bias
