"""Serve a model until told to stop: by this process, or by several that are watched and started again."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import math
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn

from zeroforget.files.text import LINES, visible
from zeroforget.serving.app import Server
from zeroforget.serving.gate import Door, ask_for_files, guarded
from zeroforget.serving.settings import Settings
from zeroforget.serving.together import SILENT_S, Together
from zeroforget.store.folder import as_path

log = logging.getLogger("zeroforget.serving")
LOOK_S = 0.1
STUCK_S = 2 * SILENT_S
"""A process that has reported nothing for so long, or is failing, is ended and started again."""
PAUSES = (0.0, 1.0, 5.0, 30.0)
"""Before it is started again for the first time, the second, and so on."""
BEYOND_S = 20.0
"""Processes end by themselves within the bound for that; what is left is killed so much later."""


class Workers:
    """So many processes; `run` returns when all of them have ended."""

    def __init__(
        self, path: Path, count: int, settings: Settings, sockets: list[socket.socket], tls: tuple[Path, Path] | None
    ) -> None:
        self.settings, self.count, self.sockets = settings, count, sockets
        self.folder = Path(tempfile.mkdtemp(prefix="zeroforget-serve-"))
        """For this user alone. Below TMPDIR; memory, where that is memory."""
        self.told: int | None = None
        """The signal to end by."""
        self.words: dict[str, Any] = {
            "path": str(path), "settings": plain(settings), "tls": None if tls is None else [str(one) for one in tls],
            "folder": str(self.folder), "count": count, "threads": torch.get_num_threads(),
            "sockets": [sock.fileno() for sock in sockets],
        }  # fmt: skip
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.since: dict[int, float] = {}
        self.failures: dict[int, int] = {}

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until SIGINT or SIGTERM. ValueError says why the first process could not begin."""
        usual = {sig: signal.signal(sig, self._tell) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in range(self.count):  # one after another: the others find the first one's weights
                self._start(number)
                self._wait_until_ready(number)
            if self.told is None:
                ready()
            while self.told is None:
                self._look()
                time.sleep(LOOK_S)
        finally:
            self._end()
            for sig, handler in usual.items():
                signal.signal(sig, handler)
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.told is not None:
            signal.raise_signal(self.told)  # as it would have ended without us

    def _tell(self, sig: int, frame: FrameType | None) -> None:
        self.told = sig
        for process in self.running.values():
            process.terminate()

    def _start(self, number: int) -> None:
        command = [sys.executable, "-P", "-m", "zeroforget.serving.worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, pass_fds=self.words["sockets"], **pipes)  # type: ignore[call-overload]
        self.running[number], self.since[number] = process, time.monotonic()
        try:
            process.stdin.write(json.dumps(self.words | {"number": number}) + "\n")
            process.stdin.flush()  # it stays open: its end is ours
        except BrokenPipeError:
            log.error("worker %d ended at once", number + 1)
        if self.told is not None:  # the signal came while it was started
            process.terminate()

    def _wait_until_ready(self, number: int) -> None:
        out = self.running[number].stdout
        assert out is not None
        line = out.readline().strip()
        if line != "ready" and self.told is None:
            raise ValueError(json.loads(line) if line.startswith('"') else "a process of the server could not begin")

    def _look(self) -> None:
        """Start again what has ended, and end what is stuck."""
        now, together = time.monotonic(), Together(self.folder, -1, self.count)
        for number, values in together.pulses().items():
            stuck = now - values["at"] > STUCK_S or values["status"] == "failing"
            if stuck and self.running[number].poll() is None and now - self.since[number] > STUCK_S:
                log.error("worker %d is stuck and is started again", number + 1)
                self.running[number].kill()
        for number, process in list(self.running.items()):
            if process.poll() is None:
                if now - self.since[number] > PAUSES[-1]:
                    self.failures[number] = 0
                continue
            together.ended(number)
            pause = PAUSES[min(self.failures.get(number, 0), len(PAUSES) - 1)]
            if now - self.since[number] >= pause:
                log.error("worker %d has ended (%s) and is started again", number + 1, process.returncode)
                self.failures[number] = self.failures.get(number, 0) + 1
                _let_go(process)
                self._start(number)

    def _end(self) -> None:
        end = time.monotonic() + self.settings.stop_seconds + BEYOND_S
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _let_go(process)


def _let_go(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def plain(settings: Settings) -> dict[str, Any]:
    """Settings as plain JSON values."""
    return asdict(settings) | {"key_file": None if settings.key_file is None else os.fspath(settings.key_file)}


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
