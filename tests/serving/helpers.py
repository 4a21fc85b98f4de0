"""A server on loopback in a thread, and a client of plain HTTP."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlencode

import uvicorn

from zeroforget.serving import Server, Settings
from zeroforget.serving.gate import Door
from zeroforget.serving.run import bound, configured


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Client:
    """One connection that stays open."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> Reply:
        self.connection.request("GET" if body is None else "POST", path, body, headers)
        reply = self.connection.getresponse()
        return Reply(reply.status, reply.headers, reply.read().decode())

    def predict(self, picture: bytes | Path, **query: Any) -> Reply:
        body = picture.read_bytes() if isinstance(picture, Path) else picture
        return self.ask(f"/predict?{urlencode(query)}", body)

    def close(self) -> None:
        self.connection.close()


class Running:
    """`with Running(folder) as running:` serves a model; `running.client()` talks to it."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.sockets: list[socket.socket] = [bound("127.0.0.1", 0)]
        self.port: int = self.sockets[0].getsockname()[1]
        if "own_port" in settings:
            self.sockets.append(bound("127.0.0.1", 0))
            settings["own_port"] = self.own_port = self.sockets[1].getsockname()[1]
        self.server = Server(path, Settings(**({"poll_seconds": 0.1, "connections_each": 1000} | settings)))
        self.clients: list[Client] = []
        # A client that is kept busy with something else finds its connection as it left it.
        config = configured(self.server)
        config.log_level, config.timeout_graceful_shutdown, config.timeout_keep_alive = "error", 5, 600
        self.uvicorn = uvicorn.Server(config)
        self.sockets = [Door(sock, self.server.guests) for sock in self.sockets]
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": self.sockets})

    def __enter__(self) -> Running:
        self.thread.start()
        until(lambda: self.uvicorn.started)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self.clients:
            client.close()
        self.uvicorn.should_exit = True
        self.thread.join(30)
        for sock in self.sockets:
            sock.close()
        assert not self.thread.is_alive()

    def client(self) -> Client:
        """A new connection; it is closed with the server."""
        self.clients.append(Client(self.port))
        return self.clients[-1]


def until(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def memory() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
