"""What a client may do to a connection: how many it may hold, and how long what it owes may take.

Connections are counted when they are accepted, so also those that never get as far as a request. Where there is no
room, the one that has been silent for longest gives way: who only holds connections shuts nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from zeroforget.serving.settings import Settings

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
