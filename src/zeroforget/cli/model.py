"""The practitioner's commands: a model that lives in a folder learns, predicts, proves itself, ships and takes back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zeroforget.cli import predictions
from zeroforget.cli.app import (
    MODEL,
    Log,
    ModelPath,
    Threads,
    app,
    as_path,
    between,
    computing_with,
    console,
    errors,
    options_of,
    put_json,
    say,
    show,
    shown,
    table_of,
    typed,
    with_others,
)
from zeroforget.store.options import with_options

if TYPE_CHECKING:
    from rich.table import Table

    from zeroforget.progress import Progress
    from zeroforget.store import Model, Report, TaskFacts, Watch
    from zeroforget.store.network import Addition
    from zeroforget.tracking import Epochs

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for another process that changes the model.")]
DIGITS = 16
FEW_LAYERS = 12
"""`tasks` shows the features of each layer unasked if there are no more layers or tasks than this."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("learn", rich_help_panel=MODEL)
@with_options(typed)
def learn_command(
    model: ModelPath,
    pictures: Annotated[
        Path, typer.Argument(help="A folder that holds a folder of pictures for each class, or shards.", parser=as_path)
    ],
    task: Annotated[str, typer.Option("--task", "-t", help="What to call the task.")],
    *,
    threads: Threads = None,
    wait: Wait = True,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write each epoch there for TensorBoard.", parser=as_path)
    ] = None,
    log: Log = None,
    **chosen: Any,
) -> None:
    """Teach a model a task from a folder of class folders. The model is made on first use; old tasks do not change."""
    from zeroforget.store import open_model

    options = options_of(**chosen)
    opened = open_model(model)
    with computing_with(threads), with_others() as processes:
        if not processes.first:
            opened.learn(pictures, task, options=options, progress=False)
            return
        with _tracking(model, task, tensorboard, log) as hears, _watching(wait, hears) as watch:
            try:
                facts = opened.learn(pictures, task, options=options, watch=watch)
            except KeyboardInterrupt:
                errors().print(shown(_stopped(model, opened, task)), highlight=False, soft_wrap=True)
                sys.exit(130)
        _tell(opened, facts)
        _doubt(facts)


def _doubt(facts: TaskFacts) -> None:
    from zeroforget.store.adoption import no_better

    if (wrong := no_better(facts)) is not None:
        text = f"{wrong}; 'zeroforget undo' takes it back. Then try another --lr, more --epochs or more pictures"
        errors().print(f"[bold yellow]warning:[/] {shown(text)}", highlight=False, soft_wrap=True)


def _tell(model: Model, facts: TaskFacts) -> None:
    from zeroforget.store.frozen_features import Found

    say(f"{_kept(facts)}; {facts.bytes:,} bytes in {model.path / 'tasks' / facts.folder}")
    say(
        f"learned '{facts.name}' in {facts.training['seconds']:.0f} s: {100 * facts.accuracy:.1f} % of "
        f"{facts.data.held_out} test pictures right ({between(facts.interval)})"
    )
    if (found := Found.of(facts.training)) is not None:
        say(f"  cross-validation: {found}")
    for row in facts.training.get("search", ()):
        chosen = " (taken)" if row["chosen"] else ""
        rank = f", rank {row['rank']}" if row.get("rank") else ""
        say(f"  growth {row['growth']:g}{rank}: {100 * row['val_accuracy']:.1f} %{chosen}")
    earlier = len(model.tasks) - 1
    if earlier:
        tasks, networks = ("tasks", "their networks") if earlier > 1 else ("task", "its network")
        say(f"{earlier} earlier {tasks} unchanged: every number of {networks} is the same")


def _kept(facts: TaskFacts) -> str:
    """Which weights were kept, and why training stopped."""
    about = facts.training
    selection = about.get("selection", {})
    by = f"{100 * selection['accuracy']:.1f} % of {selection['pictures']} selection pictures" if selection else ""
    if about["epochs"] == 1 and about.get("frozen"):
        return f"head on frozen features{f': {by}' if by else ''}"
    kept = f"kept {'a head on the features of ' if about.get('refitted') else ''}epoch {about['kept'] + 1}"
    return f"{kept} of {about['epochs']}{f' ({by})' if by else ''}; stopped: {about['stopped']}"


def _stopped(path: Path, model: Model, task: str) -> str:
    from zeroforget.store import ModelError
    from zeroforget.store.names import kept_name, means

    before = len(model.tasks)
    with suppress(ModelError, OSError):
        model.refresh()
        if any(means(kept_name(task), one.name) for one in model.tasks[before:]):
            return f"stopped, but '{task}' had been learned: it is in {path}. 'zeroforget undo' takes it back."
    began = any((path / ".training").glob("phase-*"))
    rest = (
        "The same command goes on where it stopped; with --finish it takes the best so far."
        if began
        else "No epoch was finished yet."
    )
    tasks = "1 task" if len(model.tasks) == 1 else f"{len(model.tasks)} tasks"
    kept = f"{path} is as it was, with {tasks}." if model.tasks else "No model was made."
    return f"stopped. {kept} {rest}"


@contextmanager
def _watching(wait: bool, hears: Sequence[Epochs] = ()) -> Iterator[Watch]:
    """Bars in a terminal, a line an epoch elsewhere."""
    from zeroforget.progress import TrainingDisplay
    from zeroforget.store import Watch

    with TrainingDisplay(errors()) as display:

        def training(progress: Progress) -> None:
            display.training(progress)
            for each in hears:
                each(progress)

        yield Watch(say=say, adds=_adds, decoding=display.reading, training=training, wait=None if wait else 0.0)


@contextmanager
def _tracking(model: Path, task: str, folder: Path | None, log: str | None) -> Iterator[list[Epochs]]:
    """Who else hears of each epoch, between `init` and `finish`."""
    if folder is None and log is None:
        yield []
        return
    from zeroforget.tracking import Epochs, TensorBoard, tracker

    chosen = [] if folder is None else [Epochs(TensorBoard(folder))]
    chosen += [] if log is None else [Epochs(tracker(log))]
    for each in chosen:
        each.to.init(project="zeroforget", name=f"{model.resolve().name}-{task}", config={"task": task})
    try:
        yield chosen
    finally:
        for each in chosen:
            each.to.finish()


def _adds(additions: Sequence[Addition]) -> None:
    for one in additions:
        rank = f" with rank {one.rank:g}" if one.rank else ""
        which = f"growing by {one.growth:g}{rank} " if len(additions) > 1 else "this task "
        say(f"{which}adds {one}")
    if len(additions) == 1 and additions[0].before is not None:
        grown = [f"{axis} {old}→{new}" for axis, (old, new) in additions[0].features.items() if new > old]
        say(
            f"  {', '.join(grown[:8])}{' …' if len(grown) > 8 else ''}"
            if grown
            else "  no new features: a head and its norms"
        )


@app.command("tasks", rich_help_panel=MODEL)
def tasks_command(
    model: ModelPath,
    layers: Annotated[bool, typer.Option("--layers", help="Features of each layer, however many.")] = False,
    as_json: Json = False,
) -> None:
    """List a model's tasks: classes, accuracy, features, what each added and when."""
    from zeroforget.store.folder import Folder  # of a model's JSON alone: without torch
    from zeroforget.store.schema import accuracy_of

    chain = Folder(model).read()
    if as_json:
        put_json(json.dumps([task.to_json() | {"hash": task.hash} for task in chain.tasks], indent=1))
        return
    table = table_of(
        "task", *(f">{name}" for name in ("classes", "accuracy", "features", "bytes", "operations")), "born"
    )
    total = 0
    for task in chain.tasks:
        added = sum(task.born.values())
        total += added
        table.add_row(
            shown(task.name), str(len(task.classes)), accuracy_of(task), f"{total} (+{added})", f"+{task.bytes:,}",
            f"{task.operations / 1e6:,.2f} M", task.learned.replace("T", " ")[:16],
        )  # fmt: skip
    show(table)
    few = chain.tasks and max(len(chain.tasks), len(chain.tasks[0].born)) <= FEW_LAYERS
    if chain.tasks and (layers or few):
        console().print()
        show(_layers(chain.tasks))
    backbone, whole = chain.model.backbone, Folder(model).size(chain)
    library, width = backbone.library, backbone.options.get("width", 1.0)
    network = f"{backbone.network} at width {width:g}" if library is None else f"{backbone.network} {library.version}"
    say(f"\n{network}, {backbone.takes.removesuffix(' pictures')}; {whole:,} bytes; {chain.head[:16]}")


def _layers(tasks: Sequence[TaskFacts]) -> Table:
    """Features of each layer after each task."""
    table = table_of("features of", *(f">{task.name}" for task in tasks))
    for axis in tasks[0].born:
        table.add_row(shown(axis), *map(str, accumulate(task.born.get(axis, 0) for task in tasks)))
    return table


@app.command("verify", rich_help_panel=MODEL)
def verify_command(
    model: ModelPath,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="TASK=FOLDER", help="Also measure a task on pictures.")
    ] = None,
    head: Annotated[str | None, typer.Option("--is", metavar="HASH", help="The hash the model must have.")] = None,
    as_json: Json = False,
) -> None:
    """Prove that nothing has moved: files, answers, accuracy. Exit code 1, and the reason, if something has."""
    from zeroforget.store.folder import Folder
    from zeroforget.store.verify import verify

    check_digits(head)
    report = verify(Folder(model), folders_of(data or ()))
    same = head is None or report.head.startswith(head.lower())
    if as_json:
        put_json(json.dumps(_report(report) | {"holds": report.holds and same}, indent=1))
    else:
        _print_report(report)
        if not same:
            what = f"the model is {report.head[:16]}," if report.head else "a damaged model is"
            console().print(f"[bold red]✗[/] {what} not {shown(head or '')}", highlight=False, soft_wrap=True)
    if not (report.holds and same):
        raise typer.Exit(1)


def check_digits(head: str | None) -> None:
    """Refuse a hash of so few digits that another model with the same ones could be made."""
    if head is not None and len(head) < DIGITS:
        raise ValueError(
            f"--is wants at least {DIGITS} digits of the model's hash, and '{head}' is too short to prove anything"
        )


def folders_of(given: Sequence[str]) -> dict[str, Path]:
    """What `--data` says: task to folder."""
    out: dict[str, Path] = {}
    for name, folder in map(_pair, given):
        if name in out:
            raise ValueError(f"--data names the task '{name}' twice ({out[name]} and {folder}); measure one at a time")
        out[name] = folder
    return out


def _pair(text: str) -> tuple[str, Path]:
    name, found, folder = text.partition("=")
    if not found or not name or not folder:
        raise ValueError(f"--data wants TASK=FOLDER, such as birds=photos/birds; got '{text}'")
    return name, Path(folder)


def _print_report(report: Report) -> None:
    for proof in report.proofs:
        mark = "[green]✓[/]" if proof.holds else "[bold red]✗[/]"
        console().print(f"{mark} {proof.title}: {shown(proof.found)}", highlight=False, soft_wrap=True)
        for moved in proof.moved:
            say(f"    {moved}")
    for one in report.measured:
        mark = "[green]✓[/]" if one.agrees else "[bold red]✗[/]"
        text = f"{one.task}: {100 * one.accuracy:.1f} % of {one.pictures} pictures ({between(one.interval)})"
        if one.held_out is not None and one.recorded is not None:
            text += f"; test part {100 * one.held_out:.2f} %, recorded {100 * one.recorded:.2f} %"
        elif one.recorded is None:
            text += " (none was recorded: it was adopted without pictures)"
        else:
            text += f" (recorded on its own test pictures: {100 * one.recorded:.1f} %)"
        console().print(f"{mark} {shown(text)}", highlight=False, soft_wrap=True)
    if report.head:
        say(f"model {report.head}")


def _report(report: Report) -> dict[str, Any]:
    from dataclasses import asdict

    found = asdict(report)
    for row, one in zip(found["measured"], report.measured, strict=True):
        row["interval"] = one.interval
    return found


@app.command("predict", rich_help_panel=MODEL)
def predict_command(
    model: ModelPath,
    pictures: Annotated[list[Path], typer.Argument(help="Pictures, or folders of them.", parser=as_path)],
    task: Annotated[
        str | None, typer.Option("--task", "-t", help="The task; without it, the likeliest is guessed.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 3,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Classify pictures. Exit code 1 if some could not be read. Other files in a folder are left out."""
    from zeroforget.store import open_model

    if as_json and as_csv:
        raise ValueError("predict prints --json or --csv, not both")
    files = predictions.listed(pictures)
    answers = open_model(model).predict([file for file, _ in files], task, top=top)
    answers = predictions.of_pictures(answers, [below for _, below in files])
    if as_json:
        predictions.print_json(answers)
    elif as_csv:
        predictions.print_csv(answers)
    else:
        predictions.print_table(answers, guessed=task is None)
    if any(one.error for one in answers):
        raise typer.Exit(1)


@app.command("export", rich_help_panel=MODEL)
def export_command(
    model: ModelPath,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; with --triton, a folder.", parser=as_path)
    ],
    task: Annotated[str | None, typer.Option("--task", "-t", help="The task.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All tasks in one file, chosen by the input 'task'.")] = False,
    triton: Annotated[
        bool, typer.Option("--triton", help="All tasks for a Triton server: a model repository, one version a task.")
    ] = False,
    form: Annotated[
        Literal["onnx", "torch"] | None,
        typer.Option(
            "--format",
            "-f",
            help="ONNX, or a torch.export program; by default the name's ending, .onnx or .pt2, tells.",
        ),
    ] = None,
) -> None:
    """Write a task as a plain ONNX file or torch.export program, and check that it answers as the model does."""
    from zeroforget.store import open_model

    if sum((task is not None, every, triton)) != 1 or (triton and form is not None):
        raise ValueError("name one task with --task, or ask for --all or --triton")
    if triton:
        place = open_model(model).export(output, form="triton")
        versions = sorted(int(one.name) for one in place.iterdir() if one.name.isdigit())
        say(f"wrote {place}: versions {versions[0]} to {versions[-1]}, whose answers are within 1e-5 of the model's")
        return
    open_model(model).export(output, task, form=form)
    say(f"wrote {output} ({output.stat().st_size:,} bytes); its answers are within 1e-5 of the model's")


@app.command("ship", rich_help_panel=MODEL)
def ship_command(
    model: ModelPath,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The update to write, such as update.zfu.", parser=as_path)
    ],
    since: Annotated[str | None, typer.Option(help="The newest task that the receiver has.")] = None,
    every: Annotated[bool, typer.Option("--all", help="The whole model.")] = False,
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY", help="Sign it with this private key.", parser=as_path)
    ] = None,
) -> None:
    """Write the tasks learned since one to a file, for models that end with that one."""
    from zeroforget.store import open_model

    if (since is None) is not every:
        raise ValueError("name the newest task that the receiver has with --since, or ask for --all")
    opened = open_model(model)
    tasks = opened.ship(output, since, key=sign)
    size, whole = output.stat().st_size, opened.bytes
    names = ", ".join(f"'{task.name}'" for task in tasks)
    say(f"wrote {output}: {names}, {size:,} bytes, {100 * size / whole:.1f} % of the model")


@app.command("receive", rich_help_panel=MODEL)
def receive_command(
    model: ModelPath,
    update: Annotated[Path, typer.Argument(help="A file that 'zeroforget ship' wrote.", parser=as_path)],
    head: Annotated[
        str | None, typer.Option("--is", metavar="HASH", help="The hash that the model must have afterwards.")
    ] = None,
    trust: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY.pub", help="It must be signed by this key, which is trusted from then on.", parser=as_path
        ),
    ] = None,
    older: Annotated[bool, typer.Option("--older", help="Take one signed before the newest received.")] = False,
    wait: Wait = True,
) -> None:
    """Add the tasks of an update to the model that it was made for. An update by 'ship --all' makes a new model."""
    from zeroforget.store import Watch, open_model
    from zeroforget.store.trust import public_key
    from zeroforget.store.update import Terms

    check_digits(head)
    opened = open_model(model)
    terms = Terms(head, None if trust is None else public_key(str(trust)), older)
    new = opened.receive(update, watch=Watch(say=say, wait=None if wait else 0.0), terms=terms)
    names = ", ".join(f"'{task.name}'" for task in new)
    say(
        f"received {names}; the model is {opened.head[:16]}" if new else f"nothing new; the model is {opened.head[:16]}"
    )


@app.command("undo", rich_help_panel=MODEL)
def undo_command(
    model: ModelPath,
    task: Annotated[str | None, typer.Option(help="Take it back only if it is this one.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: Wait = True,
) -> None:
    """Take back the newest task. The ones before are as they were, bit for bit."""
    from zeroforget.store import Watch
    from zeroforget.store.folder import Folder
    from zeroforget.store.model import undo

    meant = Folder(model).ending()
    if meant.folder and not yes:
        if not sys.stdin.isatty():
            raise ValueError(f"undo asks before it takes back {meant.folder}, and nobody can answer here; say --yes")
        typer.confirm(f"Take back {meant.folder}? What it learned is lost unless it was shipped", abort=True)
    name = undo(Folder(model), Watch(say=say, wait=None if wait else 0.0), task, meant)
    left = [entry[1] for entry in Folder(model).entries()]
    say(f"took back '{name}'; the model ends with {left[-1]}" if left else f"took back '{name}'; the model has no task")
