"""Lines and tables as the commands print them: whole, however wide the terminal is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from zeroforget.cli.app import console, errors
from zeroforget.files.text import LINES, visible, visible_json

if TYPE_CHECKING:
    from rich.table import Table


def shown(text: str) -> str:
    """A name or a sentence as markup that prints just it: what a reader would not see is escaped, line ends too."""
    return _escaped(visible(text))


def put(text: str, *, ending: str = "\n") -> None:
    """Text for programs or people on standard output, without any sign that a terminal would obey."""
    sys.stdout.write(visible(text, keep=LINES) + ending)
    sys.stdout.flush()


def put_json(text: str) -> None:
    """JSON on standard output."""
    sys.stdout.write(visible_json(text) + "\n")


def say(text: str) -> None:
    """One line, however long."""
    console().print(_escaped(visible(text, keep=LINES)), highlight=False, soft_wrap=True)


def complain(mark: str, text: str) -> None:
    """A mistake or a warning beside the output; `mark` is markup, `text` is none."""
    errors().print(f"{mark} {_escaped(visible(text, keep=LINES))}", highlight=False, soft_wrap=True)


def show(table: Table) -> None:
    """All of it, however wide: a terminal goes on in the next line."""
    from zeroforget.files.terminal import Terminal

    Terminal(width=10**6).print(table)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def between(bounds: tuple[float, float]) -> str:
    """A confidence interval in words."""
    return f"95 % interval: {100 * bounds[0]:.0f} to {100 * bounds[1]:.0f} %"


def table_of(*columns: str) -> Table:
    """A plain table; a column whose name begins with '>' is set to the right."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(shown(name.lstrip(">")), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return table
