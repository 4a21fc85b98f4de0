"""What a server may take upon itself: limits on uploads, on waiting requests and on memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

MEBI = 2**20
_MANY = 2**40
_MOST = {"queue": 10**6, "batch": 10**5, "decoders": 256, "connections": 10**6, "connections_each": 10**6}
_MOST_SECONDS = 10**7
"""Some months; a thread cannot be told to wait for centuries."""


@dataclass(frozen=True)
class Settings:
    """The limits of a server; each is an option of `zeroforget serve`."""

    upload: int = 20 * MEBI
    """Bytes of one picture at most."""
    pixels: int = 40_000_000
    """Pixels of one picture at most; known from its header, before it is decoded."""
    queue: int = 256
    """Requests that may be waiting at once; the next is told to come again."""
    uploads: int = 256 * MEBI
    """Bytes of all pictures that are waiting together."""
    batch: int = 64
    """Pictures classified together at most."""
    memory: int = 1024 * MEBI
    """Bytes of tasks' own networks that are kept ready; one at least is."""
    decoders: int = 2
    """Processes that decode pictures."""
    decode_seconds: float = 10.0
    """A picture must be decoded by then; the process that has not done so is killed."""
    answer_seconds: float = 60.0
    """A batch that is computed for longer means that something is wrong."""
    connections: int = 1024
    """Connections at once; the next is turned away."""
    connections_each: int = 128
    """Connections of one address at once."""
    header_seconds: float = 10.0
    """The headers of a request must have arrived by then."""
    stop_seconds: float = 30.0
    """What was asked is answered by then, once the server is told to stop."""
    upload_seconds: float = 30.0
    """A picture must have arrived by then."""
    poll_seconds: float = 1.0
    """How often the folder is looked at for new tasks."""
    verify_seconds: float = 3600.0
    """How often the model is verified, besides at the start and after each change."""

    hosts: tuple[str, ...] = ()
    """Names that the server goes by, beside its addresses, localhost and the machine's own; '*' is any."""
    key_file: Path | None = None
    """Keys of those who may ask; without a file, whoever reaches the server may."""
    own_port: int | None = None
    """Where /health and /metrics are answered, and nothing else; by default where all the rest is."""

    shadow: bool = False
    """Compare the newest state with the one that is served, on the pictures that come."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in {"hosts", "key_file", "own_port", "shadow"}:
                continue
            if not value > 0:
                raise ValueError(f"{one.name} must be more than zero, not {value}")
            most = _MOST_SECONDS if one.name.endswith("_seconds") else _MOST.get(one.name, _MANY)
            if value > most:
                raise ValueError(f"{one.name} must be at most {most:,}, not {value}")
