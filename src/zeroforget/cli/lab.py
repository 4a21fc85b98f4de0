"""The laboratory's commands: `run` an experiment, print its `table`."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from zeroforget.cli.app import LAB, Log, app, as_path, complain, console, errors, put, say, with_others

if TYPE_CHECKING:
    from zeroforget.experiments.cluster import Cluster
    from zeroforget.experiments.observers import ExperimentDisplay
    from zeroforget.experiments.results import Results


Runs = Annotated[
    list[Path], typer.Argument(help="Folders of runs, folders that hold several, or archives.", parser=as_path)
]
Style = Literal["terminal", "markdown", "latex", "csv"]
_STYLES: dict[str, Style] = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".txt": "terminal", "": "terminal"}


Parallel = Annotated[
    int, typer.Option(min=1, metavar="N", help="Train N runs at the same time, each in a process of its own.")
]
PartOf = Annotated[
    str | None, typer.Option(metavar="I/N", help="Only the I-th of N parts of the runs, for job arrays.")
]
Ray = Annotated[
    str | None, typer.Option(metavar="[ADDRESS]", help="Train on a Ray cluster; without an address, this host's.")
]
Cpus = Annotated[float, typer.Option(help="With --ray: processors, and threads, of each run.")]
Gpus = Annotated[
    float | None, typer.Option(help="With --ray: the share of a GPU of each run; 1 by default with --device cuda.")
]
Memory = Annotated[float | None, typer.Option(help="With --ray: GB of memory that each run needs.")]


class WithRay(TyperCommand):
    """A command whose `--ray` may stand without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An address that is left out is the cluster of this host."""
        for place in reversed([place for place, word in enumerate(args) if word == "--ray"]):
            following = args[place + 1 : place + 2]
            if not following or following[0].startswith("-") or following[0].endswith(".toml"):
                args = [*args[: place + 1], "auto", *args[place + 1 :]]
        return super().parse_args(ctx, args)


@app.command("run", rich_help_panel=LAB, cls=WithRay)
def run_command(
    file: Annotated[Path, typer.Argument(help="The experiment, a TOML file.", parser=as_path)],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value: regime.lr=0.1, ewc.strength=100."),
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods, such as tfm,ewc.")] = None,
    seeds: Annotated[str | None, typer.Option(help="These seeds, such as 0,1,2.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs are kept.", parser=as_path)] = Path("runs"),
    data_root: Annotated[Path | None, typer.Option(help="Where data sets are kept.", parser=as_path)] = None,
    parallel: Parallel = 1,
    part: PartOf = None,
    ray: Ray = None,
    cpus: Cpus = 1.0,
    gpus: Gpus = None,
    memory: Memory = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write scalars for TensorBoard.")] = False,
    log: Log = None,
) -> None:
    """Run every method of an experiment. Started again, it goes on where it stopped and repeats nothing."""
    from zeroforget.experiments.experiment import Experiment, Part
    from zeroforget.experiments.observers import Observer, Observers, TensorBoardObserver, Tracked
    from zeroforget.experiments.runner import Failed, run
    from zeroforget.tracking import tracker
    from zeroforget.training.regime import trained_elsewhere

    if log is not None and (parallel > 1 or ray is not None):
        raise ValueError("--log tells of one run at a time; leave out --parallel, or use --tensorboard")
    _note_foreign_code(file)
    with trained_elsewhere() if ray is not None else nullcontext():
        experiment = Experiment.load(
            file,
            changes=changes or (),
            methods=None if methods is None else _words(methods),
            seeds=None if seeds is None else _numbers(seeds),
            device=device,
        )
    chosen = None if part is None else Part.parse(part)
    runs = len(experiment.runs() if chosen is None else chosen.of(experiment.runs()))
    cluster = None if ray is None else _cluster(ray, experiment.regime.device, cpus, gpus, memory)
    how: dict[str, Any] = {"data_root": data_root, "parallel": parallel, "cluster": cluster, "part": chosen}
    with with_others() as processes:
        if not processes.first:
            run(experiment, out, watch=Observer(), **how)
            return
        with _watching(runs, parallel if ray is None else runs) as watch:
            more: list[Observer] = [TensorBoardObserver(out)] if tensorboard else []
            more += [Tracked(tracker(log))] if log else []
            watches = Observers(watch, *more) if more else watch
            try:
                results = run(experiment, out, watch=watches, **how)
            except Failed as failed:
                _show(failed.results)
                raise
            except KeyboardInterrupt:
                raise _stopped() from None
        _show(results)
        say(f"runs are in {out / experiment.name}")


def _cluster(address: str, device: str, cpus: float, gpus: float | None, memory: float | None) -> Cluster:
    from zeroforget.experiments.cluster import Cluster

    share = gpus if gpus is not None else float(device.startswith("cuda"))
    return Cluster(address, cpus, share, None if memory is None else int(memory * 10**9))


def _note_foreign_code(file: Path) -> None:
    from zeroforget.experiments.experiment import foreign_code

    if named := foreign_code(file):
        text = f"{file} lies outside of this folder and names code, which is run: {', '.join(named)}"
        complain("[bold yellow]note:[/]", text)


def _stopped() -> typer.Exit:
    errors().print("stopped. The same command goes on where it stopped", highlight=False, soft_wrap=True)
    return typer.Exit(130)


def _show(results: list[Results]) -> None:
    from zeroforget.experiments.formats import terminal
    from zeroforget.experiments.tables import tables

    for table in tables(results) if results else ():
        console().print(terminal(table), soft_wrap=True)


@app.command("table", rich_help_panel=LAB)
def table_command(
    runs: Runs,
    style: Annotated[
        Style | None,
        typer.Option("--format", "-f", help="What to print; by default what the output's ending says, else terminal."),
    ] = None,
    beside: Annotated[
        Literal["paper", "published"] | None,
        typer.Option(help="'paper' puts the paper's figures below ours, 'published' those of other papers."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="Each average less this row's, paired by seed, with its 95 % interval."),
    ] = None,
    averages: Annotated[bool, typer.Option("--averages", help="One table: a column for each scenario.")] = False,
    costs: Annotated[bool, typer.Option("--costs", help="Also sizes, overhead, epochs, time, transfer.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file instead.", parser=as_path)
    ] = None,
) -> None:
    """The paper's table from finished runs: accuracy (forgetting) per task, average, best in bold."""
    from zeroforget.experiments import costs as spending
    from zeroforget.experiments import formats
    from zeroforget.experiments import tables as made
    from zeroforget.experiments.disk import check_output

    style = style or _style(output)
    if output is not None:
        check_output(output, "table", formats.is_table)
    results = finished(runs)
    paper = beside == "paper"
    if averages:
        if against is not None or beside == "published":
            raise ValueError("--averages has a column a scenario; give --against and --beside published without it")
        tables = [made.averages(results, beside_paper=paper)]
    else:
        tables = made.tables(results, beside_paper=paper, published=beside == "published", against=against)
    more = formats.costs_text(spending.cost_tables(results), style) if costs else ""
    if style == "terminal" and output is None:
        for table in tables:
            console().print(formats.terminal(table), soft_wrap=True)
        put(more, ending="")
    else:
        _put(formats.text(tables, style) + ("\n" + more if more else ""), output)


@app.command("archive", rich_help_panel=LAB)
def archive_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; those below them count too.", parser=as_path)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write, such as results/digits.json.", parser=as_path)
    ],
) -> None:
    """Write finished runs to one small JSON file, without their training curves; `table` reads it like the runs."""
    from zeroforget.experiments import archive
    from zeroforget.experiments.disk import check_output

    check_output(output, "archive", archive.is_archive)
    results = finished(runs)
    archive.save(results, output)
    say(f"wrote {len(results)} runs to {output}")


def finished(runs: list[Path]) -> list[Results]:
    """The finished runs of these folders and archives, equal ones once. Beside the output, not in it, it is said which
    are left out because they are not finished, and how many were given more than once."""
    from zeroforget.experiments import archive
    from zeroforget.experiments.results import unfinished

    results, several = archive.distinct(archive.load_all(runs))
    if several:
        count = f"{several} run{'s' if several > 1 else ''}"
        errors().print(f"given more than once, so counted once: {count}", soft_wrap=True, highlight=False)
    if left := unfinished(runs):
        errors().print(f"not finished, so left out: {', '.join(left)}", soft_wrap=True, highlight=False, markup=False)
    return results


def _style(output: Path | None) -> Style:
    """What a file's ending says."""
    if (ending := output.suffix.lower() if output else "") not in _STYLES:
        raise ValueError(f"{output}: tables are written as .md, .tex, .csv or .txt; give such an ending, or --format")
    return _STYLES[ending]


def _put(text: str, output: Path | None) -> None:
    if output is None:
        put(text, ending="")
    else:
        from zeroforget.experiments.disk import write_text

        write_text(output, text)
        say(f"wrote {output}")


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"--seeds wants whole numbers, such as 0,1,2; got '{text}'") from None


def _watching(runs: int, parallel: int) -> ExperimentDisplay:
    from zeroforget.experiments.observers import ExperimentDisplay

    return ExperimentDisplay(console(), runs, parallel)


@app.command("demo", rich_help_panel=LAB)
def demo_command(
    seed: Annotated[int, typer.Option(help="Fixes data split, initial network and all that is random.")] = 0,
) -> None:
    """Learn five tasks one after another (digits in pairs), by TFM and by fine-tuning, and prove what is kept."""
    import torch

    from zeroforget.experiments import demo
    from zeroforget.experiments.formats import terminal
    from zeroforget.experiments.observers import ExperimentDisplay
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
