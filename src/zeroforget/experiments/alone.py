"""A network of its own for each task: what a task can be without any past, to measure forward transfer by."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import Tensor, nn

from zeroforget.methods.base import Method, Overhead, TaskSpec, bits


class Alone(Method):
    """Every task starts from the same untrained network and shares nothing. Use it as the method
    `zeroforget.experiments.alone:Alone` under the label `alone`."""

    zero_forgetting = True
    graph_safe = True
    overhead_formula = "a network per task"

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        super().__init__(net, example)
        self.columns = nn.ModuleList()

    def add_task(self, spec: TaskSpec) -> None:
        """A head, and a copy of the untrained network."""
        super().add_task(spec)
        self.columns.append(copy.deepcopy(self.net))

    def drop_task(self) -> None:
        """Take both back."""
        super().drop_task()
        del self.columns[-1]

    def trainable(self) -> Iterable[nn.Parameter]:
        """The newest network and its head."""
        yield from self.columns[-1].parameters()
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """The same, with the network's statistics."""
        return self.tensors_of(f"columns.{len(self.columns) - 1}", self.newest_head())

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Through the task's own network."""
        logits: Tensor = self.heads[task](self.columns[task](x))
        return logits

    def overhead(self) -> Overhead:
        """All networks but one."""
        extra = bits(*(t for column in list(self.columns)[1:] for t in column.state_dict().values()))
        return Overhead(training=extra, inference=extra)
