"""Who may ask, and what a client may do: names, keys and pages; how many connections, and how long each may take.

Connections are counted when they are accepted, so also those that never get as far as a request. Where there is no
room, the one that has been silent for longest gives way: who only holds connections shuts nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from zeroforget.files.atomic import write_new
from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import FieldError, read_bytes
from zeroforget.serving.settings import Settings
from zeroforget.serving.together import Together

log = logging.getLogger("zeroforget.serving")
OPEN = {"/", "/health"}
"""What may be asked without a key: a page without content, and whether the server lives."""
OWN_PORT = {"/health", "/metrics"}
_LINE = re.compile(r"([\w.-]{1,64})\s+([0-9a-f]{64})(?:\s+(\d{1,6}(?:\.\d{1,3})?))?")
_MOST_BYTES = 2**20
_LOOK_SECONDS = 1.0


class Gate:
    """Middleware that refuses whoever may not ask, before anything of the request is read."""

    def __init__(self, app: ASGIApp, settings: Settings, keys: Keys | None = None) -> None:
        self.app, self.settings, self.keys = app, settings, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may be asked."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers.setdefault("Referrer-Policy", "no-referrer")
                headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
            await send(message)

        refusal = self._refusal(scope)
        await (self.app if refusal is None else refusal)(scope, receive, safe)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers, path = Headers(scope=scope), scope["path"]
        host = headers.get("host", "")
        if not self._known(host):
            return _no(421, f"this server does not go by the name {host[:80]!r}; start it with --allow-host to add it")
        if scope["method"] == "POST" and _from_elsewhere(headers, host):
            return _no(403, "a page of another site may not post here")
        own, port = self.settings.own_port, (scope.get("server") or ("", None))[1]
        if own is not None and (path in OWN_PORT) is not (port == own):
            return _no(404, "Not Found")
        if self.keys is not None and path not in OPEN and port != own:
            return self.keys.refusal(headers.get("authorization", ""))
        return None

    def _known(self, host: str) -> bool:
        """An address is known: that a name leads here, which is somebody else's, is what is to be kept out."""
        if "*" in self.settings.hosts:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower().rstrip(".")
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {"localhost", socket.gethostname().lower(), *map(str.lower, self.settings.hosts)}
        return True


def _from_elsewhere(headers: Headers, host: str) -> bool:
    """Whether a page of another site posts: browsers say so."""
    if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
        return True
    origin = headers.get("origin")
    try:
        return origin is not None and (urlsplit(origin).netloc.lower() if "//" in origin else origin) != host.lower()
    except ValueError:  # of an address with half a bracket, say
        return True


def _no(status: int, why: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": why}, status, {"Connection": "close"} | dict(headers or {}))


@dataclass
class _Holder:
    """Who holds a key, and what is left of his rate."""

    name: str
    rate: float | None
    left: float = 1.0
    at: float = field(default_factory=time.monotonic)

    def allowed(self) -> float:
        """Seconds to wait before the next request; 0 if it may come now, and then it counts."""
        if self.rate is None:
            return 0.0
        now = time.monotonic()
        self.left = min(max(1.0, self.rate), self.left + (now - self.at) * self.rate)
        self.at = now
        if self.left < 1.0:
            return (1.0 - self.left) / self.rate
        self.left -= 1.0
        return 0.0

    def allowed_in(self, together: Together, key: str) -> float:
        """The same, where several processes count together."""
        if self.rate is None:
            return 0.0
        with together.allowance(key) as held:
            self.left, self.at = held
            wait = self.allowed()
            held[:] = self.left, self.at
        return wait


class Keys:
    """The keys of a file: on each line a name, the sha256 of a key, and perhaps requests a second. It is looked at
    again every second, so that a key is given or taken back without a restart."""

    def __init__(self, path: Path, together: Together | None = None) -> None:
        self.path, self.together = path, together
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._looked = -_LOOK_SECONDS
        self._holders: dict[str, _Holder] = {}
        self._look()
        if not self._holders:
            raise ValueError(f"{path} holds no key; 'zeroforget key access {path} NAME' makes one")

    def refusal(self, given: str) -> JSONResponse | None:
        """Why whoever gives this may not ask; None if he may."""
        scheme, _, key = given.partition(" ")
        with self._lock:
            if time.monotonic() - self._looked >= _LOOK_SECONDS:
                self._look_again()
            own = _hash(key.strip())
            holder = self._holders.get(own) if scheme.lower() == "bearer" else None
            wait = 0.0 if holder is None else self._wait(holder, own)
        if holder is None:
            return _no(401, "a key is needed: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
        if wait:
            return _no(429, f"more than {holder.rate:g} requests a second", {"Retry-After": str(int(wait) + 1)})
        return None

    def _wait(self, holder: _Holder, own: str) -> float:
        return holder.allowed() if self.together is None else holder.allowed_in(self.together, own)

    def _look_again(self) -> None:
        try:
            self._look()
        except (ValueError, OSError) as error:  # the keys that were known stay so
            log.error("the keys before still count: %s", error)

    def _look(self) -> None:
        self._looked = time.monotonic()
        stat = self.path.stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return
        self._seen, before = seen, self._holders
        fresh = _read(self.path)
        for own, holder in fresh.items():
            if own in before:
                holder.left, holder.at = before[own].left, before[own].at
        self._holders = fresh


def _read(path: Path) -> dict[str, _Holder]:
    try:
        lines = read_bytes(path, _MOST_BYTES).decode().splitlines()
    except (FieldError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no keys ({error})") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            match = _LINE.fullmatch(line.strip())
            if match is None or (match[3] is not None and not float(match[3]) > 0):
                raise ValueError(f"{path}, line {number}: it should be a name, a key's sha256, perhaps a rate above 0")
            found[match[2]] = _Holder(match[1], None if match[3] is None else float(match[3]))
    return found


def _hash(key: str) -> str:
    return sha256(key.encode())


def new_key(path: Path, name: str, rate: float | None = None) -> str:
    """Add a key to a file and tell it: only its hash is kept."""
    key = secrets.token_urlsafe(32)
    line = f"{name} {_hash(key)}" + (f" {rate:g}" if rate is not None else "")
    if not _LINE.fullmatch(line):
        raise ValueError(f"a key is named by letters, digits, '.', '_' and '-', and its rate is above 0; got '{name}'")
    if path.exists():
        held = _read(path)
        if name in {holder.name for holder in held.values()}:
            raise ValueError(f"{path} holds a key of '{name}' already; take its line out first")
        whole = read_bytes(path, _MOST_BYTES).endswith(b"\n")  # a file that people edit may end without one
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n" if whole else f"\n{line}\n")
    else:
        write_new(path, f"{line}\n".encode())
    return key


_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
SILENT_S = 0.1
"""Who has sent nothing for so long, and owes something, may have to give way."""
OWN_FILES = 128
"""Files that a process needs beside its connections."""


class Guest(socket.socket):
    """A connection, from its acceptance to its end."""

    def __init__(self, sock: socket.socket, guests: Guests) -> None:
        self.guests = guests
        self.who, self.port = sock.getpeername()[0], sock.getsockname()[1]
        self.key = (*sock.getpeername()[:2], self.port)
        self.heard = time.monotonic()
        """When it last sent something."""
        self.owed: Callable[[], tuple[str, float] | None] = lambda: ("a handshake", guests.settings.header_seconds)
        """What it is to do next, and within how many seconds; None while the answer is ours to give."""
        self.busy: Callable[[], bool] = lambda: False
        """Whether its answer is being computed."""
        self.late: Callable[[str], None] = lambda what: self.shutdown(socket.SHUT_RDWR)
        self.end: Callable[[], None] = lambda: self.shutdown(socket.SHUT_RDWR)
        self.since: tuple[str, float] = ("", 0.0)
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())

    def close(self) -> None:
        """Its place is free again."""
        self.guests.leave(self)
        super().close()


class Guests:
    """All connections of a server."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.most = min(settings.connections, _places())
        self.here: dict[tuple[str, int, int], Guest] = {}
        self._all: Counter[int] = Counter()
        self._each: Counter[tuple[int, str]] = Counter()
        self._watched = False

    def enter(self, guest: Guest) -> bool:
        """Whether there is room for another one, at its port and of its address; if need be, some other gives way."""
        place = (guest.port, guest.who)
        if self._each[place] >= self.settings.connections_each and not self._give_way(*place):
            return False
        if self._all[guest.port] >= self.most and not self._give_way(guest.port, None):
            return False
        self.here[guest.key] = guest
        self._all[guest.port] += 1
        self._each[place] += 1
        if not self._watched:
            self._watched = True
            self._watch_again()
        return True

    def leave(self, guest: Guest) -> None:
        """It is gone, or about to."""
        if self.here.get(guest.key) is guest:
            del self.here[guest.key]
            self._all[guest.port] -= 1
            place = (guest.port, guest.who)
            self._each[place] -= 1
            if not self._each[place]:
                del self._each[place]

    def _give_way(self, port: int, who: str | None) -> bool:
        """End the connection of this address (of none: of the one that has most) that has been silent for longest."""
        if who is None:
            who = max((count, whose) for (at, whose), count in self._each.items() if at == port)[1]
        there = [one for one in self.here.values() if (one.port, one.who) == (port, who) and not one.busy()]
        silent = min(there, key=lambda one: one.heard, default=None)
        if silent is None or time.monotonic() - silent.heard < SILENT_S:
            return False
        self.leave(silent)
        with contextlib.suppress(OSError):
            silent.end()
        return True

    def _watch_again(self) -> None:
        period = min(1.0, self.settings.header_seconds / 4)
        asyncio.get_running_loop().call_later(period, self._watch)

    def _watch(self) -> None:
        """Look at what each one owes, and since when."""
        now = time.monotonic()
        for guest in list(self.here.values()):
            what, seconds = guest.owed() or ("", 0.0)
            if what != guest.since[0]:
                guest.since = what, now
            elif what and now - guest.since[1] >= seconds:
                guest.since = "", now
                with contextlib.suppress(OSError):
                    guest.late(what)
        self._watched = bool(self.here)
        if self._watched:
            self._watch_again()


class Door(socket.socket):
    """A port that people come to. It lets one in at a time: those who come together are spread over all processes."""

    def __init__(self, sock: socket.socket, guests: Guests, *, tls: bool = False) -> None:
        self.guests, self.tls = guests, tls
        self._took = False
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())

    def accept(self) -> tuple[socket.socket, Any]:
        """A connection; after each one, none for a moment."""
        self._took = not self._took
        if not self._took:
            raise BlockingIOError
        sock, address = super().accept()
        try:
            guest = Guest(sock, self.guests)
        except OSError:  # it is gone already
            sock.close()
            raise BlockingIOError from None
        if not self.guests.enter(guest):
            guest.setblocking(False)
            with guest, contextlib.suppress(OSError):
                guest.send(b"" if self.tls else _FULL)
            raise BlockingIOError
        return guest, address


def guarded(guests: Guests) -> type[H11Protocol]:
    """The protocol of a server whose connections these are."""
    settings = guests.settings

    class Guarded(H11Protocol):
        """HTTP as uvicorn speaks it, with a deadline for whatever a client owes."""

        _guest: Guest | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if self.client is not None and self.server is not None:
                self._guest = guests.here.get((*self.client, self.server[1] or 0))
            if self._guest is not None:
                self._guest.owed, self._guest.busy = self._owed, self._busy
                self._guest.late, self._guest.end = self._late, transport.abort

        def data_received(self, data: bytes) -> None:
            if self._guest is not None:
                self._guest.heard = time.monotonic()
            super().data_received(data)

        def _owed(self) -> tuple[str, float] | None:
            if self.transport.is_closing():
                return "to take the last answer", settings.header_seconds
            if self.flow.write_paused:
                return "to take an answer", settings.upload_seconds
            state = self.conn.their_state
            if state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
                return f"headers after {id(self.cycle)}", settings.header_seconds
            if state is h11.SEND_BODY and self.cycle.response_complete:
                return "a body that nobody waits for", settings.upload_seconds
            return None

        def _busy(self) -> bool:
            waits = self.conn.their_state in {h11.IDLE, h11.SEND_BODY} or self.cycle is None
            return not (waits or self.cycle.response_complete or self.flow.write_paused)

        def _late(self, what: str) -> None:
            if what.startswith("headers"):
                self.transport.write(_LATE)
                self.transport.close()
            else:
                self.transport.abort()

    return Guarded


def ask_for_files(connections: int) -> None:
    """Let this process have as many files open as its connections may take, as far as the system does."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # there are no such limits on Windows
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * connections + OWN_FILES
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if resource.RLIM_INFINITY != soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _places() -> float:
    """How many connections may be open at each of two ports."""
    with contextlib.suppress(ImportError, OSError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return math.inf if soft == resource.RLIM_INFINITY else max(8, (soft - OWN_FILES) // 2)
    return math.inf
