"""`zeroforget adopt`: a classifier in service becomes the first task of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from zeroforget.cli.app import app, console

IMAGENET = ("0.485,0.456,0.406", "0.229,0.224,0.225")


@app.command("adopt")
def adopt_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of the model to make.")],
    pictures: Annotated[Path, typer.Argument(help="Class folders of pictures to measure it by and to prove it with.")],
    task: Annotated[str, typer.Option("--task", "-t", help="What to call what it knows.")],
    network: Annotated[str, typer.Option(help="Its architecture (zeroforget networks lists them).")],
    weights: Annotated[Path, typer.Option(help="A safetensors file of the network and its head.")],
    classes: Annotated[Path | None, typer.Option(help="A text file: the name of each output, a line each.")] = None,
    width: Annotated[float, typer.Option(help="Its width, as a share of the published one.")] = 1.0,
    size: Annotated[int, typer.Option(help="Pixels of each side of its pictures.")] = 64,
    gray: Annotated[bool, typer.Option("--gray/--color", help="One channel, or three.")] = False,
    mean: Annotated[str, typer.Option(help="What it subtracts, for each channel, of pixels from 0 to 1.")] = IMAGENET[
        0
    ],
    std: Annotated[str, typer.Option(help="What it divides by, for each channel.")] = IMAGENET[1],
    seed: Annotated[int, typer.Option(help="Decides which pictures are kept as a proof.")] = 0,
) -> None:
    """Take a trained classifier as it is: it becomes task 1 of a new model, and grows with the tasks to come."""
    from zeroforget.store import Options, Watch
    from zeroforget.store.adoption import Given, adopt

    names = None if classes is None else tuple(filter(None, map(str.strip, classes.read_text().splitlines())))
    options = Options(network=network, width=width, size=size, gray=gray, seed=seed, held_out=0.5)
    given = Given(weights, _numbers("mean", mean), _numbers("std", std), names)
    facts = adopt(model, pictures, task, given, options, Watch(say=_say))
    _say(
        f"adopted '{facts.name}': {len(facts.classes)} classes, {facts.weights:,} weights as they were, "
        f"{100 * facts.accuracy:.1f} % of {facts.data.held_out} pictures right"
    )
    _say(f"teach it more with: zeroforget learn {model} PICTURES --task NAME")


def _say(text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)


def _numbers(what: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--{what} wants a number for each channel, such as {IMAGENET[0]}; got '{text}'") from None
