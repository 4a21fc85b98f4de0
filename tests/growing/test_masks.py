"""Ternary states, their packing, and the masks of the paper's equations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroforget.growing import masks
from zeroforget.growing.masks import State
from zeroforget.operators.places import Places, weight_births

BIRTHS = st.lists(st.integers(0, 5), max_size=40).map(lambda b: torch.tensor(b, dtype=torch.int64))


@given(st.lists(st.sampled_from([0, 1, 2]), max_size=70))
def test_packing_is_two_bits_a_feature_and_loses_nothing(states: list[int]) -> None:
    mask = torch.tensor(states, dtype=torch.uint8)
    packed = masks.pack(mask)
    assert packed.numel() * packed.element_size() == math.ceil(len(states) / 4)
    assert torch.equal(masks.unpack(packed, len(states)), mask)


def test_packing_puts_the_first_feature_in_the_lowest_bits() -> None:
    assert masks.pack(torch.tensor([2, 1, 0, 2, 1], dtype=torch.uint8)).tolist() == [0b10_00_01_10, 0b01]


@pytest.mark.parametrize("bad", [torch.tensor([3]), torch.tensor([-1]), torch.zeros(2, 2)])
def test_packing_refuses_what_is_no_mask(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="mask to pack"):
        masks.pack(bad)


@pytest.mark.parametrize("length", [2, 4])
def test_unpacking_refuses_the_wrong_length(length: int) -> None:
    with pytest.raises(ValueError, match="9 features pack into 3 bytes"):
        masks.unpack(torch.zeros(length, dtype=torch.uint8), 9)


@given(BIRTHS, st.integers(0, 5))
def test_states_are_a_comparison_with_birth(births: torch.Tensor, task: int) -> None:
    for birth, state in zip(births.tolist(), masks.states(births, task).tolist(), strict=True):
        expected = State.MASKED if birth > task else State.FORWARD_ONLY if birth < task else State.NORMAL
        assert state == expected


@given(BIRTHS)
def test_binary_masks_of_two_tasks_never_overlap(births: torch.Tensor) -> None:
    own = torch.stack([masks.learnable(births, t) for t in range(6)])
    assert (own.sum(0) == 1).all()


@given(BIRTHS, BIRTHS, st.integers(0, 5))
def test_equations_two_five_and_six(out: torch.Tensor, into: torch.Tensor, task: int) -> None:
    n = [masks.used(b, task).long() for b in (out, into)]
    before = [masks.used(b, task - 1).long() for b in (out, into)]
    five = n[0][:, None] * n[1][None, :] - before[0][:, None] * before[1][None, :]
    newborn = masks.newborn_weights(out, into, task)
    assert torch.equal(newborn, five.bool())
    m = [masks.learnable(b, task) for b in (out, into)]
    six = (m[0][:, None] | m[1][None, :]) & (n[0][:, None] * n[1][None, :]).bool()
    assert torch.equal(newborn, six)
    two = m[0][:, None] & m[1][None, :]
    assert torch.equal(masks.own_weights(out, into, task), two)
    assert not (two & ~newborn).any()


@given(BIRTHS, BIRTHS)
def test_every_weight_is_born_exactly_once(out: torch.Tensor, into: torch.Tensor) -> None:
    born = sum(masks.newborn_weights(out, into, t).long() for t in range(6))
    assert torch.equal(torch.as_tensor(born), torch.ones(len(out), len(into), dtype=torch.int64))
    assert weight_births(out, into).shape == (len(out), len(into))


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
