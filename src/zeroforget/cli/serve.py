"""`zeroforget serve`, a model's tasks over HTTP, and `zeroforget key`: keys to a server, and keys that sign updates."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroforget.cli.app import (
    MODEL,
    ModelPath,
    Threads,
    app,
    as_path,
    computing_with,
    errors,
    put,
    say,
    show,
    shown,
    table_of,
)

if TYPE_CHECKING:
    from zeroforget.store.states import Change

KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="Keys of those who may ask ('zeroforget key access' adds one); read again when it changes.",
        parser=as_path,
    ),
]
Workers = Annotated[
    int, typer.Option(min=1, max=256, help="Processes that answer; all share one port and one copy of the weights.")
]


@app.command("serve", rich_help_panel=MODEL)
def serve_command(
    model: ModelPath,
    host: Annotated[str, typer.Option(help="The address to serve at; by default only this machine reaches it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    upload: Annotated[float, typer.Option(help="MiB of one picture at most.")] = 20,
    pixels: Annotated[float, typer.Option(help="Megapixels of one picture at most.")] = 40,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait at once.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Pictures classified together at most.")] = 64,
    memory: Annotated[float, typer.Option(help="MiB of tasks' own networks that are kept ready.")] = 1024,
    threads: Threads = None,
    workers: Workers = 1,
    poll: Annotated[float, typer.Option(help="Seconds between looks at the folder for new tasks.")] = 1.0,
    key_file: KeyFile = None,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate (PEM): serve https.", parser=as_path)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).", parser=as_path)] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that this server goes by, beside its addresses; * is any."),
    ] = None,
    own_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Answer /health and /metrics at this port, and only there.")
    ] = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Also ask the newest state, where 'promote' chose another; see /tasks.")
    ] = False,
    connections: Annotated[int, typer.Option(min=1, help="Connections of one address at once.")] = 128,
) -> None:
    """Serve a model's tasks over HTTP, with a page at /. A task learned meanwhile appears by itself."""
    try:
        from zeroforget.serving import Settings, serve
        from zeroforget.serving.run import is_loopback, logged
    except ImportError as error:
        raise ValueError(str(error)) from None
    logged()
    settings = Settings(
        upload=_whole("upload", upload, 2**20), pixels=_whole("pixels", pixels, 10**6), queue=queue, batch=batch,
        memory=_whole("memory", memory, 2**20), poll_seconds=poll, hosts=tuple(allow_host or ()), key_file=key_file,
        own_port=own_port, connections_each=connections, shadow=shadow,
    )  # fmt: skip
    if (tls_cert is None) is not (tls_key is None):
        raise ValueError("https takes a certificate and its key: --tls-cert and --tls-key")
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)

    def ready(address: str) -> None:
        put(f"serving {model} at {address}")
        if not is_loopback(host) and key_file is None:
            errors().print("whoever reaches this address can use the model: there is no password", highlight=False)

    if workers > 1 and threads is None:
        threads = max(1, (os.cpu_count() or 1) // workers)
    with computing_with(threads):
        serve(model, host=host, port=port, settings=settings, tls=tls, workers=workers, ready=ready)


def _whole(name: str, given: float, unit: int) -> int:
    """So many units; nothing that is no number, or has no end."""
    if not math.isfinite(given):
        raise ValueError(f"--{name} wants a number above zero, such as 20; got {given}")
    return int(given * unit)


@app.command("promote", rich_help_panel=MODEL)
def promote_command(
    model: ModelPath,
    task: Annotated[str | None, typer.Option("--to", help="The task it ends with; by default the newest.")] = None,
) -> None:
    """Serve the newest state, or that after a task. From then on a new task is served only when it is promoted."""
    from zeroforget.store import Watch
    from zeroforget.store.folder import Folder
    from zeroforget.store.states import choose

    _tell(choose(Folder(model), task, Watch(say=say)))


@app.command("rollback", rich_help_panel=MODEL)
def rollback_command(
    model: ModelPath, task: Annotated[str, typer.Argument(help="The task that the earlier state ends with.")]
) -> None:
    """Serve an earlier state. Nothing is deleted; 'promote' goes forward again."""
    from zeroforget.store import Watch
    from zeroforget.store.folder import Folder
    from zeroforget.store.states import choose

    _tell(choose(Folder(model), task, Watch(say=say), back=True))


def _tell(change: Change) -> None:
    from zeroforget.store.schema import accuracy_of

    table = table_of("task", "", *(f">{name}" for name in ("classes", "accuracy", "features", "bytes")))
    for task, what in change.tasks:
        table.add_row(
            shown(task.name), what, str(len(task.classes)), accuracy_of(task),
            f"+{sum(task.born.values())}", f"+{task.bytes:,}",
        )  # fmt: skip
    show(table)
    before, after = change.before.head[:16], change.after.head[:16]
    say(f"served: {after}, as before" if before == after else f"served: {after}, before {before}")


key = typer.Typer(help="Keys that sign updates, that a model trusts, and that open a server.", no_args_is_help=True)
app.add_typer(key, name="key", rich_help_panel=MODEL)
Public = Annotated[Path, typer.Argument(metavar="KEY.pub", help="A public key's file.", parser=as_path)]


@key.command("new")
def new_command(
    file: Annotated[
        Path, typer.Argument(help="Where the private key goes; the public one goes beside it, as .pub.", parser=as_path)
    ],
    name: Annotated[str, typer.Option(help="What its holder is called; by default as the file.")] = "",
) -> None:
    """Make a key to sign updates with. ZEROFORGET_PASSPHRASE, if it is set, locks the private one."""
    from zeroforget.store.trust import new_key

    made = new_key(file, name or file.stem)
    say(f"wrote {file}, which is for you alone, and {file}.pub, which is for those who receive: {made.short}")


@key.command("trust")
def trust_command(model: ModelPath, public: Public) -> None:
    """Take updates that this key signed; from the first on, a model takes no others."""
    from zeroforget.store import Watch
    from zeroforget.store.folder import Folder
    from zeroforget.store.trust import change_keys, public_key

    added = public_key(str(public))
    trust = change_keys(
        Folder(model), lambda keys: (*(one for one in keys if one.key != added.key), added), Watch(say=say)
    )
    say(f"{model} trusts {', '.join(one.short for one in trust.keys)}")


@key.command("forget")
def forget_command(
    model: ModelPath,
    which: Annotated[str, typer.Argument(help="Its name, or its first 16 digits or more.")],
) -> None:
    """Stop trusting a key. A model that trusts none takes updates of all origins again."""
    from zeroforget.store import Watch
    from zeroforget.store.folder import Folder
    from zeroforget.store.trust import Key, change_keys

    def without(keys: tuple[Key, ...]) -> tuple[Key, ...]:
        found = [one for one in keys if one.name == which or (len(which) >= 16 and one.key.startswith(which))]
        if len(found) != 1:
            known = ", ".join(one.short for one in keys) or "none"
            raise ValueError(f"'{which}' names {len(found)} of the keys that {model} trusts: {known}")
        return tuple(one for one in keys if one != found[0])

    trust = change_keys(Folder(model), without, Watch(say=say))
    say(f"{model} trusts {', '.join(one.short for one in trust.keys) or 'no key: updates of all origins are taken'}")


@key.command("list")
def list_command(model: ModelPath) -> None:
    """The keys that a model trusts, and the newest signed state that it had."""
    from zeroforget.store.folder import Folder
    from zeroforget.store.trust import read_trust

    folder = Folder(model)
    folder.read()
    trust = read_trust(folder)
    for one in trust.keys:
        say(f"{one.key}  {one.name}")
    if not trust.keys:
        say("no key: updates of all origins are taken")
    if trust.head:
        say(f"newest signed state: {trust.head[:16]}, signed {trust.signed[:19].replace('T', ' ')} UTC")


@key.command("access")
def access_command(
    file: Annotated[Path, typer.Argument(help="The file of keys that 'serve --key-file' reads.", parser=as_path)],
    name: Annotated[str, typer.Argument(help="Who holds it: letters, digits, '.', '_' and '-'.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second at most.")] = None,
) -> None:
    """Make a key to a server. It is printed once; the file keeps its hash. Its line taken out, it opens nothing."""
    try:
        from zeroforget.serving.gate import new_key
    except ImportError as error:
        raise ValueError(str(error)) from None
    put(new_key(file, name, rate))
