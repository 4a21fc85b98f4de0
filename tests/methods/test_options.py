"""Options that cannot be meant are refused when a method is made."""

from __future__ import annotations

import math

import pytest

from tests.methods import helpers
from zeroforget.methods import find, names

HELD = [name for name in names() if find(name)[0].tradeoff == "strength"]


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_strength_is_a_finite_number_of_0_or_more(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="strength must be 0 or more, and finite, not"):
        helpers.make(name, helpers.plain_net, strength=value)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("ssl", "sparsity", -1e-6),
        ("ssl", "reach", math.nan),
        ("hat", "clip", 0.0),
        ("hat", "clip", math.nan),
        ("hat", "smax", math.inf),
        ("hat", "start", math.nan),
        ("lwf", "temperature", math.nan),
        ("si", "damping", math.nan),
        ("joint", "begin", 0),
        ("piggyback", "init", math.nan),
        ("piggyback", "threshold", math.inf),
        ("piggyback", "lr", math.inf),
    ],
)
def test_other_options_too(name: str, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"\b{option}\b.*{value}"):
        helpers.make(name, helpers.plain_net, **{option: value})


def test_none_at_all_is_a_strength() -> None:
    assert {helpers.make(name, helpers.plain_net, strength=0.0).strength for name in HELD} == {0.0}
