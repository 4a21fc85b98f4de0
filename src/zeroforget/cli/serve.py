"""`zeroforget serve`: a model's tasks over HTTP, and a page."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from zeroforget.cli.app import MODEL, ModelPath, Threads, app, computing_with, errors
from zeroforget.cli.printing import put


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
    poll: Annotated[float, typer.Option(help="Seconds between looks at the folder for new tasks.")] = 1.0,
) -> None:
    """Serve a model's tasks over HTTP, with a page at /. A task learned meanwhile appears by itself."""
    import logging

    try:
        from zeroforget.serving import Settings, serve
        from zeroforget.serving.run import is_loopback
    except ImportError as error:
        raise ValueError(str(error)) from None
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    settings = Settings(
        upload=_whole("upload", upload, 2**20), pixels=_whole("pixels", pixels, 10**6), queue=queue, batch=batch,
        memory=_whole("memory", memory, 2**20), poll_seconds=poll,
    )  # fmt: skip

    def ready(address: str) -> None:
        put(f"serving {model} at {address}")
        if not is_loopback(host):
            errors.print("whoever reaches this address can use the model: there is no password", highlight=False)

    with computing_with(threads):
        serve(model, host=host, port=port, settings=settings, ready=ready)


def _whole(name: str, given: float, unit: int) -> int:
    """So many units; nothing that is no number, or has no end."""
    if not math.isfinite(given):
        raise ValueError(f"--{name} wants a number above zero, such as 20; got {given}")
    return int(given * unit)
