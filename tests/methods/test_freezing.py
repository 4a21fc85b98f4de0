"""Freezing: the network and its BatchNorm statistics never move after the first task."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


class Attentive(nn.Module):
    """Eight rows that attend to each other; torch runs such a layer in another way where no gradient is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The mean row."""
        rows: Tensor = self.layer(x.squeeze(1))
        return rows.mean(1)


def test_answers_are_the_same_bits_whoever_asks() -> None:
    method = helpers.make("freezing", Attentive)
    first, second, _ = helpers.tasks()
    regime = Regime(epochs=1)
    helpers.learn(method, first, regime=regime)
    x = first.prepare.test(first.test.batch(torch.arange(20))[0])
    before = method.predictor(0)(x)
    helpers.learn(method, second, regime=regime)
    assert torch.equal(method.predictor(0)(x), before)


def test_the_network_is_in_eval_mode_as_soon_as_there_is_a_second_task() -> None:
    method = helpers.make("freezing").train()
    for spec in helpers.run("freezing").method.specs[:2]:
        method.add_task(spec)
    assert method.training
    assert not any(module.training for module in method.net.modules())
    method.drop_task()
    assert all(module.training for module in method.net.modules())


def test_gradients_reach_what_learns_and_are_wanted_only_where_somebody_asked() -> None:
    method = helpers.make("freezing")
    wanted: list[bool] = []
    method.net.register_forward_hook(lambda *_: wanted.append(torch.is_grad_enabled()))
    for spec in helpers.run("freezing").method.specs[:2]:
        method.add_task(spec)
        wanted.clear()
        method(helpers.EXAMPLE, 0)
        with torch.no_grad():
            method(helpers.EXAMPLE, 0)
        assert wanted == [not method.frozen, False]
