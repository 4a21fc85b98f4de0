"""`zeroforget demo`: the main job on data that need no download."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from zeroforget.cli.app import LAB, app, console


@app.command("demo", rich_help_panel=LAB)
def demo_command(
    seed: Annotated[int, typer.Option(help="Fixes data split, initial network and all that is random.")] = 0,
) -> None:
    """Learn five tasks one after another (digits in pairs), by TFM and by fine-tuning, and prove what is kept."""
    import torch

    from zeroforget.experiments import demo
    from zeroforget.experiments.display import ExperimentDisplay
    from zeroforget.experiments.formats import terminal
    from zeroforget.experiments.tables import tables

    torch.set_num_threads(1)  # for a network this small, handing work to threads takes longer than the work
    with tempfile.TemporaryDirectory() as folder, ExperimentDisplay(console(), 2, epochs=False) as watch:
        finetuning, tfm = demo.learn(Path(folder), watch, seed)
    console().print()
    for table in tables([finetuning, tfm]):
        console().print(terminal(table), soft_wrap=True)
    console().print(demo.growth_table(tfm), soft_wrap=True, highlight=False)
    console().print()
    for line in demo.overhead_lines([finetuning, tfm]):
        console().print(line, soft_wrap=True, highlight=False)
    console().print()
    for results in (finetuning, tfm):
        console().print(f"{results.method}: {demo.verdict(results)}", soft_wrap=True, highlight=False)
