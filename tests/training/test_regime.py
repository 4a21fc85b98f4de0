"""A regime that cannot be trained with is refused when it is written down, and says what would do."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from zeroforget.training import Regime

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
