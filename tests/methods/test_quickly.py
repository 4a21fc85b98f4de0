"""Methods learn with quick operators what they learn without: here with the twins of a GPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.methods import helpers
from tests.methods.replay import PlainStep, QuickStep
from tests.operators.streams import Main
from zeroforget.growing import layers
from zeroforget.methods import names
from zeroforget.operators import quick_layers as quick
from zeroforget.training import Regime, epochs

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


def unbiased() -> nn.Module:
    """The same without biases before a norm: their gradient is rounding alone, which Adam turns into steps."""
    whole = normed()
    for layer in whole.modules():
        if isinstance(layer, nn.Conv2d):
            layer.bias = None
    return whole


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
    return folded(helpers.copied(dict(method.state_dict())))


def folded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rank births as the steps that they are: directions in which inputs hardly vary turn with the last bit."""
    steps = {
        name.removesuffix("up") + "step": up @ tensors[name.removesuffix("up") + "down"]
        for name, up in tensors.items()
        if name.endswith(".up") and ".rank_births." in name
    }
    return {name: tensor for name, tensor in tensors.items() if ".rank_births." not in name} | steps


CASES = [
    (name, unbiased if make is normed and name == "wsn" else make) for name, make in product(names(), (net, normed))
]


@pytest.mark.parametrize(("name", "make"), [*CASES, ("finetuning", Again)])
def test_quick_steps_learn_the_same(name: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Regime, "can_capture", lambda self: True)
    monkeypatch.setattr(epochs, "RecordedStep", PlainStep)
    plain = learned(name, make)
    monkeypatch.setattr(quick, "fits", lambda x: x.dim() == 4)
    monkeypatch.setattr(layers, "fits", lambda x, geometry: x.dim() == (2 if geometry is None else 4))
    monkeypatch.setattr(epochs, "RecordedStep", QuickStep)
    monkeypatch.setattr(QuickStep, "rectified", seen := [])
    with Main().recording():
        found = learned(name, make)
    for tensor, value in found.items():
        torch.testing.assert_close(value, plain[tensor], rtol=2e-3, atol=2e-4, msg=lambda m, t=tensor: f"{t}: {m}")
    expected = {2} if make in (normed, unbiased) else CONVOLUTIONS.get(name, {2})
    assert set(seen) == (BOTH.get(name, expected) if make is normed else expected)


CONVOLUTIONS = {
    "tfm": {0},  # a growing network has layers of its own, with rectifiers of their own
    "tfm-nofn": {0},
    "lean": {0},
    "adapters": {0},
    "r-ewc": {0},  # its layers are rotated, so that none follows a plain convolution
    "hat": {0},  # weights are computed from the network's own
    "eft": {2, 0},  # a later task transforms what a convolution gives before it is rectified
    "supsup": {0},  # its weights are computed, too
    "wsn": {0},
    "piggyback": {2, 0},  # so they are, from the second task on
    "pnn": {2, 3},  # columns hear each other before they rectify, from the second on
    "progress-compress": {3, 5},
}
"""In how many layers a rectifier runs, over all steps that were recorded; 2 where nothing stands in the way."""
BOTH = {"pnn": {2, 4}, "progress-compress": {4, 6}}
"""The same with batch normalization."""


@pytest.mark.parametrize("recorded", [False, True])
def test_only_steps_that_can_be_recorded_are(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Regime, "can_capture", lambda self: recorded)
    monkeypatch.setattr(epochs, "RecordedStep", QuickStep)
    monkeypatch.setattr(QuickStep, "rectified", seen := [])
    learned("finetuning")
    assert bool(seen) == recorded
