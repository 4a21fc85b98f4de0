"""Randomness that depends on where we are, not on how we got there: each epoch draws from a seed of its own, so a
run that was interrupted and resumed draws what an uninterrupted one would."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(*key: object) -> int:
    """A 63-bit seed from any printable key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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


class Draws:
    """Torch's global generators, of the CPU and of `device`, begun from the key's seed: `with draws():`.

    Left and entered again they go on from where they were; outside they are as if nothing had been drawn. So several
    places can draw in turn, and each gets what it would get alone, also where a lane has no generator of its own.
    (Not what cuDNN keeps for recurrent layers' dropout, which begins anew when a state is put in place.)
    """

    def __init__(self, device: torch.device, *key: object) -> None:
        self._gpu = [device] if device.type == "cuda" else []
        kinds = [torch.device("cpu"), *self._gpu]
        self._states = [torch.Generator(kind).manual_seed(derive(*key)).get_state() for kind in kinds]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self._gpu):
            torch.set_rng_state(self._states[0])
            for gpu, state in zip(self._gpu, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            try:
                yield
            finally:
                self._states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in self._gpu)]
