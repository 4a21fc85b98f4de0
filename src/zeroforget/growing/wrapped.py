"""Torch's wrappers for several processes around a growing network: what they would do wrong, and need not do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeroforget.growing.rank_births import RankBirth
from zeroforget.growing.tensors import GrowingTensor
from zeroforget.processes import current

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
