"""`zeroforget adopt`: a classifier in service becomes the first task of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zeroforget.cli.app import MODEL, app, as_path, between, errors, options_of, say, shown
from zeroforget.store.options import about

IMAGENET = "imagenet"
Network = Annotated[
    str,
    typer.Option(
        help="Its architecture: torchvision/resnet50, timm/convnext_tiny (any name that the library knows, where "
        "it is installed), or one of ours (zeroforget networks lists them)."
    ),
]
Weights = Annotated[
    Path,
    typer.Option(
        help="Its state dict, head and all: a safetensors file, or a .pt or .pth file that holds only tensors.",
        parser=as_path,
    ),
]
Classes = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|imagenet",
        help="A text file: the name of each output, a line each; or imagenet for its thousand names.",
        parser=as_path,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="What a library's network was built with, if its weights do not tell: global_pool=max. The number of "
        "classes and the size of its pictures are found.",
    ),
]
Width = Annotated[float | None, typer.Option(help="The width of a network of ours, as a share of the published one.")]
Size = Annotated[
    int | None,
    typer.Option(help="Pixels of each side of its pictures; by default 64 for ours, else the network's own or 224."),
]
Mean = Annotated[
    str | None,
    typer.Option(
        help="What it subtracts, for each channel, of pixels from 0 to 1; by default timm's for this network, or "
        "ImageNet's: 0.485,0.456,0.406; with --gray their mean, 0.449."
    ),
]
Std = Annotated[
    str | None,
    typer.Option(help="What it divides by; by default likewise, or 0.229,0.224,0.225; with --gray 0.226."),
]
Keep = Annotated[list[str] | None, typer.Option(metavar="MODULE", help="A module whose features shall not grow.")]
Align = Annotated[int | None, typer.Option(help=about("align"))]
Unknown = Annotated[
    Literal["refuse", "keep"],
    typer.Option(help="Refuse a network with features that cannot be followed, or keep those as they are."),
]


@app.command("adopt", rich_help_panel=MODEL)
def adopt_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of the model to make.", parser=as_path)],
    pictures: Annotated[
        Path | None,
        typer.Argument(
            help="Class folders of pictures to measure it by and to prove it with; without them --classes names what "
            "it knows, and it is not measured.",
            parser=as_path,
        ),
    ] = None,
    *,
    task: Annotated[str, typer.Option("--task", "-t", help="What to call what it knows.")],
    network: Network,
    weights: Weights,
    classes: Classes = None,
    settings: Settings = None,
    width: Width = None,
    size: Size = None,
    gray: Annotated[bool, typer.Option("--gray/--color", help="One channel, or three.")] = False,
    mean: Mean = None,
    std: Std = None,
    keep: Keep = None,
    unknown: Unknown = "refuse",
    align: Align = None,
    seed: Annotated[int, typer.Option(help="Decides which pictures are kept as a proof.")] = 0,
) -> None:
    """Take a trained classifier as it is: it becomes task 1 of a new model, and grows with the tasks to come.

    Nothing is fetched, and no code from a file of weights is run.
    """
    from zeroforget.store import Watch
    from zeroforget.store.adoption import Given, adopt, doubt, imagenet

    names = None if classes is None else imagenet() if str(classes) == IMAGENET else _names(classes)
    options = options_of(network=network, width=width, size=size, gray=gray, align=align, seed=seed, held_out=0.5)
    given = Given(
        weights, _numbers("mean", mean), _numbers("std", std), names, _settings(settings or []),
        keep=tuple(keep or ()), unknown=unknown,
    )  # fmt: skip
    facts = adopt(model, pictures, task, given, options, Watch(say=say))
    found = "not measured, for want of pictures"
    if facts.measured:
        found = f"{100 * facts.accuracy:.1f} % of {facts.data.held_out} pictures right ({between(facts.interval)})"
    say(f"adopted '{facts.name}': {len(facts.classes)} classes, {facts.weights:,} weights as they were, {found}")
    if (wrong := doubt(facts, names)) is not None:
        errors().print(f"[bold yellow]warning:[/] {shown(wrong)}", highlight=False, soft_wrap=True)
    say(f"teach it more with: zeroforget learn {model} PICTURES --task NAME")


def _names(file: Path) -> tuple[str, ...]:
    try:
        return tuple(filter(None, map(str.strip, file.read_text(encoding="utf-8-sig").splitlines())))
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8; save it so, with the name of each output on a line") from None


def _numbers(what: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--{what} wants a number for each channel, such as 0.485,0.456,0.406; got '{text}'") from None


def _settings(given: list[str]) -> dict[str, Any]:
    """KEY=VALUE, where a value is JSON (3, 0.1, true, [2, 2]) or else a word."""
    out: dict[str, Any] = {}
    for one in given:
        key, equals, text = one.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set wants KEY=VALUE, such as num_classes=10; got '{one}'")
        try:
            out[key.strip()] = json.loads(text)
        except json.JSONDecodeError:
            out[key.strip()] = text.strip()
    return out
