"""Randomness that depends on where we are, not on how we got there: each epoch draws from a seed of its own, so a
run that was interrupted and resumed draws what an uninterrupted one would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroforget.files.hashes import short


def derive(*key: object) -> int:
    """A 63-bit seed from any printable key."""
    return int.from_bytes(short(repr(key).encode()), "little") >> 1


def generator(*key: object) -> torch.Generator:
    """A CPU generator seeded by the key."""
    return torch.Generator().manual_seed(derive(*key))


@contextmanager
def seeded(*key: object) -> Iterator[None]:
    """Inside, torch's global generators start from the key's seed; outside, they are as they were."""
    if not torch.cuda.is_available():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive(*key))  # torch.manual_seed would look for all kinds of devices
            yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(derive(*key))
        yield
