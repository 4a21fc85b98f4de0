"""The command `report`: finished runs as one page, and as figures for a paper."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from zeroforget.cli.app import LAB, app, as_path
from zeroforget.cli.lab import Runs, finished
from zeroforget.cli.printing import say


@app.command(rich_help_panel=LAB)
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.", parser=as_path)] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Also write every chart into this folder.", parser=as_path)
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help="Formats of the figures: svg, png, pdf, or several.")
    ] = "svg",
) -> None:
    """Show finished runs on one page that works without a network: tables, accuracy, overhead, growth, curves."""
    from zeroforget.experiments.disk import check_output
    from zeroforget.experiments.report import is_report, known_formats, write_figures, write_report

    wanted = known_formats(formats.split(","))
    check_output(out, "report", is_report)
    found = finished(runs)
    write_report(found, out, command=shlex.join(["zeroforget", *sys.argv[1:]]))
    say(f"wrote {out} ({len(found)} runs, {out.stat().st_size / 1e6:.1f} MB)")
    if figures is not None:
        paths = write_figures(found, figures, wanted)
        say(f"wrote {len(paths)} figures to {figures}")
