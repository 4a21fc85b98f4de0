"""What the published networks compute, layer by layer, and how their layers start: written out a second time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroforget
from zeroforget import nets

VGG = ["c3/1+1 r c3/1+1 r p2/2"] * 2 + ["c3/1+1 r c3/1+1 r c3/1+1 r p2/2"] * 3
END = "f l r d l r d"
LAYERS = {
    "small": "c3/1+1 r p2/2 c3/1+1 r p2/2 f l r d",
    "lenet": f"c5/1+0 r p2/2 c5/1+0 r p2/2 {END}",
    "alexnet": f"c11/4+2 r p3/2 c5/1+2 r p3/2 c3/1+1 r c3/1+1 r c3/1+1 r p3/2 {END}",
    "vgg16": " ".join([*VGG, END]),
    "vgg16-tiny": " ".join([*VGG[:-1], END]),
}


def layers(net: nn.Module) -> str:
    """Each layer's letter; of a convolution and a pool also the kernel and the stride, of a convolution the padding."""
    words = []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            words.append(f"c{layer.kernel_size[0]}/{layer.stride[0]}+{layer.padding[0]}")
        elif isinstance(layer, nn.MaxPool2d):
            words.append(f"p{layer.kernel_size}/{layer.stride}")
        elif not list(layer.children()):
            words.append(type(layer).__name__[0].lower())
    return " ".join(words)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_that_were_published(name: str) -> None:
    with torch.device("meta"):
        assert layers(nets.build(name, nets.find(name).shape)) == LAYERS[name]


def test_batch_norm_stands_between_a_convolution_without_bias_and_its_relu() -> None:
    with torch.device("meta"):
        net = nets.build("vgg16", (3, 32, 32), norm="batch")
    assert layers(net) == LAYERS["vgg16"].replace("+1 r", "+1 b r")
    assert all(layer.bias is None for layer in net.modules() if isinstance(layer, nn.Conv2d))


def normalized(x: Tensor, values: Iterator[Tensor], stride: int) -> Tensor:
    """A convolution and its normalization, as in service."""
    weight, gain, shift, mean, variance, _ = (next(values) for _ in range(6))
    maps = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
    return F.batch_norm(maps, mean, variance, gain, shift)


@pytest.mark.parametrize("size", [(40, 33), (64, 80)])
@pytest.mark.parametrize(("name", "blocks", "deep"), [("resnet18", (2, 2, 2, 2), 0), ("resnet50", (3, 4, 6, 3), 1)])
def test_a_residual_network_is_this_formula(
    name: str, blocks: tuple[int, ...], deep: int, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    net = nets.build(name, (3, *size), width=0.1)
    images = torch.randn(4, 3, *size)
    net(images)  # so that the statistics are not those of the beginning
    values = iter(net.eval().state_dict().values())
    if max(size) > 64:
        x = F.max_pool2d(normalized(images, values, 2).relu(), 3, stride=2, padding=1)
    else:
        x = normalized(images, values, 1).relu()
    for stage, repeats in enumerate(blocks):
        for block in range(repeats):
            stride = 2 if stage and not block else 1
            path = x
            for one in (1, stride, 1) if deep else (stride, 1):
                path = normalized(path if path is x else path.relu(), values, one)
            past = normalized(x, values, stride) if path.shape != x.shape else x
            x = (path + past).relu()
    assert torch.equal(net(images), F.adaptive_avg_pool2d(x, 1).flatten(1))
    assert not list(values)


@pytest.mark.parametrize("name", nets.names())
def test_every_layer_starts_as_he_and_others_say(name: str) -> None:
    torch.manual_seed(0)
    net = nets.build(name, (3, 64, 64), width=0.25)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            weight, bias = layer.weight.detach(), layer.bias
            assert bias is None or not bias.any()
            assert weight.std().item() == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=5 / weight.numel() ** 0.5)


@pytest.mark.parametrize("name", ["lenet", "alexnet", "vgg16", "vgg16-tiny"])
def test_dropout_can_be_turned_off(name: str) -> None:
    with torch.device("meta"):
        net = nets.build(name, (3, 64, 64), dropout=0.0)
    assert {layer.p for layer in net.modules() if isinstance(layer, nn.Dropout)} == {0.0}


@pytest.mark.parametrize(("size", "inputs"), [((31, 31), 400), ((28, 40), 16 * 5 * 8), ((32, 40), 16 * 5 * 7)])
def test_lenet_pads_where_one_side_is_short(size: tuple[int, int], inputs: int) -> None:
    with torch.device("meta"):
        assert nets.build("lenet", (1, *size)).get_submodule("hidden.0").weight.shape == (120, inputs)


def test_squeezenet_has_torchvisions_names_and_shapes() -> None:
    """So that its published weights fill it; the head, `classifier.1`, is a task's own."""
    state = nets.build("squeezenet", (3, 224, 224)).state_dict()
    fires = {3: (96, 16, 64), 4: (128, 16, 64), 5: (128, 32, 128), 7: (256, 32, 128)}
    fires |= {8: (256, 48, 192), 9: (384, 48, 192), 10: (384, 64, 256), 12: (512, 64, 256)}
    wanted: dict[str, tuple[int, ...]] = {"features.0.weight": (96, 3, 7, 7), "features.0.bias": (96,)}
    for place, (inputs, few, many) in fires.items():
        shapes = {"squeeze": (few, inputs, 1, 1), "expand1x1": (many, few, 1, 1), "expand3x3": (many, few, 3, 3)}
        for name, shape in shapes.items():
            wanted |= {f"features.{place}.{name}.weight": shape, f"features.{place}.{name}.bias": shape[:1]}
    assert {name: tuple(value.shape) for name, value in state.items()} == wanted


@pytest.mark.parametrize("name", ["compact", "squeezenet"])
def test_photo_networks_grow_everywhere_and_forget_nothing(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    net = zeroforget.grow(nets.build(name, (3, 32, 32), width=0.25), x)
    net.add_task("one", 3)
    before = net.eval()(x, "one")
    net.add_task("two", 3, 0.25)
    births = net.births
    assert len(births) == (13 if name == "compact" else 25)
    assert all(int(born.max()) == 1 for born in births.values())
    net.train()(x, "two").sum().backward()
    assert torch.equal(net(x, "one"), before)
    assert torch.equal(net.eval()(x, "one"), before)
