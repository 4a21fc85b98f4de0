"""The command line's one application object, and how commands print: lines and tables whole, whatever the terminal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from zeroforget.files import paths
from zeroforget.files.text import LINES, WrongOption, visible, visible_json

if TYPE_CHECKING:
    from rich.table import Table

    from zeroforget.files.terminal import Terminal
    from zeroforget.processes import Processes
    from zeroforget.store import Options

MODEL, LAB = "A model in a folder", "The laboratory"
"""How `--help` groups the commands."""
ORDER = (
    *("learn", "tasks", "predict", "verify", "undo", "adopt", "report", "card", "export", "ship", "receive", "key"),
    *("serve", "promote", "rollback"),
    *("demo", "run", "table", "archive", "methods", "networks", "scenarios", "data"),
)
"""As somebody new needs them."""


class Groups(TyperGroup):
    """`--help` in plain text, the commands under their headings: typer's boxes take three times as long to load."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All of them, in our order."""
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each command with what it is for, as far as its first full stop."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                about = command.get_short_help_str(limit=10**6).partition(". ")[0].rstrip(".")
                headings.setdefault(command.rich_help_panel or "Commands", []).append((name, about))
        for heading, rows in headings.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


app = typer.Typer(
    name="zeroforget",
    help="Continual learning without forgetting: add tasks to a network, and prove that nothing it knew has changed.",
    no_args_is_help=True,
    cls=Groups,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def console() -> Terminal:
    """Where results are printed; made when something is, since `--help` needs none of it."""
    from zeroforget.files.terminal import Terminal

    return Terminal()


@functools.cache
def errors() -> Terminal:
    """Where the rest is printed: warnings, mistakes, bars."""
    from zeroforget.files.terminal import Terminal

    return Terminal(stderr=True)


def as_path(text: str) -> Path:
    """A path as it was typed. An empty one, which Python takes for the current folder, is refused.

    Of a ValueError typer would make a box; this is one line, as all other mistakes are.
    """
    return paths.as_path(text, OSError)


ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.", parser=as_path)]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="Threads that compute; by default torch decides.")]


Log = Annotated[
    str | None,
    typer.Option(metavar="MODULE", help="Also tell wandb, trackio or a module with init, log and finish."),
]


def typed(each: Field[Any], hint: Any) -> tuple[Any, Any]:
    """An option of `learn` as it is typed: its annotation for the command line, and its default."""
    flags = [each.metadata["flag"] or f"--{each.name.replace('_', '-')}"]
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if type(hint) is UnionType else [hint]
    if len(kinds) > 1:  # a text that stands for several kinds of value
        default = None if each.default is None else str(each.default)
        return Annotated[str | None, typer.Option(*flags, help=each.metadata["about"])], default
    parser = as_path if kinds == [Path] else None
    return Annotated[hint, typer.Option(*flags, help=each.metadata["about"], parser=parser)], each.default


def options_of(**chosen: Any) -> Options:
    """What was chosen about learning; a mistake is told by the option's name as it is typed."""
    from zeroforget.store import Options

    try:
        return Options(**chosen)
    except WrongOption as error:
        if error.option not in chosen:
            raise
        raise ValueError(f"--{error.option.replace('_', '-')} {error.what}") from error


@contextmanager
def computing_with(threads: int | None) -> Iterator[None]:
    """So many of torch's threads inside, and as many as before outside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def with_others() -> Iterator[Processes]:
    """Inside, this process learns with the others that torchrun or srun started with it; without these, alone."""
    from zeroforget.processes import PeerLost, joined, place

    try:
        with joined(place()) as processes:
            yield processes
    except PeerLost as lost:
        errors().print(str(lost), highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        from zeroforget._version import __version__

        typer.echo(f"zeroforget {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


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
