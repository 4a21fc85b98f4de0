"""True counts, the paper's counts by its own rules, and what masks cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from zeroforget import nets
from zeroforget.nets import counts


def _block(inputs: int, outputs: int) -> int:
    """Two 3×3 convolutions, a 1×1 where the width changes, and for each output of these two numbers of its norm."""
    shortcut = (inputs + 2) * outputs if inputs != outputs else 0
    return 9 * (inputs + outputs) * outputs + 4 * outputs + shortcut


# Worked out by hand, layer by layer; AlexNet, VGG-16, SqueezeNet and the ResNets are also the well-known totals less
# their heads.
TRUE = {
    "small": (16 * 10 + 32 * (16 * 9 + 1) + 64 * (32 * 4 + 1), 112),
    "lenet": (6 * 26 + 16 * 151 + 120 * 401 + 84 * 121, 226),
    "compact": (
        24 * 27
        + 48
        + sum(_block(*pair) for pair in ((24, 48), (48, 48), (48, 96), (96, 96), (96, 96)))
        + sum(_block(*pair) for pair in ((96, 176), (176, 176), (176, 176)))
        + 176 * 512
        + 1024,
        24 + 48 * 4 + 96 * 6 + 176 * 6 + 512,
    ),
    "squeezenet": (1_248_424 - 513_000, 96 + 2 * (144 + 288 + 432 + 576)),
    "lenet-wide": (20 * 76 + 50 * 501 + 800 * 1251 + 500 * 801, 1_370),
    "conv4": (160 * 28 + 3 * 160 * 1441 + 640 * 2561 + 640 * 641, 1_920),
    "alexnet-cifar": (3072 + 128 * 576 + 256 * 512 + 3072 * 2048 + 2 * 4544, 4_544),
    "alexnet": (61_100_840 - 4_097_000, 9_344),
    "vgg16": (138_357_544 - 4_097_000, 12_416),
    "vgg16-tiny": (57_975_104, 10_880),
    "resnet18": (11_689_512 - 513_000, 3_904),
    "resnet50": (25_557_032 - 2_049_000, 22_720),
}


@pytest.mark.parametrize("name", nets.names())
def test_true_counts(name: str) -> None:
    found = counts.count_named(name)
    assert (found.weights, found.features) == TRUE[name]


def test_vgg_tiny_by_hand() -> None:
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512]
    convolutions = sum((9 * i + 1) * o for i, o in pairwise(widths))
    assert convolutions + (512 * 4 * 4 + 1) * 4096 + 4097 * 4096 == TRUE["vgg16-tiny"][0]


@pytest.mark.parametrize("name", ["lenet", "alexnet", "vgg16", "vgg16-tiny"])
def test_the_papers_weights_by_its_own_rule(name: str) -> None:
    assert counts.paper_weights(name) == counts.PAPER[name].weights


def test_the_papers_resnet_weights_are_not_reproduced() -> None:
    assert counts.paper_weights("resnet50") is None
    with torch.device("meta"):
        net = nets.build("resnet50", (3, 224, 224))
    convolutions = {n: m.weight.numel() for n, m in net.named_modules() if isinstance(m, nn.Conv2d)}
    shortcuts = sum(size for name, size in convolutions.items() if "shortcut" in name)
    # Even convolutions alone, without shortcuts, are 7 % above the paper's figure.
    assert sum(convolutions.values()) - shortcuts == 20_686_016 != counts.PAPER["resnet50"].weights
    assert counts.paper_rule_weights(net) < counts.PAPER["resnet50"].weights


@pytest.mark.parametrize("name", ["lenet", "alexnet", "vgg16-tiny", "resnet50"])
def test_the_papers_features_are_ours(name: str) -> None:
    assert counts.count_named(name).features == counts.PAPER[name].features


def test_the_papers_vgg_features_are_not_of_the_network_it_weighs() -> None:
    assert counts.count_named("vgg16").features == counts.PAPER["vgg16"].features + 3 * 512


def test_paper_rule_on_two_layers() -> None:
    net = nn.Sequential(nn.Conv2d(7, 4, (3, 5)), nn.Linear(10, 6))
    assert counts.paper_rule_weights(net) == (15 * 4 + 4) + 60
    assert counts.count(net) == counts.Counts(weights=15 * 7 * 4 + 4 + 66, features=10)


@pytest.mark.parametrize(
    ("weights", "features", "weight_bytes", "feature_bytes"),
    [(8, 4, 1, 1), (9, 5, 2, 2), (0, 0, 0, 0), (54_547_712, 9_344, 6_818_464, 2_336)],
)
def test_mask_bytes(weights: int, features: int, weight_bytes: int, feature_bytes: int) -> None:
    found = counts.Counts(weights, features)
    assert (found.weight_mask_bytes, found.feature_mask_bytes) == (weight_bytes, feature_bytes)


def test_counts_follow_the_shape() -> None:
    at_32 = counts.count_named("vgg16", (3, 32, 32))
    assert at_32.weights == TRUE["vgg16"][0] - 512 * 48 * 4096
    assert at_32.features == TRUE["vgg16"][1]


def test_torchvisions_name_for_a_shortcut_counts_too() -> None:
    block = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 1), "downsample": nn.Sequential(nn.Conv2d(3, 4, 1))})
    assert counts.features(block) == 4
