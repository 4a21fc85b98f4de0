"""A task that was to be learned and was not: its optimizer was made before it, does not know it, and says nothing."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeroforget.growing.per_task import PerTask

Begun = tuple[int, Tensor, int]
_steps = 0  # of all optimizers


def fresh(heads: PerTask) -> Begun:
    """What tells later whether anybody has written to the newest head: torch's count of that, and its smallest part.

    Neither would do alone. A step may be too small to change a number, and one through `.data` is not counted. How many
    steps optimizers have taken tells a step that missed it from one still to come, for which gradients are gathered.
    """
    _count_steps()
    bias = _bias(heads)
    return bias._version, bias.detach().clone(), _steps


def warn_if_untouched(heads: PerTask, begun: Begun | None, tasks: Sequence[str]) -> None:
    """Say so if gradients have reached the newest head and a step was taken that did not use them."""
    if begun is None or torch.compiler.is_compiling():
        return
    bias, (version, value, *steps) = _bias(heads), begun  # what was pickled before steps were counted has none
    if bias.grad is None or steps == [_steps] or bias._version != version or bias.dtype != value.dtype:
        return
    if torch.equal(value.to(bias.device), bias.detach()):
        warnings.warn(
            f"task '{tasks[-1]}' has gradients, but no step has changed it: an optimizer made before `add_task` does "
            "not know what is newborn. Make a new one for every task, from `net.newborn()`",
            stacklevel=4,
        )


@functools.cache
def _count_steps() -> None:
    """From now on."""

    def count(*_: object) -> None:
        global _steps
        if not torch.compiler.is_compiling():  # a count that changes would have a compiled step compiled anew
            _steps += 1

    register_optimizer_step_post_hook(count)


def _bias(heads: PerTask) -> Tensor:
    head = heads[-1]
    head = head[0] if isinstance(head, nn.ModuleList) else head  # of several the first
    assert isinstance(head, nn.Linear)
    return head.bias
