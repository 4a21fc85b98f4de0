"""The command line's one application object; each module beside this one hangs its commands on it."""

from __future__ import annotations

import typer
from rich.console import Console

app = typer.Typer(
    name="zeroforget",
    help="Continual learning without forgetting: add tasks to a network, and prove that nothing it knew has changed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True)


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
