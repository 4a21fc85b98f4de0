"""Births of weights, ternary states and their packing, and the masks of the paper's equations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroforget.growing.births import (
    State,
    learnable,
    newborn_weights,
    own_weights,
    pack,
    states,
    unpack,
    used,
    weight_births,
)

BIRTHS = st.lists(st.integers(0, 5), max_size=40).map(lambda b: torch.tensor(b, dtype=torch.int64))


@given(st.lists(st.sampled_from([0, 1, 2]), max_size=70))
def test_packing_is_two_bits_a_feature_and_loses_nothing(chosen: list[int]) -> None:
    mask = torch.tensor(chosen, dtype=torch.uint8)
    packed = pack(mask)
    assert packed.numel() * packed.element_size() == math.ceil(len(chosen) / 4)
    assert torch.equal(unpack(packed, len(chosen)), mask)


def test_packing_puts_the_first_feature_in_the_lowest_bits() -> None:
    assert pack(torch.tensor([2, 1, 0, 2, 1], dtype=torch.uint8)).tolist() == [0b10_00_01_10, 0b01]


@pytest.mark.parametrize("bad", [torch.tensor([3]), torch.tensor([-1]), torch.zeros(2, 2)])
def test_packing_refuses_what_is_no_mask(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="mask to pack"):
        pack(bad)


@pytest.mark.parametrize("length", [2, 4])
def test_unpacking_refuses_the_wrong_length(length: int) -> None:
    with pytest.raises(ValueError, match="9 features pack into 3 bytes"):
        unpack(torch.zeros(length, dtype=torch.uint8), 9)


@given(BIRTHS, st.integers(0, 5))
def test_states_are_a_comparison_with_birth(births: torch.Tensor, task: int) -> None:
    for birth, state in zip(births.tolist(), states(births, task).tolist(), strict=True):
        expected = State.MASKED if birth > task else State.FORWARD_ONLY if birth < task else State.NORMAL
        assert state == expected


@given(BIRTHS)
def test_binary_masks_of_two_tasks_never_overlap(births: torch.Tensor) -> None:
    own = torch.stack([learnable(births, t) for t in range(6)])
    assert (own.sum(0) == 1).all()


@given(BIRTHS, BIRTHS, st.integers(0, 5))
def test_equations_two_five_and_six(out: torch.Tensor, into: torch.Tensor, task: int) -> None:
    n = [used(b, task).long() for b in (out, into)]
    before = [used(b, task - 1).long() for b in (out, into)]
    five = n[0][:, None] * n[1][None, :] - before[0][:, None] * before[1][None, :]
    newborn = newborn_weights(out, into, task)
    assert torch.equal(newborn, five.bool())
    m = [learnable(b, task) for b in (out, into)]
    six = (m[0][:, None] | m[1][None, :]) & (n[0][:, None] * n[1][None, :]).bool()
    assert torch.equal(newborn, six)
    two = m[0][:, None] & m[1][None, :]
    assert torch.equal(own_weights(out, into, task), two)
    assert not (two & ~newborn).any()


@given(BIRTHS, BIRTHS)
def test_every_weight_is_born_exactly_once(out: torch.Tensor, into: torch.Tensor) -> None:
    born = sum(newborn_weights(out, into, t).long() for t in range(6))
    assert torch.equal(torch.as_tensor(born), torch.ones(len(out), len(into), dtype=torch.int64))
    assert weight_births(out, into).shape == (len(out), len(into))
