"""Random networks are converted and trained by hostile optimizers: whatever grows is never wrong."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.growing.helpers import train
from tests.proving.random_networks import FEATURES, Block, Layered, blocks
from zeroforget.axes.find import CannotGrow
from zeroforget.proving.grow import grow


def _state(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def never_wrong(layers: list[Block], number: int, *, words: bool, start: float, kind: str) -> bool:
    """Convert, train two tasks, compare; whether it grew."""
    plain = Layered(layers, number)
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(*((4, 3) if words else (4,)), FEATURES, generator=generator)
    before = _state(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            net = grow(plain, x, start=start, limit=10.0, unknown="keep")
        except (CannotGrow, ValueError):
            net = None
        assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
        if net is None:
            return False
        net.add_task("0", 3)
        net.eval()
        if start == 1:
            frozen = copy.deepcopy(plain).requires_grad_(False).eval()
            assert torch.equal(net.dense(0).get_submodule("features")(x), frozen(x)), "not the given network"
        train(net, x, kind=kind)
        logits, mark = net(x, 0), net.fingerprint(0)
        features = net.dense(0).get_submodule("features")(x)
        net.add_task("1", 2, growth=dict.fromkeys(net.axes.sizes, 1 + number % 5))
        wider = net.dense(1).get_submodule("features")(x)[:, : features.shape[1]]
        if not net.axes.coupled:
            torch.testing.assert_close(wider, features, rtol=1e-3, atol=1e-4 * max(1.0, float(features.abs().max())))
        train(net, x, kind=kind)
        with torch.no_grad():
            for tensor in (*plain.parameters(), *plain.buffers()):
                tensor.add_(0.5)
        assert torch.equal(net(x, 0), logits), "an old task's logits changed"
        assert net.fingerprint(0) == mark
        assert torch.equal(copy.deepcopy(net)(x, 0), logits)
        net.add_task("2", 2, growth=dict.fromkeys(net.axes.sizes, 2))
        train(net, x, kind=kind)
        net.drop_task()
        assert net.fingerprint(0) == mark
    return True


CASES = dict(
    layers=blocks,
    number=st.integers(0, 10_000),
    words=st.booleans(),
    start=st.sampled_from([1.0, 1.0, 0.6]),
    kind=st.sampled_from(["sgd", "adamw"]),
)
_QUIETLY = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@seed(7)
@settings(max_examples=6, **_QUIETLY)
@given(**CASES)
def test_a_few_random_networks_are_never_wrong(
    layers: list[Block], number: int, words: bool, start: float, kind: str
) -> None:
    never_wrong(layers, number, words=words, start=start, kind=kind)


def test_a_skip_that_appears_between_start_and_full_width_is_refused() -> None:
    """From 5 of 8 features to the input's 6."""
    assert not never_wrong([("same", 5), ("hook", 4)], 0, words=False, start=0.6, kind="sgd")


@pytest.mark.soak
@settings(max_examples=2000, **_QUIETLY)
@given(**CASES)
def test_two_thousand_random_networks_are_never_wrong(
    layers: list[Block], number: int, words: bool, start: float, kind: str
) -> None:
    never_wrong(layers, number, words=words, start=start, kind=kind)
