"""How an epoch is cut into batches: every image is seen once, and none alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zeroforget.data import Split, Task
from zeroforget.methods.baselines import Finetuning
from zeroforget.methods.tfm import Tfm
from zeroforget.training import Fit, Progress, Regime
from zeroforget.training.feed import batch_sizes
from zeroforget.training.seeding import seeded


def task(images: int) -> Task:
    draw = torch.Generator().manual_seed(0)
    parts = [Split(torch.randn(n, 4, generator=draw), torch.arange(n) % 2) for n in (images, 8, 8)]
    return Task("t", ("a", "b"), *parts)


class Noting(Finetuning):
    """Notes the shares of the epoch that have passed, and the images of each step."""

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        super().__init__(net, example)
        self.shares: list[float] = []
        self.seen: list[Tensor] = []

    def before_step(self, done: float) -> None:
        self.shares.append(done)

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        self.seen.append(x)
        return super().loss(x, y, task)


def method(cls: type = Noting) -> Any:
    with seeded("net"):
        return cls(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), torch.randn(2, 4))


@given(st.integers(1, 200), st.integers(1, 40))
def test_batches_hold_every_image_and_one_alone_only_where_nothing_else_is_asked_for(images: int, batch: int) -> None:
    sizes = batch_sizes(images, batch)
    assert sum(sizes) == images
    assert set(sizes[:-1]) <= {batch}
    assert sizes[-1] <= batch + 1
    assert 1 not in sizes or batch == 1 or images == 1
    assert abs(len(sizes) - images / batch) < 1


@pytest.mark.parametrize("changes", [{}, {"mixup": 0.5}])
def test_an_image_left_over_joins_the_batch_before(changes: dict[str, Any]) -> None:
    told: list[Progress] = []
    learner, data = method(), task(25)
    regime = Regime(lr=0.1, epochs=2, batch_size=8, schedule="cosine", keep="last", **changes)
    log = learner.learn(data, Fit(regime, progress=told.append))
    assert [len(x) for x in learner.seen] == [8, 8, 9] * 2
    assert learner.shares == [0, 1 / 3, 2 / 3] * 2
    assert {p.steps for p in told} == {3}
    assert [e.lr for e in log.epochs] == pytest.approx([0.05 * (1 + math.cos(math.pi * k / 6)) for k in (2, 5)])
    if not changes:
        assert torch.equal(torch.cat(learner.seen[:3]).sort(0)[0], data.prepare.test(data.train.images).sort(0)[0])


@pytest.mark.parametrize("cls", [Finetuning, Tfm])
def test_a_network_with_batch_normalization_learns_from_one_image_more_than_a_batch(cls: type) -> None:
    log = method(cls).learn(task(17), Fit(Regime(epochs=1, batch_size=16)))
    assert math.isfinite(log.epochs[0].loss)


@pytest.mark.parametrize("cls", [Finetuning, Tfm])
@pytest.mark.parametrize(("images", "batch"), [(1, 16), (6, 1)])
def test_one_image_at_a_time_says_what_batch_normalization_wants(cls: type, images: int, batch: int) -> None:
    with pytest.raises(ValueError, match=rf"task 't'.*at least 2 training images \(it has {images}\).*batch_size"):
        method(cls).learn(task(images), Fit(Regime(epochs=1, batch_size=batch)))
