"""A regime that cannot be trained with is refused when it is written down, and says what would do."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from zeroforget.training import Regime
from zeroforget.training import regime as regimes

BAD: dict[str, tuple[Any, ...]] = {
    "str": (None, 3, True, ["sgd"]),
    "bool": (None, 1, "yes"),
    "int": (None, 1.5, 32.0, math.nan, True, "5", 0, -1),
    "float": (None, math.nan, math.inf, True, "0.1", -1.0),
    "float | None": (math.nan, math.inf, True, "0.1", 0.0, -1.0),
    "dict[str, Any]": (None, "momentum", [("momentum", 0.9)]),
}


@pytest.mark.parametrize(
    ("name", "value"), [(each.name, value) for each in fields(Regime) for value in BAD[str(each.type)]]
)
def test_no_field_takes_what_is_not_of_its_kind_or_out_of_its_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b.*not"):
        Regime(**{name: value})


@pytest.mark.parametrize("name", ["lr", "min_lr", "decay", "batch_size", "epochs", "patience", "clip"])
def test_zero_is_refused_where_nothing_would_be_learned(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* not 0"):
        Regime(**{name: 0})


def test_whole_numbers_will_do_for_any_number() -> None:
    regime = Regime(lr=1, clip=5, decay=2, cutmix=1, schedule="cosine", warmup=1)
    assert regime.cosine(1, 0.1) == 1.0
    assert Regime(clip=None).clip is None


@pytest.mark.parametrize(("name", "why"), [("LBFGS", "several times"), ("muon", "matrices"), ("SparseAdam", "sparse")])
def test_optimizers_that_cannot_train_a_network_say_why(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be used here: .*{why}.*sgd or adamw"):
        Regime(optimizer=name)
    with pytest.raises(ValueError, match=r"no optimizer 'sdg'; there are: .*Adam, AdamW, ") as unknown:
        Regime(optimizer="sdg")
    assert name.lower() not in str(unknown.value).lower()


NAMES = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and name not in {"Optimizer", "LBFGS", "Muon", "SparseAdam"}
)


@pytest.mark.parametrize("name", NAMES)
def test_every_other_optimizer_makes_a_step(name: str) -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    optimizer = Regime(optimizer=name, lr=0.1).make_optimizer(layer.parameters(), 0.1)
    layer(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("options", [{"momentm": 0.9}, {"lr": 0.1}, {"params": []}, {"betas": (0.9, 0.99)}])
def test_options_that_the_optimizer_does_not_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"sgd has no '{next(iter(options))}' beside lr; it has: momentum, "):
        Regime(options=options)


@pytest.mark.parametrize("value", [-1.0, "0.9"])
def test_values_that_the_optimizer_does_not_take_are_named(value: Any) -> None:
    regime = Regime(options={"momentum": value})
    with pytest.raises(ValueError, match=rf"options: sgd does not take .*momentum.*{value}"):
        regime.make_optimizer(nn.Linear(2, 2).parameters(), 0.1)


def test_the_papers_regime_is_the_default() -> None:
    assert Regime() == Regime(
        optimizer="sgd", lr=0.05, options={}, batch_size=64, epochs=200, schedule="patience", keep="best", patience=5
    )
    assert (Regime().decay, Regime().min_lr, Regime().rewind, Regime().warmup) == (3.0, 1e-4, False, 0.0)
    assert Regime() == Regime(label_smoothing=0.0, cutmix=0.0, mixup=0.0, mix_until=1.0, clip=None, precision="float32")


def test_what_is_just_within_its_range_will_do() -> None:
    assert Regime(cutmix=0.5, mixup=0.5).mixes(199)
    assert Regime(mixup=1.0).mixes(0)
    assert Regime(rewind=True, keep="accurate").rewind


def test_an_optimizer_has_the_rate_of_the_moment_and_leaves_the_regime_as_it_is() -> None:
    regime = Regime(lr=0.1, options={"momentum": 0.9})
    optimizer = regime.make_optimizer(nn.Linear(2, 2).parameters(), 0.01)
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.01, 0.9)]
    assert regime == Regime(lr=0.1, options={"momentum": 0.9})


@pytest.mark.parametrize(
    ("optimizer", "options", "decay", "apart"),
    [
        ("sgd", {}, 0.0, False),
        ("SGD", {"weight_decay": 0.1}, 0.1, False),
        ("adam", {"weight_decay": 0.1}, 0.1, False),
        ("adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, 0.1, True),
        ("AdamW", {}, 0.01, True),
        ("adamw", {"weight_decay": 0.0}, 0.0, False),
        ("adafactor", {"weight_decay": 0.1}, 0.1, True),
        ("rprop", {}, 0.0, False),
    ],
)
def test_how_weights_decay_is_known(optimizer: str, options: dict[str, Any], decay: float, apart: bool) -> None:
    regime = Regime(optimizer=optimizer, options=options)
    assert (regime.weight_decay, regime.decays_apart) == (decay, apart)


@pytest.mark.parametrize(
    ("options", "captured"),
    [
        ({}, True),
        ({"optimizer": "AdamW", "device": "cuda:0"}, True),
        ({"options": {"momentum": 0.9, "nesterov": False}}, True),
        ({"options": {"momentum": 0.9, "nesterov": True}}, False),
        ({"options": {"momentum": 0.9, "dampening": 0.1}}, False),
        ({"optimizer": "rmsprop"}, False),
        ({"capture": False}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_where_there_is_a_gpu_a_step_is_recorded_if_it_can_be(
    options: dict[str, Any], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert Regime(**({"device": "cuda"} | options)).can_capture() == captured
    with pytest.raises(ValueError, match=r"there is no 'cuda:1': torch sees 1 of them, from cuda:0 on"):
        Regime(device="cuda:1")


def test_where_there_is_no_gpu_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda:0' was asked for, but torch sees no GPU; use 'cpu'"):
        Regime(device="cuda:0")


@pytest.mark.parametrize(
    ("given", "coupled"),
    [({}, False), ({"clip": 1.0}, True), ({"optimizer": "AdamW"}, False), ({"optimizer": "Adafactor"}, True)],
)
def test_whose_gradients_have_a_say_in_other_weights(given: dict[str, Any], coupled: bool) -> None:
    assert Regime(**given).couples == coupled


def test_optimizers_said_to_move_weights_one_by_one_do() -> None:
    """Another gradient for one weight of a matrix leaves the other weights as they become."""
    for name, make in regimes._OPTIMIZERS.items():
        became = []
        for other in (1.0, -50.0):
            weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
            optimizer = make([weight], lr=0.05)
            for step in range(4):
                weight.grad = torch.sin(torch.arange(12.0) + step).view(3, 4)
                weight.grad[0, 0] = other
                optimizer.step()
            became.append(weight.detach().clone())
        moved = (became[0] != became[1]).flatten().tolist()
        assert any(moved[1:]) != (name in regimes._ONE_BY_ONE), name
