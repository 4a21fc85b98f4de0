"""What each method keeps beside a network, for any network and number of tasks: the paper's table S1 and the data of
its Figure 1, without training and without making a single weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroforget import nets
from zeroforget.axes.find import Axes, find_axes
from zeroforget.axes.labels import Label, births_of
from zeroforget.axes.plain_modules import is_layer, is_norm
from zeroforget.experiments.resolve import NamedPart, make_network
from zeroforget.growing.growth import GrowthLimits
from zeroforget.methods import Overhead, TaskSpec, registry
from zeroforget.methods.tfm import Tfm
from zeroforget.nets import counts

FLOAT = 32
CLASSES = 10
"""A task's classes; heads are not overhead, but adapters into them are."""


@dataclass(frozen=True)
class OverheadRow:
    """One method's overhead in bits after each of so many tasks, and what the paper's formula gives."""

    method: str
    formula: str
    training: tuple[int, ...]
    inference: tuple[int, ...]
    published: tuple[int, ...] | None
    """Table S1's formula with our count of the network's parameters and features; None for methods it does not hold."""
    paper: tuple[int, ...] | None
    """The same with the paper's own counts, where its Table 1 has the network."""


def measured(
    network: str, shape: nets.Shape | None = None
) -> tuple[Callable[[], nn.Module], nets.Shape, counts.Counts]:
    """What builds a network (ours, or anyone's function as package.module:function), its input shape and its size."""
    if shape is None and ":" in network:
        raise ValueError(f"say for images of which shape '{network}' is to be built, such as --shape 3,224,224")
    images = shape or nets.find(network).shape

    def build() -> nn.Module:
        return make_network(NamedPart(network), images)

    with torch.device("meta"):
        return build, images, counts.count(build())


def costs(
    network: str, tasks: int, shape: nets.Shape | None = None, methods: Iterable[str] | None = None
) -> list[OverheadRow]:
    """The overhead of every method (or of these) on a network, after each of so many tasks."""
    if tasks < 1:
        raise ValueError(f"there must be at least 1 task, not {tasks}")
    build, images, size = measured(network, shape)
    table = counts.PAPER.get(network)
    found = []
    for name in registry.names() if methods is None else methods:
        bits = kept(name, build, images, tasks)
        by_us = [published(name, size.weights, size.features, t) for t in range(1, tasks + 1)]
        by_them = [published(name, table.weights, table.features, t) for t in range(1, tasks + 1)] if table else []
        training, inference = tuple(b.training for b in bits), tuple(b.inference for b in bits)
        formula = registry.find(name)[0].overhead_formula
        found.append(OverheadRow(name, formula, training, inference, _all(by_us), _all(by_them)))
    return found


def kept(name: str, build: Callable[[], nn.Module], shape: Sequence[int], tasks: int) -> list[Overhead]:
    """A method's own count after each task, from tensors that have a shape but no storage."""
    try:
        return _kept(name, build, shape, tasks, "meta")
    except (NotImplementedError, RuntimeError):  # someone's method that needs values to make room for a task
        return _kept(name, build, shape, tasks, "cpu")


def _kept(name: str, build: Callable[[], nn.Module], shape: Sequence[int], tasks: int, device: str) -> list[Overhead]:
    with torch.device(device):
        net, example = build(), torch.zeros(2, *shape)
    cls, implied = registry.find(name)
    if issubclass(cls, Tfm):
        defaults = {option: p.default for option, p in registry.options(cls).items()} | implied
        start, rank = defaults["start"], defaults.get("rank", 0)
        norms = defaults["fn"] != "none"
        return list(growing(net, example, tasks, feature_norms=norms, start=start, rank=rank))
    method = registry.build(name, net, example, **({"tasks": tasks} if "tasks" in registry.options(cls) else {}))
    found = []
    for task in range(tasks):
        method.add_task(TaskSpec(f"task {task}", CLASSES))
        found.append(method.overhead())
    return found


def growing(
    net: nn.Module, example: Tensor, tasks: int, *, feature_norms: bool, start: float = 0.55, rank: int = 0
) -> Iterator[Overhead]:
    """What ternary feature masks cost when the network is full with the last task, from the widths alone.

    Two bits for each feature and task; two floats for each feature that a later task reuses; a later task's own
    normalization layers; sixteen bits for each number of its steps on older weights.
    """
    axes = find_axes(net, example)
    limits = GrowthLimits(axes.sizes, lambda widths: 0.0, limit=1.0)
    step = (1 - start) / max(1, tasks - 1)
    spent, widths = 0, dict.fromkeys(axes.sizes, 0)
    for task in range(tasks):
        before, widths = widths, {axis: limits.width(axis, min(1.0, start + task * step)) for axis in axes.sizes}
        if task:
            spent += sum(_normalization(net, axes, before, widths, feature_norms))
            spent += sum(_steps(net, axes, before, rank)) if rank else 0
        masks = (task + 1) * sum(8 * -(-width // 4) for width in widths.values())
        yield Overhead(training=masks + spent, inference=masks + spent)


def _normalization(
    net: nn.Module, axes: Axes, before: dict[str, int], widths: dict[str, int], feature_norms: bool
) -> Iterator[int]:
    """The floats that one later task adds, layer by layer."""
    for path, module in net.named_modules():
        prefix = f"{path}." if path else ""
        if is_layer(module) and path in axes.layers and path not in axes.normalized and feature_norms:
            yield 2 * FLOAT * _length(axes.tensors[f"{prefix}weight"][0], before)
        if is_norm(module):
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            yield FLOAT * sum(_length(axes.tensors[prefix + n][0], widths) for n, t in own if t.is_floating_point())


def _steps(net: nn.Module, axes: Axes, before: dict[str, int], rank: int) -> Iterator[int]:
    """What steps of this rank take, layer by layer: `up`, `down` and two powers."""
    for path, module in net.named_modules():
        if is_layer(module):
            outputs, *inputs = (
                _length(label, before) for label in axes.tensors[f"{path}.weight" if path else "weight"]
            )
            yield 16 * (min(rank, outputs, math.prod(inputs)) * (outputs + math.prod(inputs)) + 2)


def _length(label: Label, widths: dict[str, int]) -> int:
    births = {axis: torch.zeros(width, dtype=torch.int64) for axis, width in widths.items()}
    return len(births_of(label, births))


def published(name: str, parameters: int, features: int, tasks: int) -> int | None:
    """Table S1 of the paper, in bits; None for a method that it does not hold."""
    match name:
        case "finetuning" | "joint" | "freezing":
            return 0
        case "lwf" | "lfl" | "ewc" | "r-ewc" | "si" | "mas" | "progress-compress":
            return FLOAT * parameters
        case "ssl":
            return FLOAT * (parameters + features)
        case "imm-mean" | "imm-mode":
            return FLOAT * parameters * tasks
        case "pnn":
            return FLOAT * parameters * (tasks - 1)
        case "packnet" | "piggyback":
            # The table says an integer for PackNet; the 27.3 MB of its section 4.2 are a bit per weight and task.
            return parameters * tasks
        case "hat":
            return FLOAT * features * tasks
        case "tfm-nofn":
            return 2 * features * tasks
        case "tfm":
            return 2 * features * tasks + 2 * FLOAT * features * (tasks - 1)  # the first task reuses nothing
        case _:
            return None


def _all(values: list[int | None]) -> tuple[int, ...] | None:
    found = tuple(value for value in values if value is not None)
    return found if values and len(found) == len(values) else None
