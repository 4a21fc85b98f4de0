"""Serve a model until told to stop."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from zeroforget.files.text import LINES, visible
from zeroforget.serving.app import Server
from zeroforget.serving.guard import Door, ask_for_files, guarded
from zeroforget.serving.settings import Settings
from zeroforget.serving.workers import Workers
from zeroforget.store.folder import as_path


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """A socket at this address; OSError says which one cannot be had."""
    if not host:
        raise ValueError("name an address with --host: 127.0.0.1 for this machine alone, 0.0.0.0 for all who reach it")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Said to be TCP in so many words, because asyncio sends small answers at once (TCP_NODELAY) only on such sockets;
    # else each answer waits 40 ms for an acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        advice = "name an address of this machine with --host" if elsewhere else "choose another --port"
        raise OSError(f"cannot serve at {host}, port {port}: {error.strerror or error}; {advice}") from None
    except OverflowError:
        sock.close()
        raise ValueError(f"a port is a number from 0 to 65535, not {port}") from None
    return sock


def serve(
    path: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    tls: tuple[Path, Path] | None = None,
    workers: int = 1,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the model in a folder until SIGINT or SIGTERM. `ready` is told the address; port 0 takes a free one.

    `tls`: files of a certificate (with those that vouch for it) and its key. `workers`: so many processes answer, each
    with as many threads as torch has here; their weights are in memory once.
    """
    settings, path = settings or Settings(), as_path(path)
    if workers > 1 and os.name != "posix":
        raise ValueError("several workers need a system where processes can share a port: Linux, macOS")
    ask_for_files(settings.connections)
    server = Server(path, settings) if workers == 1 else None
    sockets = [bound(host, port)]
    if settings.own_port is not None:
        sockets.append(bound(host, settings.own_port))
    shown = f"[{host}]" if ":" in host else host
    if server is not None:
        configured(server, tls)  # a certificate that cannot be used is told before anybody is let in
    with contextlib.ExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)
            sock.listen(2048)  # whoever comes from now on is answered
        address = f"http{'s' if tls else ''}://{shown}:{sockets[0].getsockname()[1]}/"
        if server is not None:
            run_until_told(server, sockets, tls, lambda: ready(address))
        else:
            Workers(path, workers, settings, sockets, tls).run(lambda: ready(address))


def run_until_told(
    server: Server, sockets: list[socket.socket], tls: tuple[Path, Path] | None, ready: Callable[[], None]
) -> None:
    """Answer at these sockets until SIGINT or SIGTERM."""
    running = uvicorn.Server(configured(server, tls))
    _bound_the_end(running, server.settings.stop_seconds)
    with contextlib.ExitStack() as stack:
        doors: list[socket.socket] = [
            stack.enter_context(Door(sock, server.guests, tls=tls is not None)) for sock in sockets
        ]
        ready()
        running.run(sockets=doors)


def logged() -> None:
    """Tell what happens in lines with their time, whatever signs a request had in its names."""
    logging.basicConfig()
    logging.getLogger("zeroforget.serving").setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Visible("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), keep=LINES)


def _bound_the_end(running: uvicorn.Server, seconds: float) -> None:
    """A server that was told to stop is ended by the system, should anything keep it from stopping by itself."""
    usual = running.handle_exit

    def told(sig: int, frame: FrameType | None) -> None:
        if hasattr(signal, "alarm"):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(math.ceil(seconds) + 15)
        usual(sig, frame)

    running.handle_exit = told  # type: ignore[method-assign]


def configured(server: Server, tls: tuple[Path, Path] | None = None) -> uvicorn.Config:
    """How uvicorn runs a server, within its limits."""
    if odd := [str(one) for one in tls or () if one.exists() and not one.is_file()]:
        raise ValueError(f"{odd[0]} is no file that could be a certificate or a key")
    files: dict[str, Any] = {} if tls is None else {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}
    config = uvicorn.Config(
        server.app, log_level="warning", timeout_graceful_shutdown=math.ceil(server.settings.stop_seconds),
        server_header=False, proxy_headers=False, ws="none", http=guarded(server.guests), loop="asyncio",
        lifespan="on", **files,
    )  # fmt: skip
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        if tls is None:
            raise
        raise ValueError(f"{tls[0]} and {tls[1]} are no certificate and its key that can be used ({error})") from error
    return config
