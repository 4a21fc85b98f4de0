"""Who may ask, and from where: names the server goes by, pages that may post to it, keys, and headers of answers."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
