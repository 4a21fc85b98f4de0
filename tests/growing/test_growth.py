"""Shares of a network turned into features, and the rule of the growth search."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.growing.helpers import growing, unaligned
from tests.proving.patterns import PATTERNS
from zeroforget.growing.growth import GrowthLimits, evenly, smallest_within
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import grow


def two_layers(widths: Mapping[str, float]) -> float:
    """The weights of 3 → a → b."""
    return 3 * widths["a"] + widths["a"] * widths["b"]


@given(st.integers(8, 400), st.sampled_from([1, 8]))
def test_the_schedule_of_the_paper_ends_at_the_full_width(full: int, align: int) -> None:
    limits = GrowthLimits({"a": full, "b": 2 * full}, two_layers, limit=1.0, align=align)
    shares = limits.grow({"a": 0.0, "b": 0.0}, 0.55)
    widths = [{a: limits.width(a, s) for a, s in shares.items()}]
    for _ in range(9):
        shares = limits.grow(shares, 0.05)
        widths.append({a: limits.width(a, s) for a, s in shares.items()})
    assert widths[-1] == {"a": full, "b": 2 * full}
    assert all(before["a"] <= after["a"] for before, after in itertools.pairwise(widths))
    assert limits.left(shares) == pytest.approx(0, abs=1e-9)


@given(st.floats(0.05, 0.9), st.floats(0.0, 1.0), st.integers(1, 12))
def test_axes_that_start_apart_are_full_together(last: float, more: float, tasks: int) -> None:
    shares = {"a": last + more * (1 - last), "b": last}
    limits = GrowthLimits({"a": 400, "b": 900}, two_layers, limit=1.0)
    step = limits.left(shares) / tasks
    for left in reversed(range(tasks)):
        grown = evenly(shares, min(step, limits.left(shares)))
        shares, _ = limits.plan_axes(shares, dict.fromkeys(shares, 1), grown)
        assert grown["b"] == pytest.approx(step)
        assert 1 - shares["a"] == pytest.approx((1 - more) * (1 - shares["b"]), abs=1e-9)
        assert (limits.left(shares) < 1e-9) == (left == 0)
    assert evenly(shares, 0.5) == pytest.approx({"a": 0.0, "b": 0.0}, abs=1e-9)


def test_axes_grow_by_features_or_by_shares() -> None:
    limits = GrowthLimits({"a": 100, "b": 64}, two_layers, limit=1.0, align=8)
    shares, widths = limits.plan_axes({"a": 0.5, "b": 0.5}, {"a": 56, "b": 32}, {"a": 0.03, "b": 3})
    assert (shares, widths) == ({"a": 0.53, "b": 0.5 + 3 / 64}, {"a": 56, "b": 35})  # a has room for it already
    shares, widths = limits.plan_axes(shares, widths, {"a": 0.47, "b": 0.0})
    assert (widths["a"], widths["b"]) == (100, 35)


@given(st.integers(16, 500), st.integers(16, 500), st.floats(0.1, 1.0))
def test_shares_of_weights_are_shares_of_weights(a: int, b: int, start: float) -> None:
    limits = GrowthLimits({"a": a, "b": b}, two_layers, limit=1.0, unit="weights")
    shares = limits.grow({"a": 0.0, "b": 0.0}, start)
    weights = two_layers({axis: limits.full[axis] * share for axis, share in shares.items()})
    assert weights == pytest.approx(start * two_layers({"a": a, "b": b}), rel=1e-6)
    assert limits.left(shares) == pytest.approx(1 - start, abs=1e-6)


def test_a_full_width_that_is_not_aligned_stays_and_what_grows_from_it_is_aligned() -> None:
    limits = GrowthLimits({"a": 10, "b": 64}, two_layers, align=8)
    assert [limits.width("a", share) for share in (0.1, 0.55, 0.9, 1.0, 1.0 + 2e-16, 1.05, 1.7)] == [
        8,
        8,
        10,
        10,
        10,
        16,
        24,
    ]
    assert [limits.width("b", share) for share in (0.5, 0.99, 1.0, 1.01)] == [32, 64, 64, 72]


def test_widths_are_aligned_but_never_beyond_the_limit() -> None:
    limits = GrowthLimits({"a": 100, "b": 64}, two_layers, limit=1.0, align=8)
    assert limits.width("a", 0.5) == 56
    assert limits.width("a", 1.0) == 100
    assert limits.width("b", 0.001) == 8


def test_features_that_stand_for_several_channels_are_aligned_by_these() -> None:
    limits = GrowthLimits({"a": 4, "b": 12, "c": 5}, two_layers, align=8, spans={"a": 16, "b": 6})
    assert [limits.width("a", share) for share in (0.25, 1.0, 1.25, 1.5)] == [1, 4, 5, 6]  # 16 channels each
    assert [limits.width("b", share) for share in (0.1, 0.5, 1.1, 1.4)] == [4, 8, 16, 20]  # 4 of 6 channels are 24
    assert limits.width("c", 1.2) == 8
    assert limits.plan({"a": 1.0, "b": 1.0}, {"a": 4, "b": 12}, 0.25)[1] == {"a": 5, "b": 16}
    assert limits.plan_axes({"a": 1.0, "b": 1.0}, {"a": 4, "b": 12}, {"a": 0.25})[1] == {"a": 5, "b": 12}


def test_limits_that_were_pickled_before_they_knew_of_channels_go_on_counting_features() -> None:
    old = GrowthLimits({"a": 4}, two_layers, align=8, spans={"a": 16})
    del vars(old)["spans"]
    assert pickle.loads(pickle.dumps(old)).width("a", 1.25) == 8


def test_widths_at_the_edges_of_the_limits() -> None:
    assert GrowthLimits({"a": 4}, two_layers, limit=0.1).width("a", 0.1) == 1
    assert GrowthLimits({"a": 50}, two_layers).width("a", 0.05) == 3  # halves are rounded up
    assert GrowthLimits({"a": 16}, two_layers, limit=1.25, align=8).width("a", 1.25) == 20
    assert GrowthLimits({}, two_layers, limit=1.0).plan({}, {}, 1.0) == ({}, {})


def test_an_axis_never_gets_narrower() -> None:
    limits = GrowthLimits({"a": 100}, two_layers, align=8)
    shares, widths = {"a": 0.06}, {"a": 9}  # one feature beyond what is aligned
    assert limits.plan(shares, widths, 0.01)[1] == {"a": 9}
    assert limits.plan_axes(shares, widths, {"a": 0.01})[1] == {"a": 9}
    assert evenly({"a": 1.2, "b": 0.5}, 0.25) == {"a": 0.0, "b": 0.25}


def test_a_first_task_must_give_every_axis_a_feature() -> None:
    with pytest.raises(ValueError, match="every axis at least one feature; b has none"):
        GrowthLimits({"a": 4, "b": 4}, two_layers).plan_axes({"a": 0.0, "b": 0.0}, {"a": 0, "b": 0}, {"a": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [(dict(unit="bits"), "unit is"), (dict(align=0), "align is"), (dict(limit=-1.0), "limit is")],
)
def test_bad_limits_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrowthLimits({"a": 1}, two_layers, **options)  # type: ignore[arg-type]


def test_the_smallest_growth_within_the_margin_wins() -> None:
    growths, accuracies = [0.02, 0.05, 0.1, 0.2], [0.50, 0.585, 0.60, 0.59]
    assert smallest_within(growths, accuracies, 0.015) == 1
    assert smallest_within(growths, accuracies, 0.0) == 2
    assert smallest_within(growths, accuracies, 0.2) == 0
    assert smallest_within([0.2, 0.1], [0.6, 0.6], 0.0) == 1
    assert smallest_within([0.1, 0.2], [0.7, 0.8], 0.1) == 0  # 0.8 - 0.1 is a little more than 0.7 in binary


@pytest.mark.parametrize("unit", ["features", "weights"])
def test_a_network_grows_by_the_schedule_to_what_was_given(unit: str) -> None:
    net, _ = growing("vgg16-tiny", start=0.55, unit=unit)
    net.add_task("0", 2)
    first = sum(p.numel() for p in net.body.parameters())
    full = net.limits.count({axis: float(size) for axis, size in net.axes.sizes.items()})
    if unit == "weights":
        assert first / full == pytest.approx(0.55, abs=0.06)
    for task in range(1, 10):
        net.add_task(str(task), 2, growth=0.05)
    assert net.widths() == dict(net.axes.sizes)
    assert net.left() == pytest.approx(0, abs=1e-6)
    net.add_task("no room", 2, growth=0.0)
    assert net.widths() == dict(net.axes.sizes)


def test_aligned_networks_have_aligned_widths() -> None:
    net, _ = growing("lenet", start=0.5, align=4)
    net.add_task("0", 2)
    net.add_task("1", 2, growth=0.1)
    for axis, width in net.widths().items():
        assert width % 4 == 0 or width == net.axes.sizes[axis]


@pytest.mark.parametrize(
    ("pattern", "align", "axis", "widths"),
    [
        ("VisionTransformer", 4, "blocks.0.attn.qkv", (3, 4)),  # heads of 4 channels
        ("VisionTransformer", 8, "blocks.0.attn.qkv", (3, 4)),
        ("VisionTransformer", 8, "patch", (12, 16)),
        ("Encoder", 4, "embed", (2, 3)),  # torch's own heads, tied to the stream
        ("Swin", 4, "patch", (2, 3)),  # heads of 4 channels; the table with a number for each head is only looked up
        ("ResNeXt", 2, "down", (4, 5)),  # groups of 2 channels
        ("ResNeXt", 8, "down", (4, 8)),
    ],
)
def test_aligned_heads_and_groups_make_aligned_layers(
    pattern: str, align: int, axis: str, widths: tuple[int, int]
) -> None:
    cls, x, _, _ = PATTERNS[pattern]
    net = grow(cls(), x, align=align)
    net.add_task("0", 2)
    net.add_task("1", 2, growth=0.26)
    assert (net.widths("0")[axis], net.widths("1")[axis]) == widths
    assert unaligned(net, "1", align) == []


def narrow(**options: object) -> GrowingNetwork:
    net = grow(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 3), **options)  # type: ignore[arg-type]
    net.add_task("0", 2)
    return net


@pytest.mark.parametrize("growth", [0.1, {"0": 0.1}, {"0": 0.1, "2": 0}])
def test_a_growth_that_adds_no_feature_is_told_once_with_what_to_do(growth: float | dict[str, float]) -> None:
    net = narrow()
    with pytest.warns(UserWarning, match=r"adds no feature.*a larger growth, or growth=0") as told:
        net.add_task("1", 2, growth)
    assert [Path(one.filename).name for one in told] == ["test_growth.py"]
    assert net.widths() == {"0": 4, "2": 4}
    net.add_task("2", 2, 0.1)  # what was rounded off counts
    assert net.widths()["0"] == 5


def test_what_adds_no_feature_by_intent_is_not_told() -> None:
    net = narrow()
    for name, growth in {"none": None, "zero": 0.0, "some": {"0": 0.1, "2": 1}, "nowhere": {"0": 0.0}}.items():
        net.add_task(name, 2, growth)  # warnings are errors here
    net.add_task("by a schedule", 2, 0.01, quiet=True)
    full = narrow(start=0.97)  # rounded, that is all of it
    full.add_task("all that is left", 2, full.left())
    full.add_task("nothing left", 2, full.left())
    assert full.widths() == {"0": 4, "2": 4}
    still = grow(nn.Linear(3, 4), torch.randn(2, 3), keep=[""])
    still.add_task("0", 2)
    with pytest.warns(UserWarning, match="nothing in this network can grow"):
        still.add_task("1", 2, 0.1)
