"""`zeroforget networks`: the networks there are, how large they are, and what masks over them cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from zeroforget.cli.app import LAB, app, console
from zeroforget.cli.printing import put_json

if TYPE_CHECKING:
    from rich.table import Table

    from zeroforget.nets import Shape


@app.command(rich_help_panel=LAB)
def networks(
    shape: str | None = typer.Option(
        None, help="Count for images of channels,height,width instead of each network's own.", metavar="C,H,W"
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the networks: weights, features, what a task's masks cost, and the paper's figures beside ours."""
    chosen = None if shape is None else parse_shape(shape)
    rows = _rows(chosen)
    if as_json:
        put_json(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table, notes = _table(rows)
    console().print(table)
    console().print(
        "\nMask: bytes a task adds, at 1 bit a weight or 2 bits a feature. Weights and features without head."
    )
    for note in notes:
        console().print(note, highlight=False)


def parse_shape(text: str) -> Shape:
    """`3,224,224` as three numbers."""
    try:
        channels, height, width = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--shape is channels,height,width, such as 3,224,224; not '{text}'") from None
    if min(channels, height, width) < 1:
        raise ValueError(f"--shape needs three positive numbers, such as 3,224,224; not '{text}'")
    return channels, height, width


def _rows(chosen: Shape | None) -> list[dict[str, Any]]:
    from zeroforget import nets
    from zeroforget.nets import counts

    rows: list[dict[str, Any]] = []
    for name in nets.names():
        shape = chosen or nets.find(name).shape
        row: dict[str, Any] = {"name": name, "shape": list(shape)}
        try:
            found = counts.count_named(name, shape)
        except ValueError as error:  # too small an image for this one; the others are still of use
            row["error"] = str(error)
        else:
            row |= {"weights": found.weights, "features": found.features}
            row |= {"weight_mask_bytes": found.weight_mask_bytes, "feature_mask_bytes": found.feature_mask_bytes}
        if published := counts.PAPER.get(name):
            row["paper"] = {
                "weights": published.weights,
                "features": published.features,
                "weights_by_its_rule": counts.paper_weights(name),
                "why": published.why,
            }
        rows.append(row)
    return rows


def _table(rows: list[dict[str, Any]]) -> tuple[Table, list[str]]:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("network", "input", "weights", "features", "weight\nmask", "feature\nmask"):
        table.add_column(heading, justify="left" if heading in ("network", "input") else "right", no_wrap=True)
    for heading in ("paper's\nweights", "paper's\nfeatures"):
        table.add_column(heading, justify="right", no_wrap=True, style="dim")
    notes: list[str] = []
    for row in rows:
        paper = row.get("paper")
        name = row["name"] + _mark(paper and paper["why"], notes)
        shape = "×".join(map(str, row["shape"])) + _mark(row.get("error"), notes)
        ours = [f"{row[key]:,}" if key in row else "–" for key in ("weights", "features")]
        masks = [_size(row[key]) if key in row else "–" for key in ("weight_mask_bytes", "feature_mask_bytes")]
        theirs = [f"{paper[key]:,}" if paper else "" for key in ("weights", "features")]
        table.add_row(name, shape, *ours, *masks, *theirs)
    return table, [f"{_sign(i)} {note}" for i, note in enumerate(notes)]


def _mark(note: str | None, notes: list[str]) -> str:
    """The sign of a footnote, the same for the same note."""
    if not note:
        return ""
    if note not in notes:
        notes.append(note)
    return _sign(notes.index(note))


def _sign(index: int) -> str:
    return "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(index + 1))


def _size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    for unit, scale in (("MB", 1_000_000), ("kB", 1_000)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
