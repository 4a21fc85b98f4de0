"""The command `report`: a model, or finished runs, as one page; runs also as figures for a paper."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from zeroforget.cli.app import MODEL, ModelPath, app, as_path, put, say
from zeroforget.cli.lab import finished

RunsOrModel = Annotated[
    list[Path],
    typer.Argument(
        metavar="MODEL | RUNS", help="A model; or folders of runs, folders that hold several, or archives.",
        parser=as_path,
    ),
]  # fmt: skip


@app.command(rich_help_panel=MODEL)
def report(
    given: RunsOrModel,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.", parser=as_path)] = Path("report.html"),
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="TASK=FOLDER", help="Of a model: show a task's surest mistakes among these pictures."
        ),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Of runs: also write every chart into this folder.", parser=as_path)
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help="Formats of the figures: svg, png, pdf, or several.")
    ] = "svg",
) -> None:
    """Show a model or finished runs on one page that works without a network.

    Of a model: accuracy, confusions, surest mistakes, training, growth, proofs. Of runs: tables and charts.
    """
    from zeroforget.store.folder import Folder

    command = shlex.join(["zeroforget", *sys.argv[1:]])
    if len(given) == 1 and Folder(given[0]).exists():
        if figures is not None:
            raise ValueError("--figures are of runs; the page of a model holds its pictures")
        _of_model(given[0], out, data or (), command)
        return
    if data:
        raise ValueError("--data is for a model; what was given are runs")
    _of_runs(given, out, figures, formats, command)


def _of_model(model: Path, out: Path, data: Sequence[str], command: str) -> None:
    from zeroforget.cli.model import folders_of
    from zeroforget.files.paths import in_the_way
    from zeroforget.store import open_model
    from zeroforget.store.report import TITLE, write_report

    def is_report(path: Path) -> bool:
        with path.open("rb") as file:
            return TITLE.encode() in file.read(2**16)

    if (why := in_the_way(out, "report", is_report)) is not None:
        raise ValueError(why)
    opened = open_model(model)
    write_report(opened, out, folders_of(data), command=command)
    tasks = "1 task" if len(opened.tasks) == 1 else f"{len(opened.tasks)} tasks"
    say(f"wrote {out} ({tasks}, {out.stat().st_size:,} bytes)")


def _of_runs(runs: list[Path], out: Path, figures: Path | None, formats: str, command: str) -> None:
    from zeroforget.experiments.disk import check_output
    from zeroforget.experiments.report import is_report, known_formats, write_figures, write_report

    wanted = known_formats(formats.split(","))
    check_output(out, "report", is_report)
    found = finished(runs)
    write_report(found, out, command=command)
    say(f"wrote {out} ({len(found)} runs, {out.stat().st_size / 1e6:.1f} MB)")
    if figures is not None:
        paths = write_figures(found, figures, wanted)
        say(f"wrote {len(paths)} figures to {figures}")


MARK = "library_name: "


@app.command("card", rich_help_panel=MODEL)
def card_command(
    model: ModelPath,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write, such as README.md.", parser=as_path)
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--license", help="The licence of the model, such as mit or cc-by-4.0.")
    ] = None,
) -> None:
    """Write a model's card: tasks, classes, accuracy, fingerprints and proofs, in the form that model hubs read."""
    from zeroforget.files import atomic
    from zeroforget.store import open_model
    from zeroforget.store.report import card

    text = card(open_model(model), licence)
    if output is None:
        put(text, ending="")
        return
    if output.exists() and MARK not in output.read_text(encoding="utf-8", errors="replace")[:500]:
        raise ValueError(f"{output} is there and no card; give another name, or take it away")
    atomic.write_bytes(output, text.encode())
    say(f"wrote {output}: {len(text.encode()):,} bytes")
