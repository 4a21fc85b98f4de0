"""Methods learn with quick operators what they learn without: here with the twins of a GPU's kernels."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from tests.methods import helpers
from zeroforget.core import quick
from zeroforget.core.quick import Quick
from zeroforget.methods import Method, names
from zeroforget.training import Regime

REGIME = Regime(lr=0.01, epochs=1, batch_size=48)


def net() -> nn.Module:
    """Convolutions with a rectifier behind them, pooling two by two, linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(),
    )


def learned(name: str) -> dict[str, Tensor]:
    method = helpers.make(name, net)
    sequence = helpers.tasks(((0, 1, 2), (3, 4)), each=40)
    for k, task in enumerate(sequence):
        helpers.learn(method, task, sequence[:k], regime=REGIME)
    return helpers.copied(dict(method.state_dict()))


@pytest.mark.parametrize("name", names())
def test_quick_steps_learn_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = learned(name)
    seen: list[bool] = []

    def computing(self: Method) -> Quick:
        if isinstance(self.net, nn.Sequential):
            found = quick.rectified(self.net, self.get_buffer("example"))
            seen.append(len(found) == 2)
            return Quick(found)
        return Quick()

    monkeypatch.setattr(quick, "fits", lambda x: x.dim() == 4)
    for kind in {cls for cls in Method.__subclasses__() if "computing" in vars(cls)} | {Method}:
        monkeypatch.setattr(kind, "computing", computing)
    for tensor, value in learned(name).items():
        torch.testing.assert_close(value, plain[tensor], rtol=2e-3, atol=2e-4, msg=lambda m, t=tensor: f"{t}: {m}")
    assert all(seen) or name == "r-ewc"  # whose layers are rotated, so that no rectifier follows a convolution


def test_copies_look_at_their_own_weights() -> None:
    method = helpers.make("finetuning", net)
    method._rectified = quick.rectified(method.net, method.get_buffer("example"))
    assert copy.deepcopy(method)._rectified is None
    assert pickle.loads(pickle.dumps(method))._rectified is None
