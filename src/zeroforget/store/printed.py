"""How a model's tasks are printed: a row for each, also in a notebook."""

from __future__ import annotations

from zeroforget.files.small_tables import SmallTable
from zeroforget.store.schema import TaskFacts

HEADINGS = ("task", "classes", "accuracy", "features", "new", "bytes", "learned")


class Tasks(tuple[TaskFacts, ...]):
    """What is written down about each task, in order: a tuple that prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return str(self.table(counted(self)))

    def _repr_html_(self) -> str:
        return self.table(counted(self)).to_html()

    def table(self, title: str) -> SmallTable:
        """A row for each task: its accuracy with the 95 % interval, its features and what it brought."""
        rows, features = [], 0
        for task in self:
            new = sum(task.born.values())
            features += new
            cells = (task.name, str(len(task.classes)), accuracy_of(task), str(features), f"+{new}", f"+{task.bytes:,}")
            rows.append((*cells, task.learned.replace("T", " ")[:16]))
        return SmallTable(title, HEADINGS, rows)


def accuracy_of(task: TaskFacts) -> str:
    """With its 95 % interval, or that there is none."""
    if not task.measured:
        return "not measured"
    low, high = (f"{100 * bound:.0f}" for bound in task.interval)
    return f"{100 * task.accuracy:.1f} % ({low}-{high})"


def counted(tasks: Tasks) -> str:
    """How many there are, in words."""
    return "no task yet" if not tasks else "1 task" if len(tasks) == 1 else f"{len(tasks)} tasks"
