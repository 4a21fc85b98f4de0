"""Lines and tables as the commands print them: whole, however wide the terminal is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from zeroforget.cli.app import console

if TYPE_CHECKING:
    from rich.table import Table


def say(text: str) -> None:
    """One line, however long."""
    console.print(escape(text), highlight=False, soft_wrap=True)


def show(table: Table) -> None:
    """All of it, however wide: a terminal goes on in the next line."""
    from rich.console import Console

    Console(width=10**6).print(table)


def table_of(*columns: str) -> Table:
    """A plain table; a column whose name begins with '>' is set to the right."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(escape(name.lstrip(">")), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return table
