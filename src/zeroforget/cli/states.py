"""`zeroforget promote` and `rollback`: which of a model's states is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zeroforget.cli.app import MODEL, ModelPath, app
from zeroforget.cli.printing import say, show, shown, table_of

if TYPE_CHECKING:
    from zeroforget.store.states import Change


@app.command("promote", rich_help_panel=MODEL)
def promote_command(
    model: ModelPath,
    task: Annotated[str | None, typer.Option("--to", help="The task it ends with; by default the newest.")] = None,
) -> None:
    """Serve the newest state, or that after a task. From then on a new task is served only when it is promoted."""
    from zeroforget.store import Watch
    from zeroforget.store.folder import Folder
    from zeroforget.store.states import choose

    _tell(choose(Folder(model), task, Watch(say=say)))


@app.command("rollback", rich_help_panel=MODEL)
def rollback_command(
    model: ModelPath, task: Annotated[str, typer.Argument(help="The task that the earlier state ends with.")]
) -> None:
    """Serve an earlier state. Nothing is deleted; 'promote' goes forward again."""
    from zeroforget.store import Watch
    from zeroforget.store.folder import Folder
    from zeroforget.store.states import choose

    _tell(choose(Folder(model), task, Watch(say=say), back=True))


def _tell(change: Change) -> None:
    from zeroforget.store.schema import accuracy_of

    table = table_of("task", "", *(f">{name}" for name in ("classes", "accuracy", "features", "bytes")))
    for task, what in change.tasks:
        table.add_row(
            shown(task.name), what, str(len(task.classes)), accuracy_of(task),
            f"+{sum(task.born.values())}", f"+{task.bytes:,}",
        )  # fmt: skip
    show(table)
    before, after = change.before.head[:16], change.after.head[:16]
    say(f"served: {after}, as before" if before == after else f"served: {after}, before {before}")
