"""What a server may take upon itself: limits on uploads, on waiting requests and on memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

MEBI = 2**20
_MANY = 2**40
_MOST = {"queue": 10**6, "batch": 10**5, "decoders": 256}
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
    """Threads that decode pictures."""
    upload_seconds: float = 30.0
    """A picture must have arrived by then."""
    poll_seconds: float = 1.0
    """How often the folder is looked at for new tasks."""
    verify_seconds: float = 3600.0
    """How often the model is verified, besides at the start and after each change."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not value > 0:
                raise ValueError(f"{one.name} must be more than zero, not {value}")
            most = _MOST_SECONDS if one.name.endswith("_seconds") else _MOST.get(one.name, _MANY)
            if value > most:
                raise ValueError(f"{one.name} must be at most {most:,}, not {value}")
