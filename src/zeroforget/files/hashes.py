"""Hashes that files and data are known by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from zeroforget.files.paths import open_regular

_BLOCK = 2**22


class Digest:
    """The SHA-256 of bytes that come in parts."""

    def __init__(self, first: bytes = b"") -> None:
        self._sum = hashlib.sha256(first)

    def update(self, part: bytes | memoryview) -> None:
        """The next bytes."""
        self._sum.update(part)

    def digest(self) -> bytes:
        """Of all so far."""
        return self._sum.digest()

    def hexdigest(self) -> str:
        """Of all so far, in hex."""
        return self._sum.hexdigest()


def sha256(content: bytes) -> str:
    """Of bytes, in hex."""
    return Digest(content).hexdigest()


def short(content: bytes) -> bytes:
    """Eight bytes that tell bytes apart where nobody means harm (BLAKE2b)."""
    return hashlib.blake2b(content, digest_size=8).digest()


def hash_of_file(path: Path, algorithm: str = "sha256", told: Callable[[int], None] = lambda done: None) -> str:
    """Of a file, in hex, read block by block; `told` how many bytes are done."""
    digest, done = hashlib.new(algorithm, usedforsecurity=False), 0
    with open_regular(path) as file:
        for block in blocks(file):
            digest.update(block)
            done += len(block)
            told(done)
    return digest.hexdigest()


def blocks(file: IO[bytes]) -> Iterator[bytes]:
    """What is left to read of a file, a few megabytes at a time."""
    while block := file.read(_BLOCK):
        yield block
