"""Hashes that files and data are known by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from zeroforget.files.paths import open_regular

_BLOCK = 2**22


def sha256(content: bytes) -> str:
    """Of bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


def hash_of_file(path: Path, algorithm: str = "sha256", told: Callable[[int], None] = lambda done: None) -> str:
    """Of a file, in hex, read block by block; `told` how many bytes are done."""
    digest, done = hashlib.new(algorithm, usedforsecurity=False), 0
    with open_regular(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            told(done)
    return digest.hexdigest()
