"""Progressive neural networks: a column for each task, listening to those before."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from zeroforget.axes.find import CannotGrow, find_axes
from zeroforget.axes.labels import axis_names
from zeroforget.axes.trace import in_eval
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits
from zeroforget.methods.columns import ColumnStart, connect, lateral_size, layers_of, narrowed, run
from zeroforget.training.evaluate import Predictor


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
