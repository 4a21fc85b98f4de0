"""What a client may do to a connection: how many it may hold, and how long its headers may take."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from zeroforget.serving.settings import Settings

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def guarded(settings: Settings) -> type[H11Protocol]:
    """The protocol of a server with these limits; its connections are counted together."""
    held: Counter[str] = Counter()

    class Guarded(H11Protocol):
        """HTTP as uvicorn speaks it, with a deadline for headers and caps on connections."""

        _deadline: asyncio.TimerHandle | None = None
        _counted = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            who = self.client[0] if self.client else ""
            if held.total() >= settings.connections or held[who] >= settings.connections_each:
                transport.write(_FULL)
                transport.close()
                return
            held[who] += 1
            self._counted = True
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            if self._counted:
                who = self.client[0] if self.client else ""
                held[who] -= 1
                if not held[who]:
                    del held[who]
                self._counted = False
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._watch()  # of another request, a part of the headers
            else:
                self._unwatch()

        def _watch(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(settings.header_seconds, self._late)

        def _unwatch(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _late(self) -> None:
            if not self.transport.is_closing():
                self.transport.write(_LATE)
                self.transport.close()

    return Guarded
