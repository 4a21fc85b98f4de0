"""Weights that do not fit the network asked for: the choice that was another one is named, and what to give instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroforget import nets
from zeroforget.store.backbone import Backbone
from zeroforget.store.weights import hint_for_head, hint_for_library, hint_for_ours

GRAY, COLOR = "were gray, with 1 channel: give --gray", "were in color, with 3 channels: leave out --gray"


def weights(network: str, shape: tuple[int, int, int], width: float) -> dict[str, Tensor]:
    with torch.device("meta"):
        return {f"net.{name}": value for name, value in nets.build(network, shape, width=width).state_dict().items()}


@pytest.mark.parametrize(
    ("network", "made", "asked", "told"),
    [
        ("small", ((1, 8, 8), 1.0), ((3, 8, 8), 1.0), [GRAY]),
        ("small", ((3, 8, 8), 1.0), ((1, 8, 8), 1.0), [COLOR]),
        ("small", ((3, 8, 8), 0.5), ((3, 8, 8), 1.0), ["its width is 0.5, not 1: give --width 0.5"]),
        ("small", ((3, 8, 8), 1.0), ((3, 64, 64), 1.0), ["another size than 64×64: give --size 8"]),
        ("lenet", ((1, 28, 28), 1.0), ((1, 64, 64), 1.0), ["give --size 28 or --size 32"]),
        ("lenet", ((1, 32, 32), 1 / 3), ((1, 32, 32), 2.0), ["give --width 0.33"]),
        ("resnet18", ((1, 64, 64), 0.25), ((3, 32, 32), 0.5), [GRAY, "give --width 0.25"]),
        ("small", ((1, 28, 28), 0.5), ((3, 64, 64), 1.0), [GRAY, "give --width 0.5", "give --size 28"]),
        ("small", ((1, 301, 301), 1.0), ((1, 8, 8), 1.0), ["another size than 8×8: give their --size"]),
        ("small", ((4, 8, 8), 1.0), ((3, 8, 8), 1.0), ["had 4 channels, and only 1 (--gray) or 3", "train it"]),
    ],
)
def test_what_differs_is_told(network: str, made: Any, asked: Any, told: list[str]) -> None:
    hint = hint_for_ours(Backbone(network, {"width": asked[1]}, asked[0]), weights(network, *made), "net.")
    parts = hint.split("; ")
    assert len(parts) == len(told), hint
    assert all(word in part for part, word in zip(parts, told, strict=True)), hint


@pytest.mark.parametrize("shape", [(32, 16, 5, 5), (33, 16, 3, 3), (32, 17, 3, 3), (32,), ()])
def test_what_no_choice_explains(shape: tuple[int, ...]) -> None:
    values = weights("small", (1, 8, 8), 1.0) | {"net.convolutions.3.weight": torch.zeros(shape)}
    assert "no --width, --size or --gray" in hint_for_ours(Backbone("small", {"width": 1.0}, (1, 8, 8)), values, "net.")


def vision(channels: int = 3, places: int = 4, features: int = 6, classes: int = 3) -> nn.Module:
    net = nn.Sequential()
    net.register_parameter("pos_embed", nn.Parameter(torch.zeros(1, places, features)))
    net.add_module("patch", nn.Conv2d(channels, features, 4))
    net.add_module("head", nn.Linear(features, classes))
    return net


@pytest.mark.parametrize(
    ("name", "asked", "made", "told"),
    [
        ("timm/v", {}, {"channels": 1}, GRAY),
        ("timm/v", {"channels": 1}, {}, COLOR),
        ("timm/v", {}, {"channels": 4}, "had 4 channel(s), and the networks of timm are taken with 1 (--gray) or 3"),
        ("torchvision/v", {}, {"channels": 1}, "had 1 channel(s), and the networks of torchvision are taken with 3"),
        ("timm/v", {}, {"places": 9}, "another size: give the --size"),
        ("timm/v", {}, {"features": 8}, "--set KEY=VALUE"),
        ("timm/v", {}, {"classes": 5}, "it has 5 classes, not 3: leave out --set num_classes"),
    ],
)
def test_networks_of_libraries(name: str, asked: dict[str, int], made: dict[str, int], told: str) -> None:
    backbone = Backbone(name, {"num_classes": 3}, (3, 8, 8))
    assert told in hint_for_library(backbone, vision(**asked), "head", vision(**made).state_dict(), "")


def test_heads() -> None:
    assert "transposed" in hint_for_head(32, 3, 32)
    assert "the head reads 64 features, and the network before it gives 32" in hint_for_head(3, 64, 32)
