"""What would go wrong around a growing network: an optimizer made before the task, torch's wrappers for processes."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeroforget.growing.per_task import PerTask
from zeroforget.growing.rank_births import RankBirth
from zeroforget.growing.tensors import GrowingTensor
from zeroforget.processes import current

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


Wrapper = weakref.ref[Any]
"""A wrapper that was found to be good; who keeps it keeps no copy of the network."""
_FSDP = (
    "FSDP cannot shard a growing network: what is newborn is written into frozen weights at every step, whole. Use "
    "DistributedDataParallel; its gradients and an optimizer's moments are those of newborn parts alone"
)


def frozen_buffers(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that no step changes, with their names: they need not be sent before each step."""
    for path, module in net.named_modules():
        if isinstance(module, (GrowingTensor, RankBirth)):
            prefix = f"{path}." if path else ""
            yield from ((prefix + name, buffer) for name, buffer in module._buffers.items() if buffer is not None)


def check_wrapped(net: nn.Module, checked: Wrapper | None) -> Wrapper | None:
    """Raise ValueError if the wrapper around this forward would train the newest task wrong.

    Returns the wrapper, which is good until the next task; `checked` is what was found to be good before.
    """
    if torch.compiler.is_compiling() or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return checked
    if hasattr(net, "reshard") or not all(isinstance(p, nn.Parameter) for p in _newborn(net)):
        raise ValueError(_FSDP)
    wrapper: Any = DistributedDataParallel._active_ddp_module
    if wrapper is None or (checked is not None and checked() is wrapper):
        return checked
    reduced = {id(parameter) for parameter in wrapper._module_parameters}
    if missed := [name for name, parameter in net.named_parameters() if id(parameter) not in reduced]:
        raise ValueError(
            "this DistributedDataParallel was made before `add_task`: it would not add up the gradients of "
            f"{len(missed)} newborn parameters, such as '{missed[0]}', and each process would learn something else. "
            "Make a new one, and a new optimizer, for every task"
        )
    advice = (
        "Give each the same file or the same seed; and after each task send the first one's statistics to the others: "
        "for tensor in net.moving().values(): torch.distributed.broadcast(tensor, 0)"
    )
    current(wrapper.process_group).check_same(_frozen(net), "what earlier tasks left is not the same", advice)
    return weakref.ref(wrapper)


def _frozen(net: nn.Module) -> dict[str, Tensor]:
    """What earlier tasks left, newborn values in the whole of their tensors included."""
    live = {id(tensor) for tensor in (*net.parameters(), *net.buffers())}
    state = net.state_dict(keep_vars=True).items()
    return {name: t for name, t in state if id(t) not in live or name.endswith(".value")}


def _newborn(net: nn.Module) -> Iterator[Tensor]:
    """What is learned of tensors that grow, as a forward sees it."""
    for module in net.modules():
        if isinstance(module, GrowingTensor):
            yield from (part for part in (module.rows, module.cols) if part is not None)
