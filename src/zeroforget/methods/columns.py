"""Networks of one architecture side by side: columns, laterals between them, and progressive networks made of these."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeroforget.axes.find import Axes, CannotGrow, find_axes
from zeroforget.axes.labels import axis_names, births_of
from zeroforget.axes.plain_modules import remembered_sizes
from zeroforget.axes.trace import in_eval
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits
from zeroforget.operators.places import select
from zeroforget.training.evaluate import Predictor

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


class Pnn(Method):
    """Give each task a network of its own whose every layer also reads, through an adapter, what older ones computed.

    Rusu et al., "Progressive Neural Networks", 2016. Old columns are frozen, in eval mode and outside the optimizer. So
    that comparisons are fair, columns are narrower than the network given: all together, laterals included, have no
    more parameters than it. What is frozen keeps its width, and all columns share it.

    Options:
        tasks: how many columns share the network's number of parameters; later ones come on top.
        full: make every column as wide as the network instead.
        classes: how many classes of a task the laterals into its head are counted for; more come on top.
    """

    name = "pnn"
    family = "distillation"
    zero_forgetting = True
    grows = True
    graph_safe = True
    overhead_formula = "duplicate per task"

    def __init__(
        self, net: nn.Module, example: Tensor, *, tasks: int = 5, full: bool = False, classes: int = 10
    ) -> None:
        if tasks < 1:
            raise ValueError(f"tasks is how many columns share the network's parameters, so at least 1, not {tasks}")
        if classes < 1:
            raise ValueError(f"classes is how many a task may have, so at least 1, not {classes}")
        super().__init__(net if full or tasks == 1 else shrunk(net, example, tasks, classes), example)
        self.start = ColumnStart(self.net)
        self.columns = nn.ModuleList()
        """Columns after the first, which is `net`."""
        self.laterals = nn.ModuleList()

    # Structure -------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec) -> None:
        """A head, a fresh column, and laterals from every column before."""
        super().add_task(spec)
        index = len(self.specs) - 1
        if index:
            shared = {id(p): p for p in self.net.parameters() if not p.requires_grad}
            self.columns.append(copy.deepcopy(self.net, shared))
            self.start.renew(self.columns[-1])
            with in_eval(self):
                self.laterals.append(connect(lambda x: self._column(index, x), self.get_buffer("example"), index))
        else:
            self.laterals.append(nn.ModuleList())

    def drop_task(self) -> None:
        """Take them back."""
        super().drop_task()
        del self.laterals[-1]
        if self.specs:
            del self.columns[-1]

    def column(self, task: int) -> nn.Module:
        """A task's own network, without head and laterals."""
        return self.columns[task - 1] if task else self.net

    def _column(self, task: int, x: Tensor) -> Tensor:
        logits: Tensor = self.heads[task](self.column(task)(x))
        return logits

    # Learning --------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Old columns stay in eval mode: no batch moves their statistics."""
        super().train(mode)
        for task in range(len(self.specs) - 1):
            self.column(task).eval()
        return self

    def _learning(self) -> dict[str, nn.Module]:
        task = len(self.specs) - 1
        column = f"columns.{task - 1}" if task else "net"
        return {
            column: self.column(task),
            f"laterals.{task}": self.laterals[task],
            f"heads.{task}": self.heads[task],
        }

    def trainable(self) -> Iterable[nn.Parameter]:
        """The newest column, its laterals and its head."""
        for part in self._learning().values():
            yield from part.parameters()

    def moving(self) -> dict[str, Tensor]:
        """The same, statistics included."""
        return self.tensors_of(*self._learning())

    # Use -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Every column up to the task's, each with what it hears of those before (eq. 2)."""
        heard: list[list[Tensor]] = []
        with torch.no_grad():
            for index in range(task):
                heard.append(self._run(index, x, heard)[1])
        return self._run(task, x, heard)[0]

    def _run(self, task: int, x: Tensor, heard: list[list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        laterals = self.laterals[task]
        assert isinstance(laterals, nn.ModuleList)
        return run(lambda x: self._column(task, x), x, list(laterals), heard)

    def predictor(self, task: int) -> Predictor:
        """The columns up to the task's; never with gradients, so that it always runs the same way."""
        return torch.no_grad()(super().predictor(task))

    def overhead(self) -> Overhead:
        """Every column after the first, less what it shares with that, and all laterals."""
        shared = {id(p) for p in self.net.parameters()}
        columns = [p for p in self.columns.parameters() if id(p) not in shared]
        kept = bits(*columns, *self.columns.buffers(), *self.laterals.parameters())
        return Overhead(training=kept, inference=kept)


def shrunk(net: nn.Module, example: Tensor, tasks: int, classes: int) -> nn.Module:
    """The widest network of the same architecture of which so many columns with their laterals fit into `net`."""
    try:
        return _shrunk(net, example, tasks, classes)
    except (CannotGrow, RuntimeError) as error:  # torch's complaint about shapes is a RuntimeError
        raise ValueError(f"pnn cannot make narrower columns of this network ({error}); use full=True") from error


def _shrunk(net: nn.Module, example: Tensor, tasks: int, classes: int) -> nn.Module:
    axes = find_axes(net, example)
    shape = copy.deepcopy(net).to("meta").eval()
    room = sum(p.numel() for p in net.parameters())
    frozen = [axes.tensors[name] for name, p in net.named_parameters() if not p.requires_grad]
    kept = {axis for labels in frozen for label in labels for axis in axis_names(label)}

    def widths(share: float) -> Mapping[str, int]:
        return {axis: size if axis in kept else max(1, int(size * share)) for axis, size in axes.sizes.items()}

    def fits(share: float) -> bool:
        return size_of(narrowed(shape, axes, widths(share)), example.to("meta"), tasks, classes) <= room

    low, high = 0.0, 1.0
    if not fits(low):
        raise ValueError(
            f"{tasks} columns of this network do not fit into its {room} parameters, however narrow"
            + (" (frozen layers keep their width)" if kept else "")
            + "; use full=True, or fewer tasks"
        )
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return narrowed(net, axes, widths(low))


def size_of(column: nn.Module, x: Tensor, tasks: int, classes: int) -> int:
    """How many parameters so many columns and the laterals between them have; heads count only in what they hear."""
    size = sum(p.numel() * (tasks if p.requires_grad else 1) for p in column.parameters())
    head = nn.Linear(column(x).shape[-1], classes, device=x.device, dtype=x.dtype)
    listening = layers_of(nn.Sequential(column, head), x)[1:]
    return size + sum(lateral_size(layer, [layer.inputs] * k) for layer in listening for k in range(1, tasks))
