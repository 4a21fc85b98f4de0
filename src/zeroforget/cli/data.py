"""`zeroforget scenarios` and `zeroforget data`: what there is, what is on this disk, and getting the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroforget.cli.app import LAB, Groups, app, as_path, console, errors, say, shown

if TYPE_CHECKING:
    from zeroforget.data import OnRead, Plan
    from zeroforget.data.pack import Packed
    from zeroforget.data.sources import Source

DataRoot = Annotated[
    Path | None, typer.Option(help="Folder that holds the data sets (else ZEROFORGET_DATA).", parser=as_path)
]


@contextmanager
def progress_bars() -> Iterator[OnRead]:
    """Bars on the terminal for downloads, unpacking and decoding; a sentence without a count is printed as a line."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors()) as bars:
        rows: dict[str, TaskID] = {}

        def told(what: str, done: int, total: int) -> None:
            if not done and not total:
                bars.console.print(shown(what), highlight=False, soft_wrap=True)
                return
            if what not in rows:
                rows[what] = bars.add_task(shown(what), total=total or None)
            bars.update(rows[what], completed=done, total=total or None)

        yield told


@app.command(rich_help_panel=LAB)
def scenarios(data_root: DataRoot = None) -> None:
    """List the scenarios: tasks, classes, images, and whether they are ready on this disk."""
    from rich.table import Table

    from zeroforget.data.scenarios import missing, named_plans

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("scenario", no_wrap=True)
    for title in ("tasks", "classes", "train", "test"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("on this disk")
    for name, plan in named_plans().items():
        lacks = missing(plan, data_root)
        state = f"[yellow]needs {', '.join(lacks)}[/]" if lacks else "[green]ready[/]"
        table.add_row(name, *_counts(plan), state)
    console().print(table)
    console().print(
        "\nA tenth of each class's training images is kept for validation. Any data set can be cut as NAME/N, for "
        "example mnist/5; `zeroforget data` lists them.",
        highlight=False,
    )


def _counts(plan: Plan) -> list[str]:
    from zeroforget.data.sources import SOURCES

    used = [SOURCES[name] for name in plan.data]
    ways = plan.sizes or plan.groups
    tasks = len(ways) if ways else plan.tasks or len(used)
    sums = (sum(s.classes for s in used), sum(s.train for s in used), sum(s.test for s in used))
    return [f"{count:,}" for count in (tasks, *sums)]


class _Named(Groups):
    """`data flowers` is short for `data show flowers`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words after `data`."""
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


data = typer.Typer(cls=_Named, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(
    data,
    name="data",
    rich_help_panel=LAB,
    help="Say where a data set comes from and whether it is on this disk; download, prepare and pack it.",
)


@data.command()
def show(
    name: str | None = typer.Argument(None, help="A data set; without one, all are listed."),
    download: bool = typer.Option(False, "--download", help="Fetch, verify and unpack it (what is there is kept)."),
    prepare: bool = typer.Option(False, "--prepare", help="Read it now and decode its images into the cache."),
    keep: bool = typer.Option(False, "--keep", help="Keep the archives after unpacking them."),
    insecure: bool = typer.Option(False, "--insecure", help="Use plain http even where no checksum is known."),
    data_root: DataRoot = None,
) -> None:
    """Say where a data set comes from and whether it is on this disk; download and prepare it. The word `show` may be
    left out: `zeroforget data flowers`."""
    from zeroforget.data.loading import source

    if name is None:
        if download or prepare:
            raise ValueError("say which data set to download or prepare: `zeroforget data NAME --download`")
        _list(data_root)
        return
    entry = source(name)
    if download:
        _download(entry, data_root, keep, insecure)
    if prepare:
        _prepare(entry, data_root)
    if not download and not prepare:
        _status(entry, data_root)


Workers = Annotated[int | None, typer.Option(min=1, max=1024, help="Processes; by default one for each core.")]
Size = Annotated[int, typer.Option(min=1, max=4096, help="Pixels of a side, where the data set does not say.")]


@data.command()
def pack(
    name: Annotated[str, typer.Argument(help="A data set, or a folder of class folders.")],
    out: Annotated[Path, typer.Option(help="The folder for the shards.", parser=as_path)],
    jpeg: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Bring pictures to their size now, and store JPEG of this quality."),
    ] = None,
    size: Size = 224,
    per_shard: Annotated[int | None, typer.Option(min=1, help="Pictures in a shard; by default about 128 MB.")] = None,
    workers: Workers = None,
    data_root: DataRoot = None,
) -> None:
    """Write a data set as shards: tar files and an index, for data that do not fit into memory or on one disk.

    Files are packed as they are. A picture that cannot be read is left out and named. An interrupted packing goes on
    with the same command. Learn from the shards as `shards:DIR`.
    """
    from zeroforget.data.pack import pack as packing

    with progress_bars() as progress:
        found = packing(
            name, out, jpeg=jpeg, size=size, per_shard=per_shard, workers=workers, root=data_root, progress=progress
        )
    _told(found, out)


@data.command()
def index(
    folder: Annotated[Path, typer.Argument(help="A folder of tar files, as WebDataset writes them.", parser=as_path)],
    classes: Annotated[
        Path | None, typer.Option(help="A text file with the name of each class on a line.", parser=as_path)
    ] = None,
    size: Size = 224,
    workers: Workers = None,
) -> None:
    """Write the index of tar files that another program wrote: `key.jpg` and `key.cls` with the number of the class."""
    from zeroforget.data.pack import index_shards
    from zeroforget.data.readers.folders import lines

    with progress_bars() as progress:
        names = None if classes is None else lines(classes)
        found = index_shards(folder, classes=names, size=size, workers=workers, progress=progress)
    _told(found, folder)


def _told(found: Packed, folder: Path, most: int = 10) -> None:
    known = found.index
    for name, why in known.left_out[:most]:
        say(f"left out: {name} {why}")
    if len(known.left_out) > most:
        say(f"left out: {len(known.left_out) - most} more, which {folder / 'index.json'} names")
    say(
        f"{folder}: {len(known.rows):,} pictures of {len(known.classes)} classes in {len(known.shards)} shards, "
        f"{found.bytes / 1e6:,.1f} MB; learn from them as shards:{folder}"
    )


def _list(data_root: Path | None) -> None:
    from rich.table import Table

    from zeroforget.data.loading import find
    from zeroforget.data.sources import SOURCES

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("data set", no_wrap=True)
    for title in ("classes", "train", "test"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("on this disk")
    table.add_column("what")
    for name, entry in SOURCES.items():
        state = "[green]yes[/]" if find(entry, data_root) is not None else "[yellow]no[/]"
        table.add_row(name, f"{entry.classes:,}", f"{entry.train:,}", f"{entry.test:,}", state, shown(entry.title))
    console().print(table)


def _status(entry: Source, data_root: Path | None) -> None:
    from zeroforget.data.cache import data_roots
    from zeroforget.data.loading import find, lacking, remedy

    say(f"{entry.title}: {entry.classes} classes, {entry.train:,} training and {entry.test:,} test images")
    say(f"home: {entry.home}\nterms: {entry.terms}")
    for archive in entry.archives:
        say(f"file: {archive.url or archive.file}  ({archive.checksum or 'no checksum known'})")
    folder = find(entry, data_root)
    if not entry.needs:
        say("comes with the package: ready")
    elif folder is not None:
        say(f"on this disk: {folder}")
    else:
        place = data_roots(data_root)[0] / entry.folders[0]
        say(f"not on this disk: {place} lacks {', '.join(lacking(entry, place))}\n{remedy(entry)}")


def _download(entry: Source, data_root: Path | None, keep: bool, insecure: bool) -> None:
    from zeroforget.data.cache import data_roots
    from zeroforget.data.download import download
    from zeroforget.data.loading import find

    folder = find(entry, data_root)
    if folder is None:
        with progress_bars() as progress:
            download(entry, data_roots(data_root)[0], progress, keep, insecure)
        folder = find(entry, data_root)
    say(f"{entry.name}: ready in {folder}" if entry.needs else f"{entry.name} comes with the package: ready")


def _prepare(entry: Source, data_root: Path | None) -> None:
    from zeroforget.data.loading import load

    with progress_bars() as progress:
        found = load(entry.name, data_root, progress)
    train, test = int((~found.test).sum()), int(found.test.sum())
    say(f"{entry.name}: {len(found.classes)} classes, {train:,} training and {test:,} test images, each {found.shape}")
    if (len(found.classes), train, test) != (entry.classes, entry.train, entry.test):
        say(f"officially it has {entry.classes} classes, {entry.train:,} and {entry.test:,} images: this copy differs")
