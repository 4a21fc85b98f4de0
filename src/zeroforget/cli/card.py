"""`zeroforget card`: what a model knows and how it is proved, for people and for model hubs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroforget.cli.app import MODEL, ModelPath, app, as_path
from zeroforget.cli.printing import put, say

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
    """Write a model's card: tasks, classes, accuracy, fingerprints, proofs. In the form that model hubs read."""
    from zeroforget.files import atomic
    from zeroforget.store import open_model
    from zeroforget.store.card import card

    text = card(open_model(model), licence)
    if output is None:
        put(text, ending="")
        return
    if output.exists() and MARK not in output.read_text(encoding="utf-8", errors="replace")[:500]:
        raise ValueError(f"{output} is there and no card; give another name, or take it away")
    atomic.write_bytes(output, text.encode())
    say(f"wrote {output}: {len(text.encode()):,} bytes")
