"""Methods learn with quick operators what they learn without: here with the twins of a GPU's kernels."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.methods import helpers
from tests.methods.replay import PlainStep
from tests.operators.streams import Main
from zeroforget.growing import layers
from zeroforget.methods import Method, names
from zeroforget.operators import recorded as quick
from zeroforget.operators.recorded import Quick
from zeroforget.training import Regime, fit

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


def normed() -> nn.Module:
    """The same with batch normalization between."""
    torch.manual_seed(0)
    plain = net()
    parts = [plain[0], nn.BatchNorm2d(6), *plain[1:4], nn.BatchNorm2d(8), *plain[4:]]
    return nn.Sequential(*parts)


class Again(nn.Module):
    """Computes its middle anew on the way back, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = net()

    def forward(self, x: Tensor) -> Tensor:
        middle: Tensor = checkpoint(self.whole[:5], x, use_reentrant=False)
        out: Tensor = self.whole[5:](middle)
        return out


def learned(name: str, make: Callable[[], nn.Module] = net) -> dict[str, Tensor]:
    method = helpers.make(name, make)
    sequence = helpers.tasks(((0, 1, 2), (3, 4)), each=40)
    for k, task in enumerate(sequence):
        helpers.learn(method, task, sequence[:k], regime=REGIME)
    return helpers.copied(dict(method.state_dict()))


@pytest.mark.parametrize(("name", "make"), [*product(names(), (net, normed)), ("finetuning", Again)])
def test_quick_steps_learn_the_same(name: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = learned(name, make)
    seen: list[bool] = []

    def computing(self: Method, recorded: bool) -> Quick:
        """As on a GPU."""
        mode = self.net.training
        if mode not in self._rectified:
            self._rectified[mode] = self.rectified(self.get_buffer("example"))
            seen.append(len(self._rectified[mode]))
        return Quick(self._rectified[mode])

    monkeypatch.setattr(quick, "fits", lambda x: x.dim() == 4)
    monkeypatch.setattr(layers, "fits", lambda x, geometry: x.dim() == (2 if geometry is None else 4))
    monkeypatch.setattr(Method, "computing", computing)
    with Main().recording():
        found = learned(name, make)
    for tensor, value in found.items():
        torch.testing.assert_close(value, plain[tensor], rtol=2e-3, atol=2e-4, msg=lambda m, t=tensor: f"{t}: {m}")
    # A growing network has layers of its own, with rectifiers of their own; those of R-EWC are rotated, so that none
    # follows a plain convolution; and PNN's columns hear each other before they rectify, from the second on.
    convolutions = {"tfm": {0}, "tfm-nofn": {0}, "r-ewc": {0}, "pnn": {0, 2}}
    assert set(seen) == ({2} if make is normed else convolutions.get(name, {2})) | ({0} if name == "pnn" else set())


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_says_whether_it_is_recorded(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def computing(self: Method, recorded: bool) -> AbstractContextManager[None]:
        told.append(recorded)
        return nullcontext()

    monkeypatch.setattr(Method, "computing", computing)
    monkeypatch.setattr(Regime, "can_capture", lambda self: recorded)
    monkeypatch.setattr(fit, "CapturedStep", PlainStep)
    learned("finetuning")
    assert set(told) == {recorded}


def test_copies_look_at_their_own_weights() -> None:
    method = helpers.make("finetuning", net)
    method._rectified[True] = method.rectified(method.get_buffer("example"))
    assert len(method._rectified[True]) == 2
    assert not copy.deepcopy(method)._rectified
    assert not pickle.loads(pickle.dumps(method))._rectified
