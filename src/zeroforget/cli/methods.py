"""`zeroforget methods` and `networks`: what there is, cards of methods, and what each keeps beside a network."""

from __future__ import annotations

import inspect
import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroforget.cli.app import LAB, app, console, put_json, shown, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from zeroforget.experiments.overheads import OverheadRow
    from zeroforget.methods import Method
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


@app.command(rich_help_panel=LAB)
def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Show one method's card: ours, or package.module:Class; or the word check."),
    ] = None,
    checked: Annotated[
        str | None, typer.Argument(metavar="[METHOD]", help="After check: the method whose promises are tried out.")
    ] = None,
    overhead: Annotated[
        str | None,
        typer.Option(metavar="NETWORK", help="What each keeps beside this network: ours, or package.module:function."),
    ] = None,
    tasks: Annotated[int, typer.Option(help="For so many tasks.", min=1)] = 10,
    shape: Annotated[
        str | None, typer.Option(metavar="C,H,W", help="For images of this shape instead of the network's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the methods with their options and claims. Or show one, check one, or count what they keep."""
    if name == "check":
        _check(checked)
        return
    if checked is not None:
        raise ValueError(f"methods takes one name, or `check METHOD`; got '{name} {checked}'")
    if overhead is not None:
        _overhead(overhead, tasks, shape, [name] if name else None, as_json)
        return
    from zeroforget.methods import registry

    found = [describe(each) for each in ([name] if name else registry.names())]
    if as_json:
        put_json(json.dumps(found[0] if name else found, indent=2, ensure_ascii=False))
    elif name:
        _card(found[0])
    else:
        _list(found)


def _check(name: str | None) -> None:
    """Every promise on a line; exit 1 if one is broken."""
    from zeroforget.methods.contract import Contract

    if name is None:
        raise ValueError("check which method? Give a name, or package.module:Class")
    broken = 0
    for promise, why in Contract(name).outcomes():
        broken += why is not None
        console().print(
            f"{'no ' if why else 'yes'}  {promise}" + (f": {why}" if why else ""), markup=False, highlight=False
        )
    if broken:
        raise typer.Exit(1)


def describe(name: str) -> dict[str, Any]:
    """All that a method says of itself, as plain JSON values."""
    from zeroforget.methods import registry

    cls, implied = registry.find(name)
    about = (inspect.getdoc(cls) or "").partition("\nOptions:\n")[0]
    told = registry.told_options(cls)
    return {
        "name": name,
        "family": cls.family,
        "forgets": not cls.zero_forgetting,
        "revisits_data": cls.uses_past_data,
        "grows": cls.grows,
        "needs_backbone": cls.needs_backbone,
        "overhead": _formula(cls),
        "tradeoff": cls.tradeoff,
        "about": about.strip(),
        "options": {
            option: {
                "type": inspect.formatannotation(parameter.annotation).strip("'"),
                "default": implied.get(option, parameter.default),
                "about": told.get(option, ""),
            }
            for option, parameter in registry.options(cls).items()
        },
    }


def _formula(cls: type[Method]) -> str:
    """What a method keeps, in its own words; one that counts it and does not say so keeps something all the same."""
    from zeroforget.methods import Method

    silent = cls.overhead is not Method.overhead and cls.overhead_formula == Method.overhead_formula
    return "what its `overhead` counts" if silent else cls.overhead_formula


def _list(found: list[dict[str, Any]]) -> None:
    """A line for each method's claims, its options below."""
    lines = [
        f"{'':18}{'':13}{'':8}{'sees':5}{'':6}{'back-'}",
        f"{'method':18}{'family':13}forgets past grows bone  overhead",
    ]
    console().print("\n".join(lines), style="bold", highlight=False)
    for row in sorted(found, key=lambda row: (row["family"], row["name"])):
        forgets, past, grows, backbone = (
            _yes(row[key]) for key in ("forgets", "revisits_data", "grows", "needs_backbone")
        )
        claims = f"{row['family']:13}{forgets:8}{past:5}{grows:6}{backbone:6}"
        console().print(f"[bold]{row['name']:18}[/]{claims}{row['overhead']}", highlight=False, soft_wrap=True)
        options = " ".join(f"{option}={_value(about['default'])}" for option, about in row["options"].items())
        for line in textwrap.wrap(options, max(40, console().width - 4)):
            console().print(f"    {shown(line)}", style="dim", highlight=False)
    console().print("\nzeroforget methods NAME tells more; --overhead NETWORK --tasks T counts what they keep.")


def _card(row: dict[str, Any]) -> None:
    console().print(f"[bold]{row['name']}[/] ({row['family']})\n")
    for paragraph in row["about"].split("\n\n"):
        console().print(shown(" ".join(paragraph.split())) + "\n", highlight=False)
    kept = "old tasks answer with the same bits for ever" if not row["forgets"] else "old tasks may change"
    console().print(f"forgetting: {kept}")
    console().print(f"revisits data: {_yes(row['revisits_data'])}   grows: {_yes(row['grows'])}", highlight=False)
    console().print(f"needs a backbone: {_yes(row['needs_backbone'])}   overhead: {row['overhead']}", highlight=False)
    if row["tradeoff"]:
        console().print(f"trades stability for plasticity by: {row['tradeoff']}")
    if row["options"]:
        console().print("\noptions:")
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for option, about in row["options"].items():
            table.add_row(f"{option}={shown(_value(about['default']))}", shown(about["about"]))
        console().print(table)


def _value(default: Any) -> str:
    return f"{default:g}" if isinstance(default, float) else json.dumps(default) if default == () else str(default)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _overhead(network: str, tasks: int, shape: str | None, chosen: list[str] | None, as_json: bool) -> None:
    from zeroforget.experiments import overheads
    from zeroforget.nets import counts

    _, images, size = overheads.measured(network, None if shape is None else parse_shape(shape))
    found = overheads.costs(network, tasks, images, chosen)
    paper = counts.PAPER.get(network)
    if as_json:
        about = {"network": network, "shape": list(images), "tasks": tasks}
        about |= {"weights": size.weights, "features": size.features, "unit": "bits after each task"}
        put_json(json.dumps(about | {"methods": [asdict(cost) for cost in found]}, indent=2))
        return
    console().print(
        f"What methods keep beside {network} ({size.weights:,} parameters, {size.features:,} features) "
        f"after {tasks} tasks, in MB; heads are not counted.\n",
        highlight=False,
    )
    console().print(_costs(found, paper is not None))
    counted = "our count of the network" + (" and with the paper's own (see zeroforget networks)" if paper else "")
    console().print(
        f"\nTraining, inference: the tensors that our methods hold. Table S1: the paper's formula with {counted}. TFM "
        "grows to the full network with the last task."
    )
    console().print(f"\nFigure 1: inference MB after 1 to {tasks} tasks (--json gives all of it in bits)\n")
    console().print(_figure(found, tasks))


def _costs(found: list[OverheadRow], paper: bool) -> Table:
    table = table_of("method")
    table.add_column("overhead")
    for heading in ("training", "inference", "table S1\nour count", *(["paper's\ncount"] if paper else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for cost in found:
        figures = [_megabytes(cost.training), _megabytes(cost.inference), _megabytes(cost.published)]
        table.add_row(cost.method, cost.formula, *figures, *([_megabytes(cost.paper)] if paper else []))
    return table


def _figure(found: list[OverheadRow], tasks: int) -> Table:
    shown = sorted({1 + round(i * (tasks - 1) / 4) for i in range(5)})
    table = table_of("method")
    for task in shown:
        table.add_column(str(task), justify="right", no_wrap=True)
    for cost in found:
        if any(cost.inference):
            table.add_row(cost.method, *(_megabytes((cost.inference[task - 1],)) for task in shown))
    return table


def _megabytes(bits: tuple[int, ...] | None) -> str:
    """The last figure in millions of bytes: one digit after the point as in the paper, more where that would be 0.0."""
    if bits is None:
        return "–"
    size = bits[-1] / 8e6
    return "0" if not size else f"{size:,.1f}" if size >= 0.05 else f"{size:.2g}"
