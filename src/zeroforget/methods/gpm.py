"""Gradient projection memory: new tasks may move weights only where earlier tasks' inputs do not reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.axes.trace import in_eval
from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits, learn_only
from zeroforget.methods.importance import Kept, enough, samples_of
from zeroforget.methods.per_task import TaskNorms, norm_tensors, plain_copy
from zeroforget.training import Fit, FitLog
from zeroforget.training.evaluate import Predictor

Layer = nn.Linear | nn.Conv2d


class Gpm(Method):
    """Keep the directions in which each layer's inputs lie, and take them out of every later gradient.

    Saha, Garg and Roy, "Gradient Projection Memory for Continual Learning", ICLR 2021. What a layer answers to an input
    changes only along that input, so steps at right angles to the old inputs change nothing; the directions kept carry
    most of the inputs' energy, not all, so a little is forgotten. Biases are those of the first task; normalization and
    buffers are each task's own. Weights of other layers than linear and convolutional ones stand still after the first
    task.

    Options:
        energy: ε, the share of the inputs' energy that the directions must carry after the first task.
        energy_step: how much higher that share is with each later task; it is 1 at most.
        samples: how many training images tell the directions.
    """

    name = "gpm"
    family = "model-based"
    graph_safe = True
    overhead_formula = "directions of inputs per layer"

    def __init__(
        self, net: nn.Module, example: Tensor, *, energy: float = 0.97, energy_step: float = 0.003, samples: int = 125
    ) -> None:
        super().__init__(net, example)
        if not 0 <= energy <= 1 or not 0 <= energy_step <= 1:
            raise ValueError(f"energy and energy_step are shares from 0 to 1, not {energy} and {energy_step}")
        self.energy = energy
        self.energy_step = energy_step
        self.samples = enough(samples)
        self.widths = {name: weight[0].numel() for name, weight in self._projected()}
        self.directions = nn.ModuleList()
        """For each task, the directions that it added to each layer's basis."""
        self.norms = TaskNorms(net)
        self._learned = [p for p in net.parameters() if p.requires_grad]
        self._basis: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    # Structure -------------------------------------------------------------------------------------------------

    def _projected(self) -> Iterator[tuple[str, Tensor]]:
        """The weights whose gradients are projected, by name."""
        for path, layer in self._layers():
            if layer.weight.requires_grad:
                yield f"{path}.weight" if path else "weight", layer.weight

    def _layers(self) -> Iterator[tuple[str, Layer]]:
        return ((path, layer) for path, layer in self.net.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d))

    def add_task(self, spec: TaskSpec) -> None:
        """A head, normalization, and room for directions."""
        super().add_task(spec)
        self.norms.add(self.net)
        self._make_room(dict.fromkeys(self.widths, 0))
        learn_only(self._learned, self.trainable())

    def _make_room(self, counts: Mapping[str, int]) -> None:
        like = self.get_buffer("example").float()
        self.directions.append(Kept({n: like.new_zeros(width, counts[n]) for n, width in self.widths.items()}))

    def drop_task(self) -> None:
        """Take them back."""
        super().drop_task()
        self.norms.drop()
        del self.directions[-1]
        learn_only(self._learned, self.trainable() if self.specs else self._learned)

    def structure(self) -> list[dict[str, Any]]:
        """With each task, how many directions it added to each layer."""
        return [
            entry | {"directions": {name: self._added(task)[name].shape[1] for name in self.widths}}
            for task, entry in enumerate(super().structure())
        ]

    def replay(self, structure: Sequence[dict[str, Any]]) -> None:
        """Room for as many directions as there were."""
        for entry in structure:
            self.add_task(TaskSpec(entry["name"], entry["classes"]))
            del self.directions[-1]
            self._make_room(entry["directions"])

    def _added(self, task: int) -> Kept:
        kept = self.directions[task]
        assert isinstance(kept, Kept)
        return kept

    def basis(self, tasks: int) -> dict[str, Tensor]:
        """M of each layer after so many tasks: orthonormal columns."""
        return {n: torch.cat([self._added(task)[n] for task in range(tasks)], 1) for n in self.widths} if tasks else {}

    # Learning --------------------------------------------------------------------------------------------------

    def trainable(self) -> Iterable[nn.Parameter]:
        """Everything for the first task; then projected weights, normalization and the newest head."""
        if len(self.specs) == 1:
            yield from super().trainable()
            return
        yield from (self.net.get_parameter(name) for name in self.widths)
        yield from (t for t in norm_tensors(self.net).values() if isinstance(t, nn.Parameter))
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """The network and the newest head."""
        return self.tensors_of("net", self.newest_head())

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """Beside the directions of all earlier tasks."""
        self._basis = {name: m for name, m in self.basis(len(self.specs) - 1).items() if m.shape[1]}
        straight = fit.regime.optimizer.lower() == "sgd" and not fit.regime.weight_decay
        self._before = {} if straight else {n: self.net.get_parameter(n).detach().clone() for n in self._basis}
        try:
            return super().train_task(task, fit)
        finally:
            self._basis, self._before = {}, {}

    @torch.no_grad()
    def before_step(self, done: float) -> None:
        """Where steps are no sums of gradients, remember from where they are made."""
        for name, before in self._before.items():
            before.copy_(self.net.get_parameter(name))

    @torch.no_grad()
    def after_backward(self) -> None:
        """g ← g − g M Mᵀ."""
        for name, basis in self._basis.items():
            if (gradient := self.net.get_parameter(name).grad) is not None:
                gradient.copy_(apart(gradient, basis))

    @torch.no_grad()
    def after_step(self) -> None:
        """Adam's steps and weight decay are none of the projected gradient's: project what they did."""
        for name, before in self._before.items():
            weight = self.net.get_parameter(name)
            weight.copy_(before + apart(weight - before, self._basis[name]))

    def end_task(self, task: Task, fit: Fit) -> None:
        """Join the leading directions of this task's inputs to the basis."""
        index = len(self.specs) - 1
        self.norms.store(index, self.net)
        known = self.basis(index)
        wanted = min(1.0, self.energy + index * self.energy_step)
        data = [x for x, _ in samples_of(task, fit, index, self.samples)]
        rows = self._inputs(data)
        added = {
            name: leading(rows[name], known.get(name), wanted) if name in rows else self._added(index)[name]
            for name in self.widths
        }
        self.directions[index] = Kept(added)

    @torch.no_grad()
    def _inputs(self, data: Sequence[Tensor]) -> dict[str, Tensor]:
        """Rows with the second moment of what each layer reads of these images (patches, for a convolution)."""
        paths = {f"{path}.weight" if path else "weight": layer for path, layer in self._layers()}
        read: dict[str, Tensor] = {}

        def listen(name: str, layer: Layer, x: Tensor) -> None:
            rows = inputs(layer, x)
            read[name] = shortened(torch.cat([read[name], rows]) if name in read else rows)

        with in_eval(self.net), _listening({n: paths[n] for n in self.widths}, listen):
            for x in data:
                for some in x.split(8):
                    self.net(some)
        return read

    # Use -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, task: int) -> Tensor:
        """While a task is learned the network is used as it is; finished ones have their own normalization."""
        if task == len(self.specs) - 1:
            return super().forward(x, task)
        return self.predictor(task)(x)

    def predictor(self, task: int) -> Predictor:
        """The network as it is now, with the task's normalization and head."""
        self.eval()
        if task == len(self.specs) - 1:
            return lambda x: self(x, task)
        net, head = plain_copy(self.net, self.norms.read(task)), self.heads[task]
        return lambda x: head(net(x))

    def overhead(self) -> Overhead:
        """The bases while a task is learned; each later task's normalization and buffers."""
        norms = self.norms.bits()
        return Overhead(training=norms + bits(*self.directions.buffers()), inference=norms)


def apart(gradient: Tensor, basis: Tensor) -> Tensor:
    """The part of a weight's gradient at right angles to the columns of the basis: g − g M Mᵀ."""
    rows = gradient.flatten(1)
    return (rows - (rows @ basis) @ basis.T).view_as(gradient)


def inputs(layer: Layer, x: Tensor) -> Tensor:
    """What a layer multiplies its weights with, a row for each place, in float64; groups count as places."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1]).double()
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise ValueError("gpm follows convolutions with a number of zeros as padding; this network pads otherwise")
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    rows: Tensor = patches.unflatten(1, (layer.groups, -1)).movedim(2, -1).flatten(0, 2)
    return rows.double()


def shortened(rows: Tensor) -> Tensor:
    """At most as many rows as columns, with the same Σ x xᵀ."""
    if len(rows) <= rows.shape[1]:
        return rows
    short: Tensor = torch.linalg.qr(rows, mode="r").R
    return short


def leading(rows: Tensor, known: Tensor | None, energy: float) -> Tensor:
    """Directions, orthonormal and at right angles to those known, that with these carry the share of the energy."""
    total, m = rows.square().sum(), None if known is None or not known.shape[1] else known.double()
    left = rows if m is None else rows - (rows @ m) @ m.T  # eq. (8)
    values, vectors = torch.linalg.svd(left, full_matrices=False)[1:]
    squares = values.square()
    before = total - squares.sum()
    count = int((before + squares.cumsum(0) < energy * total).sum()) + 1 if before < energy * total else 0  # eq. (9)
    count = min(count, int((squares > 1e-12 * total).sum()))
    found: Tensor = vectors[:count].T
    if m is not None:  # without what rounding left of the old ones
        found = torch.linalg.qr(found - m @ (m.T @ found)).Q
    return found.float()


@contextmanager
def _listening(layers: Mapping[str, Layer], listen: Any) -> Iterator[None]:
    """Inside, each call of a layer tells its name, itself and what it reads."""

    def hook(name: str) -> Any:
        return lambda layer, given, named: listen(name, layer, (given or tuple(named.values()))[0].detach())

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
