"""Positions along a dimension."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroforget.operators.places import Places


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_places_take_and_put_are_inverse(chosen: list[bool]) -> None:
    where = torch.tensor(chosen)
    places = Places.where(where)
    x = torch.arange(len(chosen) * 3.0).view(3, -1)
    taken = places.take(x, 1)
    assert torch.equal(taken, x[:, where])
    y = torch.zeros_like(x)
    places.put(y, 1, taken)
    assert torch.equal(y, x * where)


def test_places_are_brought_to_a_device_once() -> None:
    places, there = Places.where(torch.tensor([True, False, True])), torch.device("meta")
    assert places.on(torch.device("cpu")) is places.index
    assert places.on(there) is places.on(there)
    assert places.on(there).device == there
    assert places.take(torch.zeros(2, 3, device=there), 1).shape == (2, 2)
