"""Options that cannot be meant are refused when a method is made."""

from __future__ import annotations

import math

import pytest

from tests.methods import helpers
from zeroforget import nets
from zeroforget.methods import find, names, registry

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


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *((name, "strength", -1.0) for name in HELD),
        *((name, "samples", 0) for name in ("ewc", "r-ewc", "mas", "ssl", "imm-mode", "progress-compress")),
        *((name, "labels", "odd") for name in ("ewc", "r-ewc")),
        ("ssl", "reach", -1.0),
        ("hat", "smax", 0.5),
        ("si", "damping", 0.0),
        ("lwf", "temperature", 0.0),
        ("joint", "begin", 0),
        ("packnet", "prune", 1.5),
        ("pnn", "tasks", 0),
        ("tfm", "early", 2.0),
        ("tfm", "growth", -0.1),
        ("tfm", "unit", "bytes"),
        ("tfm", "align", 0),
        ("tfm", "fn", "some"),
    ],
)
def test_what_cannot_be_meant_is_found_without_a_network(
    name: str, option: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nets, "build", None)
    with pytest.raises(ValueError, match=rf"\b{option}\b"):
        registry.check(name, **{option: value})


def test_what_only_a_network_can_tell_is_left_to_it() -> None:
    registry.check("pnn", tasks=500)
    for name in names():
        registry.check(name)


def test_none_at_all_is_a_strength() -> None:
    assert {helpers.make(name, helpers.plain_net, strength=0.0).strength for name in HELD} == {0.0}
