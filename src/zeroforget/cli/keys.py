"""`zeroforget key`: keys that sign updates, keys that a model trusts, and keys to a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroforget.cli.app import MODEL, ModelPath, app, as_path
from zeroforget.cli.printing import put, say

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
