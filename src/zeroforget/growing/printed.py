"""How a growing network is printed (one line by `repr`, a row for each task by `print` and in a notebook), and what it
has from packages that know more than this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from zeroforget.files.lazy import MethodFrom
from zeroforget.files.small_tables import SmallTable
from zeroforget.growing.growth import TaskRecord

MOST = 32
"""Signs of its classes' names that a row shows."""


class Printed(nn.Module):
    """A network that knows the tasks it has learned and when each of its features was born."""

    fit = MethodFrom("zeroforget.training.fit_network", "fit")
    save = MethodFrom("zeroforget.store.saving", "save")

    history: list[TaskRecord]
    _births: Mapping[str, Tensor]
    _skeleton: Sequence[nn.Module]

    def __repr__(self) -> str:
        tasks = ", ".join(repr(task.name) for task in self.history) or "none yet"
        return f"GrowingNetwork({self._kind()}; tasks: {tasks}; {self._features(len(self.history) - 1)} features)"

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().to_html()

    def _kind(self) -> str:
        return type(self._skeleton[0]).__name__

    def _features(self, task: int) -> int:
        return sum(int((births <= task).sum()) for births in self._births.values())

    def _table(self) -> SmallTable:
        rows, before = [], 0
        for number, task in enumerate(self.history):
            now = self._features(number)
            rows.append((task.name, _classes(task), str(now), f"+{now - before}"))
            before = now
        tasks = "no task yet; call add_task" if not rows else "1 task" if len(rows) == 1 else f"{len(rows)} tasks"
        return SmallTable(f"GrowingNetwork from {self._kind()}: {tasks}", ("task", "classes", "features", "new"), rows)


def _classes(task: TaskRecord) -> str:
    """How many, and their names as far as there is room."""
    text = ", ".join(task.names)
    return f"{task.classes}" + (f" ({text if len(text) <= MOST else f'{text[:MOST].rstrip()}…'})" if text else "")
