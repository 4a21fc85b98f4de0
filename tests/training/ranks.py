"""Several processes for tests, joined by gloo: a server that has read our modules forks them, so they start at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from zeroforget.processes import Place, joined

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "zeroforget.experiments.runner", "tests.training.ranks"])


def together(world: int, work: Callable[..., Any], *args: Any, lost: Sequence[int] = ()) -> list[Any]:
    """What each of so many processes returns of `work(*args)`, or its error; None of those that are lost."""
    port, running = free_port(), []
    for rank in range(world):
        ears, mouth = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_live, args=(mouth, Place(rank, world, rank, "127.0.0.1", port), work, args))
        process.start()
        mouth.close()
        running.append((process, ears))
    said = []
    for rank, (process, ears) in enumerate(running):
        try:
            said.append(pickle.loads(ears.recv()) if ears.poll(120) else f"process {rank} says nothing")
        except EOFError:
            said.append(None)
        process.join(20)
        if process.exitcode is None:
            process.kill()
        ears.close()
    assert [rank for rank, each in enumerate(said) if each is None] == list(lost), said
    return said


def _live(mouth: Connection, place: Place, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        with joined(place):
            found = work(*args)
            mouth.send(pickle.dumps(found))  # tensors by value: this process ends
    except Exception as error:
        mouth.send(pickle.dumps(f"{type(error).__name__}: {error}"))
        if os.environ.get("SHOW"):
            traceback.print_exc()
    finally:
        mouth.close()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
