"""Randomness by name: the same name draws the same, another one something else, and nobody outside notices."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations

import pytest
import torch

from zeroforget.training.seeding import derive, generator, seeded


def test_keys_that_only_look_alike_are_told_apart() -> None:
    keys = [("a", 1, 2), ("a", 2, 1), ("a", 12), ("a1", 2), ("a", "1", 2), ("a",), ("a", 1), (1, "a"), ("A",)]
    assert all(derive(*one) != derive(*other) for one, other in combinations(keys, 2))
    assert all(0 <= derive(k) < 2**63 for k in range(200))


def test_seeds_stay_what_they_are() -> None:
    """Else no run could go on that an earlier version began."""
    assert derive("noise", 0, 1, 2, 3) == 2203825782878916756


def test_inside_the_key_decides_and_outside_all_is_as_it_was() -> None:
    before = torch.get_rng_state()
    drawn = []
    for key in ("a", "a", "b"):
        with suppress(KeyError), seeded(key):
            drawn.append(torch.rand(3))
            raise KeyError
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.rand(3, generator=generator("a")), drawn[0])


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
