"""Freezing: the network and its BatchNorm statistics never move after the first task."""

from __future__ import annotations

import torch

from tests.methods import helpers
from zeroforget.training import Regime


def test_network_and_statistics_never_move() -> None:
    """Also under momentum and weight decay, which move whatever is in the optimizer."""
    regime = Regime(optimizer="sgd", lr=0.05, epochs=2, options={"momentum": 0.9, "weight_decay": 0.1})
    method = helpers.make("freezing")
    first, second, third = helpers.tasks()
    start = helpers.copied(dict(method.net.state_dict()))
    helpers.learn(method, first, regime=regime)
    frozen = helpers.copied(dict(method.net.state_dict()))
    assert not any(torch.equal(start[name], frozen[name]) for name in frozen)
    for task in (second, third):
        helpers.learn(method, task, regime=regime)
        assert all(torch.equal(frozen[name], value) for name, value in method.net.state_dict().items())
    assert not any(p.requires_grad for p in method.net.parameters())
    assert not any(module.training for module in method.train().net.modules())
    assert set(method.moving()) == {"heads.2.weight", "heads.2.bias"}


def test_taking_back_the_second_task_thaws_the_network() -> None:
    method = helpers.make("freezing")
    for _ in range(2):
        method.add_task(method.specs[0] if method.specs else helpers.run("freezing").method.specs[0])
    method.drop_task()
    assert all(p.requires_grad for p in method.net.parameters())
    assert all(module.training for module in method.train().net.modules())
