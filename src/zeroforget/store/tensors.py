"""What was born with a task, as named tensors: cut out of a growing network, and put back into one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroforget.growing.layers import GrowingLayer, GrowingNorm
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.per_task import PerTask
from zeroforget.growing.tensors import GrowingTensor
from zeroforget.operators.places import select


@dataclass(frozen=True)
class Parts:
    """What of a network holds values of tasks, found once for many of them."""

    growing: dict[str, GrowingTensor]
    """Parameter of the plain network → the tensor that grows in its place; tied ones once."""
    alone: list[tuple[str, PerTask]]
    """Normalizations, with the paths of their layers: each task has its own."""


def parts_of(net: GrowingNetwork) -> Parts:
    """All of a network's."""
    found: dict[str, GrowingTensor] = {}
    alone: list[tuple[str, PerTask]] = []
    for path, module in net.body.named_modules():
        if isinstance(module, GrowingLayer):
            alone.append((path, module.norms))
            prefix = f"{path}." if path else ""
            for name, tensor in (("weight", module.grown), ("bias", module.grown_bias)):
                if tensor is not None and all(tensor is not other for other in found.values()):
                    found[f"{prefix}{name}"] = tensor
        elif isinstance(module, GrowingNorm):
            alone.append((path, module.tasks))
    for key, module in net.loose.items():
        assert isinstance(module, GrowingTensor)
        if all(module is not other for other in found.values()):
            found[key.replace("/", ".")] = module
    return Parts(found, alone)


def growing_tensors(net: GrowingNetwork) -> dict[str, GrowingTensor]:
    """Parameter of the plain network → the tensor that grows in its place; tied ones once."""
    return parts_of(net).growing


def _own(net: GrowingNetwork, task: int, parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """The tensors that belong to one task alone: normalization, statistics, head."""
    for path, part in parts.alone:
        own = part[task]
        for name, tensor in [*own._parameters.items(), *own._buffers.items()]:
            if tensor is not None and (tensor.numel() or tensor.dim() == 0):
                yield f"own/{path}/{name}", tensor
    newest = task == len(net.history) - 1
    buffers = net.user_buffers() if newest else net.extras[task].named_buffers()
    yield from ((f"buffer/{key}", tensor) for key, tensor in buffers)
    for name in ("weight", "bias"):
        yield f"head/{name}", getattr(net.heads[task], name)


@torch.no_grad()
def born(net: GrowingNetwork, task: int) -> dict[str, Tensor]:
    """All that was born with a task: `:rows` are its features, `:cols` what older features read of them, and `rank/…`
    its step on older weights."""
    out: dict[str, Tensor] = {}
    parts = parts_of(net)
    for name, tensor in parts.growing.items():
        tensor.sync()
        for part, chosen in _chosen(tensor, task):
            value = select(tensor.value, chosen)
            if value.numel():
                out[f"born/{name}:{part}"] = value
        if (birth := tensor.rank_birth(task)) is not None:
            out |= {f"rank/{name}:{part}": value for part, value in birth.written().items()}
    out |= {
        name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in _own(net, task, parts)
    }
    return {name: tensor.cpu() for name, tensor in out.items()}


def _chosen(tensor: GrowingTensor, task: int) -> list[tuple[str, list[tuple[int, Tensor]]]]:
    if not tensor.brings(task):
        return []
    rows, cols = tensor.row_births, tensor.col_births
    if tensor.col < 0:
        return [("rows", [(tensor.row, rows == task)])]
    return [
        ("rows", [(tensor.row, rows == task), (tensor.col, cols <= task)]),
        ("cols", [(tensor.row, rows < task), (tensor.col, cols == task)]),
    ]


def expected(
    net: GrowingNetwork, task: int, parts: Parts | None = None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The name, type and shape of each tensor that `born` gives."""
    out, parts = {}, parts or parts_of(net)
    for name, tensor in parts.growing.items():
        for part, chosen in _chosen(tensor, task):
            shape = list(tensor.value.shape)
            for dim, where in chosen:
                shape[dim] = int(where.sum())
            if all(shape):
                out[f"born/{name}:{part}"] = (tensor.value.dtype, tuple(shape))
        if (birth := tensor.rank_birth(task)) is not None:
            step = {"up": birth.up, "down": birth.down, "powers": birth.powers}
            out |= {f"rank/{name}:{part}": (torch.int16, tuple(value.shape)) for part, value in step.items()}
    return out | {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in _own(net, task, parts)}


@torch.no_grad()
def fill(net: GrowingNetwork, task: int, tensors: Mapping[str, Tensor], parts: Parts | None = None) -> None:
    """Put back what `born` gave, into a network of the same structure. ValueError names what does not fit."""
    parts = parts or parts_of(net)
    wanted = expected(net, task, parts)
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            raise ValueError(f"tensor '{name}' is missing")
        if name not in wanted:
            raise ValueError(f"tensor '{name}' has no place in the network")
        dtype, shape = wanted[name]
        if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shape:
            found = f"{tuple(tensors[name].shape)} {tensors[name].dtype}"
            raise ValueError(f"tensor '{name}' is {found}; the network has {shape} {dtype}")
    for name, tensor in parts.growing.items():
        brought, birth = _chosen(tensor, task), tensor.rank_birth(task)
        for part, chosen in brought:
            if (key := f"born/{name}:{part}") in tensors:
                _put(tensor.value, chosen, tensors[key])
        if birth is not None:
            birth.fill({part: tensors[f"rank/{name}:{part}"] for part in ("up", "down", "powers")})
        if brought or birth is not None:
            tensor.reopen()  # newborn parameters hold copies
    for name, own in _own(net, task, parts):
        own.copy_(tensors[name])
    net.forget_dense()


def _put(target: Tensor, chosen: list[tuple[int, Tensor]], values: Tensor) -> None:
    dims = [dim for dim, _ in chosen]
    places = [where.nonzero().squeeze(1) for _, where in chosen]
    front = list(range(len(dims)))
    moved, given = target.movedim(dims, front), values.movedim(dims, front)
    index = (places[0],) if len(places) == 1 else (places[0][:, None], places[1][None, :])
    moved[index] = given
