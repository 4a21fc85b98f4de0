"""What a conversion takes beside the network that it is given."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from zeroforget.proving.grow import adopt, grow
from zeroforget.proving.trial import give_back
from zeroforget.proving.trial_networks import LARGE


def _deep() -> nn.Module:
    """Nine layers, of which none is a large part of the whole."""
    middle = [m for _ in range(8) for m in (nn.ReLU(), nn.Linear(192, 192))]
    return nn.Sequential(nn.Linear(64, 192), *middle, nn.ReLU(), nn.Linear(192, 10))


def _most(work: Callable[[], object]) -> int:
    """The most bytes of tensors in use at any time, beside those from before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        made = work()
    del made
    now = most = 0
    records = [e for e in events.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(records, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_a_conversion_takes_two_and_a_half_times_the_network_beside_it() -> None:
    plain, x = _deep(), torch.randn(2, 64)
    size = sum(p.numel() * p.element_size() for p in plain.parameters())
    assert size > 4 * LARGE
    assert _most(lambda: adopt(plain, x)) <= 2.5 * size


def test_what_is_lent_shares_its_weights_and_answers_alike() -> None:
    x = torch.randn(2, 64)
    net = adopt(_deep(), x)
    lent, own = net.cut(0, lend=True), net.cut(0)
    values = {tensor.value.data_ptr() for tensor in net.tensors()}
    assert torch.equal(lent(x), own(x))
    assert sum(p.data_ptr() in values for p in lent.parameters()) == 2 * 9  # all but the head's
    assert not any(p.data_ptr() in values for p in own.parameters())
    net.add_task("more", 3, growth=0.1)
    with torch.no_grad():
        for norm in net.parameters():
            norm.add_(0.5)
    before = net.dense(1)(x)
    assert torch.equal(net.cut(1, lend=True)(x), before)
    assert torch.equal(net.dense(1)(x), before)  # what is folded in was folded into copies
    assert torch.equal(net(x, 0), own(x))


def test_a_network_that_remembers_while_it_learns_is_asked_after_that() -> None:
    class Remembers(nn.Module):
        """Counts how often it was asked with gradients, and answers by that."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
            self.register_buffer("asked", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).relu()) * (1 + self.asked)
            if torch.is_grad_enabled():
                self.asked += 1
            return out

    with pytest.raises(ValueError, match="while it learns"):
        grow(Remembers(), torch.randn(4, 6))


def test_memory_is_given_back_wherever_that_is_possible() -> None:
    give_back()
