"""Serve a model until told to stop."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from zeroforget.serving.app import Server
from zeroforget.serving.settings import Settings


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
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the model in a folder until SIGINT or SIGTERM. `ready` is told the address; port 0 takes a free one."""
    server = Server(path, settings)
    sock = bound(host, port)
    logging.getLogger("zeroforget.serving").setLevel(logging.INFO)
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(server.app, log_level="warning", timeout_graceful_shutdown=30, server_header=False)
    with sock:
        sock.listen(2048)  # whoever comes from now on is answered
        ready(f"http://{shown}:{sock.getsockname()[1]}/")
        uvicorn.Server(config).run(sockets=[sock])
