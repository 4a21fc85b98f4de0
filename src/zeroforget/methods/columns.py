"""Columns: networks of one architecture side by side, narrower ones cut from it, and lateral connections between them.

Layers are met in the order in which they really run, so any network whose features come from linear layers and
convolutions has laterals, residual ones included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeroforget.axes.find import Axes
from zeroforget.axes.labels import births_of
from zeroforget.axes.plain_modules import remembered_sizes
from zeroforget.operators.places import select

_LAYERS: dict[Any, int] = {F.linear: 0, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
"""What a lateral can be added to, with the number of dimensions that its kernel has."""
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
SMALL = 0.1
"""The scalars of laterals start between 0 and this."""


@dataclass(frozen=True, eq=False)
class Layer:
    """One linear layer or convolution as it ran."""

    function: Callable[..., Tensor]
    weight: torch.Size
    inputs: int
    extra: dict[str, Any]
    """Stride, padding and dilation."""

    @property
    def inner(self) -> int:
        """The width that old activations are projected to: no more than the layer reads or writes."""
        return min(self.inputs, self.weight[0])


class Lateral(nn.Module):
    """What one layer of a column gets from the same layer's inputs in other columns: U · ReLU(V · α h)."""

    def __init__(self, layer: Layer, others: Sequence[int], like: Tensor) -> None:
        super().__init__()
        ones = (1,) * _LAYERS[layer.function]
        self.scale = nn.Parameter(torch.rand_like(like.new_empty(len(others))) * SMALL)
        self.project = nn.Parameter(like.new_empty(layer.inner, sum(others), *ones))
        self.weight = nn.Parameter(like.new_empty(layer.weight[0], layer.inner, *layer.weight[2:]))
        for weight in (self.project, self.weight):
            nn.init.kaiming_normal_(weight, nonlinearity="relu")

    def forward(self, layer: Layer, others: Sequence[Tensor]) -> Tensor:
        """To be added to the layer's pre-activation."""
        channels = 1 if _LAYERS[layer.function] else -1
        scaled = torch.cat([a * h for a, h in zip(self.scale, others, strict=True)], channels)
        return layer.function(F.relu(layer.function(scaled, self.project)), self.weight, None, **layer.extra)


def lateral_size(layer: Layer, others: Sequence[int]) -> int:
    """How many parameters a `Lateral` of these sizes has."""
    return len(others) + layer.inner * (sum(others) + layer.weight[0] * math.prod(layer.weight[2:]))


class _Watch(TorchFunctionMode):
    """Notes every layer that runs and its input; adds what laterals bring. The first layer reads the images: none."""

    def __init__(self, laterals: Sequence[nn.Module], others: Sequence[Sequence[Tensor]]) -> None:
        super().__init__()
        self.laterals, self.others = laterals, others
        self.layers: list[Layer] = []
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _LAYERS:
            return out
        given = dict(zip(_ARGUMENTS, args, strict=False)) | (kwargs or {})
        x, index = given["input"], len(self.inputs) - 1
        extra = {name: given[name] for name in ("stride", "padding", "dilation") if name in given}
        layer = Layer(func, given["weight"].shape, x.shape[1 if _LAYERS[func] else -1], extra)
        if 0 <= index < len(self.laterals):
            out = out + self.laterals[index](layer, [inputs[index + 1] for inputs in self.others])
        self.layers.append(layer)
        self.inputs.append(x)
        return out


class Column(Protocol):
    """Anything that maps a batch to a tensor."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


def run(
    column: Column, x: Tensor, laterals: Sequence[nn.Module] = (), others: Sequence[Sequence[Tensor]] = ()
) -> tuple[Tensor, list[Tensor]]:
    """A column's output and the input of each of its layers; `others` holds those of the columns it listens to."""
    watch = _Watch(laterals, others)
    with watch:
        out = column(x)
    return out, watch.inputs


@torch.no_grad()
def layers_of(column: Column, x: Tensor) -> list[Layer]:
    """A column's layers in the order they run."""
    watch = _Watch((), ())
    with watch:
        column(x)
    return watch.layers


def connect(column: Column, x: Tensor, others: int) -> nn.ModuleList:
    """Fresh laterals into every layer of a column but the first, from so many columns of the same widths.

    The column runs once on `x`, so it should be in eval mode.
    """
    return nn.ModuleList(Lateral(layer, [layer.inputs] * others, x) for layer in layers_of(column, x)[1:])


class ColumnStart(nn.Module):
    """How a fresh network of this architecture looks: the mean and spread of each parameter, as it was given."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        moments = [_moments(p.detach()) for p in net.parameters()]
        self.register_buffer("moments", torch.stack(moments) if moments else torch.zeros(0, 2))

    @torch.no_grad()
    def renew(self, net: nn.Module) -> None:
        """Draw every parameter anew but the frozen ones; statistics start again."""
        for parameter, (mean, spread) in zip(net.parameters(), self.get_buffer("moments"), strict=True):
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * spread.to(parameter) + mean.to(parameter))
        for module in net.modules():
            if callable(reset := getattr(module, "reset_running_stats", None)):
                reset()


def _moments(values: Tensor) -> Tensor:
    """Weights are drawn around zero; biases and affine parameters around where they are."""
    mean = values.mean() if values.dim() < 2 else values.new_zeros(())
    return torch.stack([mean, values.std(correction=0)]).float()


@torch.no_grad()
def narrowed(net: nn.Module, axes: Axes, widths: Mapping[str, int]) -> nn.Module:
    """The same architecture with the first so many features of each axis; fewer inputs want larger weights."""
    births = {axis: (torch.arange(size) >= widths[axis]).long() for axis, size in axes.sizes.items()}
    twin = copy.deepcopy(net)
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for path, module in twin.named_modules():
        prefix = f"{path}." if path else ""
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            cut = select(tensor, [(d, births_of(b, births) == 0) for d, b in enumerate(axes.tensors[prefix + name])])
            if name in module._buffers:
                module._buffers[name] = cut
                continue
            if cut.dim() > 1:
                cut *= math.sqrt(tensor[0].numel() / cut[0].numel())
            module._parameters[name] = made.setdefault(id(tensor), nn.Parameter(cut, tensor.requires_grad))
        own = [*module._parameters.items(), *module._buffers.items()]
        shapes = {name: tuple(tensor.shape) for name, tensor in own if tensor is not None}
        told = {
            attribute: tuple(int((births_of(label, births) == 0).sum()) for label in labels)
            for (where, attribute), labels in axes.attributes.items()
            if where == path
        }
        for attribute, value in remembered_sizes(module, shapes, told).items():
            setattr(module, attribute, value)
    return twin
