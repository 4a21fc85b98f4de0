"""Methods that say `graph_safe`: a step recorded once and replayed without Python trains to the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.methods import helpers
from tests.methods.replay import PlainStep, ReplayedStep
from zeroforget.methods import Method, find, names
from zeroforget.methods.baselines import Finetuning
from zeroforget.training import Regime, epochs

SAFE = [name for name in names() if find(name)[0].graph_safe]
REGIME = Regime(
    lr=0.02,
    options={"momentum": 0.9},
    epochs=2,
    batch_size=48,
    clip=2.0,
    schedule="cosine",
    label_smoothing=0.1,
    keep="last",
)


def trained(make: Callable[[], Method], step: type, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What a method is after two tasks, its steps made by `step`, with the optimizer that recording wants, and the
    training losses that it told of."""
    monkeypatch.setattr(Regime, "can_capture", lambda self: True)
    monkeypatch.setattr(epochs, "RecordedStep", step)
    method = make()
    sequence = helpers.tasks(((0, 1, 2), (3, 4)), each=40)
    logs = [helpers.learn(method, task, sequence[:k], regime=REGIME) for k, task in enumerate(sequence)]
    losses = torch.tensor([epoch.loss for log in logs for epoch in log.epochs])
    return helpers.copied(dict(method.state_dict())) | {"(losses)": losses}


@pytest.mark.parametrize("name", SAFE)
def test_replayed_steps_train_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks with dropout, statistics, a rate that falls with every step and batches of two sizes each."""
    replayed = trained(lambda: helpers.make(name), ReplayedStep, monkeypatch)
    for tensor, value in trained(lambda: helpers.make(name), PlainStep, monkeypatch).items():
        assert torch.equal(replayed[tensor], value), tensor


def test_every_method_of_ours_can_be_recorded() -> None:
    assert names() == SAFE


class Annealed(Finetuning):
    """Keeps a number that changes in Python."""

    done = 0.0

    def before_step(self, done: float) -> None:
        self.done = done

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        return super().loss(x, y, task) * (1 + self.done)


class Hidden(Finetuning):
    """Counts its steps where nobody puts the count back."""

    def before_step(self, done: float) -> None:
        self.steps = self.__dict__.get("steps", torch.zeros(()))

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        self.steps += 1
        return super().loss(x, y, task) / self.steps


class Looking(Finetuning):
    """Asks for a value."""

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        loss = super().loss(x, y, task)
        return loss / 2 if loss > 1 else loss


class Copying(Finetuning):
    """Brings a number from the host."""

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        return super().loss(x, y, task) * torch.tensor([2.0]).sum()


@pytest.mark.parametrize("wrong", [Annealed, Hidden])
def test_a_replay_shows_what_a_recording_cannot_follow(wrong: type[Method], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Method:
        return wrong(helpers.normed_net(), helpers.EXAMPLE)

    replayed = trained(make, ReplayedStep, monkeypatch)
    plain = trained(make, PlainStep, monkeypatch)
    assert not torch.equal(replayed["net.0.weight"], plain["net.0.weight"])


@pytest.mark.parametrize("wrong", [Looking, Copying])
def test_a_recording_refuses_what_waits_for_the_host(wrong: type[Method], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="may not call"):
        trained(lambda: wrong(helpers.normed_net(), helpers.EXAMPLE), ReplayedStep, monkeypatch)
