"""Every network: what it returns at any size and width, that all of it learns, and how it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroforget import nets
from zeroforget.nets.layers import initialize

SMALLEST = {
    "small": 4, "lenet": 12, "compact": 1, "squeezenet": 21, "alexnet": 63, "vgg16": 32, "vgg16-tiny": 16,
    "resnet18": 1, "resnet50": 1,
}  # fmt: skip
LAST = {
    "small": 64, "lenet": 84, "compact": 512, "squeezenet": 512, "alexnet": 4096, "vgg16": 4096, "vgg16-tiny": 4096,
    "resnet18": 512, "resnet50": 2048,
}  # fmt: skip
SMALLEST |= {"lenet-wide": 16, "conv4": 1, "alexnet-cifar": 19}
LAST |= {"lenet-wide": 500, "conv4": 640, "alexnet-cifar": 2048}
DROPOUT = {"lenet": {0.5}, "alexnet": {0.5}, "vgg16": {0.5}, "vgg16-tiny": {0.5}, "alexnet-cifar": {0.2, 0.5}}


def shapes(name: str) -> list[tuple[int, int, int]]:
    least = SMALLEST[name]
    return [nets.find(name).shape, (1, least, least), (3, least, least + 13), (5, least + 37, least), (3, 96, 80)]


@pytest.mark.parametrize("name", nets.names())
@pytest.mark.parametrize("width", [0.01, 0.55, 1.0, 1.5])
def test_returns_batch_by_features(name: str, width: float) -> None:
    for shape in shapes(name):
        with torch.device("meta"):
            net = nets.build(name, shape, width=width)
            halves = 2 if name == "squeezenet" else 1  # each is scaled by itself
            assert net(torch.empty(2, *shape)).shape == (2, halves * max(1, round(LAST[name] / halves * width)))


@pytest.mark.parametrize("name", nets.names())
def test_every_layer_follows_the_width(name: str) -> None:
    shape = nets.find(name).shape
    with torch.device("meta"):
        full, half = nets.build(name, shape), nets.build(name, shape, width=0.5)
    pairs = list(zip(full.modules(), half.modules(), strict=True))
    layers = [(a, b) for a, b in pairs if isinstance(a, nn.Conv2d | nn.Linear)]
    assert all(2 * b.weight.shape[0] == a.weight.shape[0] for a, b in layers)
    assert layers[0][0].weight.shape[1] == layers[0][1].weight.shape[1] == shape[0]


@pytest.mark.parametrize("name", nets.names())
def test_gradient_reaches_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    size = max(SMALLEST[name], 16)
    net = nets.build(name, (3, size, size), width=0.125, dropout=0.0)
    net(torch.randn(8, 3, size, size)).square().sum().backward()
    for parameter_name, parameter in net.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", nets.names())
def test_is_made_of_ordinary_modules(name: str) -> None:
    ordinary = (
        nn.Conv2d,
        nn.Linear,
        nn.BatchNorm2d,
        nn.BatchNorm1d,
        nn.ReLU,
        nn.MaxPool2d,
        nn.AdaptiveAvgPool2d,
        nn.Flatten,
    )
    with torch.device("meta"):
        net = nets.build(name, nets.find(name).shape, width=0.1)
    leaves = [m for m in net.modules() if not list(m.children())]
    assert all(isinstance(m, (*ordinary, nn.Dropout, nn.Identity)) for m in leaves)


@pytest.mark.parametrize(
    "name", ["small", "lenet", "lenet-wide", "alexnet-cifar", "squeezenet", "alexnet", "vgg16", "vgg16-tiny"]
)
def test_too_small_an_image_names_the_minimum(name: str) -> None:
    least = SMALLEST[name]
    for height, width in [(least - 1, least), (least, least - 1)]:
        with pytest.raises(ValueError, match=rf"{name} needs images of at least {least}×{least}"):
            nets.build(name, (3, height, width), width=0.01)


def test_the_alexnet_of_the_cifar_tables() -> None:
    net = nets.build("alexnet-cifar", (3, 32, 32))
    kinds = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [m.weight.shape for m in kinds] == [
        (64, 3, 4, 4),
        (128, 64, 3, 3),
        (256, 128, 2, 2),
        (2048, 1024),
        (2048, 2048),
    ]
    assert all(m.bias is None for m in kinds)
    assert [m.p for m in net.modules() if isinstance(m, nn.Dropout)] == [0.2, 0.2, 0.5, 0.5, 0.5]
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert len(norms) == 5
    assert all(m.track_running_stats for m in norms)


def test_lenet_pads_28_to_the_published_maps() -> None:
    sizes = [nets.build("lenet", (1, s, s)).get_submodule("hidden.0").weight.shape for s in (28, 32)]
    assert sizes == [(120, 400), (120, 400)]


def test_resnet_keeps_the_pixels_of_small_images() -> None:
    for size, maps in [(32, 32), (64, 64), (65, 17), (224, 56)]:
        with torch.device("meta"):
            stem = nets.build("resnet18", (3, size, size)).get_submodule("stem")
            assert stem(torch.empty(2, 3, size, size)).shape == (2, 64, maps, maps)


def test_vgg_tiny_is_vgg_without_three_convolutions_and_a_pool() -> None:
    def kinds(name: str) -> list[type[nn.Module]]:
        with torch.device("meta"):
            return [type(m) for m in nets.build(name, (3, 64, 64)).get_submodule("convolutions").children()]

    assert kinds("vgg16")[: len(kinds("vgg16-tiny"))] == kinds("vgg16-tiny")
    dropped = kinds("vgg16")[len(kinds("vgg16-tiny")) :]
    assert (dropped.count(nn.Conv2d), dropped.count(nn.MaxPool2d)) == (3, 1)


def test_vgg_may_begin_as_torchvisions() -> None:
    torch.manual_seed(0)
    for layer in nets.build("vgg16-tiny", (3, 32, 32), width=0.25, start="torchvision").modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.std().item() == pytest.approx((2 / (9 * layer.weight.shape[0])) ** 0.5, rel=0.1)
        if isinstance(layer, nn.Linear):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)  # 0.01 at full width


def test_vgg_with_batch_norm() -> None:
    torch.manual_seed(0)
    net = nets.build("vgg16-tiny", (3, 16, 16), width=0.1, norm="batch")
    kinds = [type(m) for m in net.modules()]
    assert kinds.count(nn.BatchNorm2d) == kinds.count(nn.Conv2d) == 10
    assert net(torch.randn(4, 3, 16, 16)).shape == (4, 410)


@pytest.mark.parametrize("name", nets.names())
def test_dropout(name: str) -> None:
    def rates(**options: float) -> list[float]:
        net = nets.build(name, (3, 64, 64), width=0.01, **options)
        return [m.p for m in net.modules() if isinstance(m, nn.Dropout)]

    assert set(rates()) == DROPOUT.get(name, {0.0})
    if name != "alexnet-cifar":  # whose first two layers drop out less
        assert set(rates(dropout=0.2)) == {0.2}


def test_starts_keep_the_size_of_activations() -> None:
    torch.manual_seed(0)
    net = nets.build("vgg16-tiny", (3, 32, 32), width=0.5).eval()
    out = net(torch.randn(8, 3, 32, 32))
    # E[x²] is 1 after every ReLU layer under variance 2 / fan-in: neither vanishing nor exploding over twelve layers.
    assert 0.2 < out.square().mean() < 5
    linear = nn.Linear(400, 1000)
    initialize(linear)
    assert linear.weight.std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert not linear.bias.any()


def test_same_seed_same_network() -> None:
    def state() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return nets.build("resnet18", (3, 8, 8), width=0.1).state_dict()

    first, second = state(), state()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_small_learns_digits_under_the_papers_optimizer() -> None:
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    mixed = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[mixed]
    x, y = (x - x.mean()) / x.std(), torch.tensor(labels)[mixed]
    net = nn.Sequential(nets.build("small", (1, 8, 8)), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(10):
        for batch in torch.randperm(1400).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    assert (net(x[1400:]).argmax(1) == y[1400:]).float().mean() > 0.9


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"no network 'vgg61'; did you mean 'vgg16'\?"):
        nets.build("vgg61", (3, 64, 64))
    with pytest.raises(ValueError, match=r"no network 'zzz' \(zeroforget networks"):
        nets.find("zzz")
    with pytest.raises(ValueError, match=r"'vgg16' has no option 'nrom'; did you mean 'norm'\?"):
        nets.build("vgg16", (3, 64, 64), nrom="batch")
    with pytest.raises(ValueError, match="norm 'none' or 'batch'"):
        nets.build("vgg16", (3, 64, 64), norm="layer")
    with pytest.raises(ValueError, match="vgg16 has start 'he' or 'torchvision', not 'zero'"):
        nets.build("vgg16", (3, 64, 64), start="zero")


@pytest.mark.parametrize("name", nets.names())
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (3, 64)}, "three positive integers"),
        ({"shape": (0, 64, 64)}, "three positive integers"),
        ({"shape": (3, 64.5, 64)}, "three positive integers"),
        ({"width": 0.0}, "width must be a positive number"),
        ({"width": float("nan")}, "width must be a positive number"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"dropout": -0.1}, "dropout must be"),
    ],
)
def test_refuses_bad_input(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nets.build(name, **({"shape": (3, 64, 64)} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("width", "shape", "message"),
    [
        (1e10, (1, 8, 8), "at most 1000"),
        (99999999999999999999, (1, 8, 8), "at most 1000"),
        (1000.0, (1, 99, 99), "small would have .* weights, and 8,589,934,592 are the most; choose a smaller"),
        (1.0, (1, 20000, 20000), "weights, and 8,589,934,592 are the most"),
    ],
)
def test_no_network_is_too_large(width: float, shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nets.build("small", shape, width=width)


def test_counting_draws_no_random_numbers() -> None:
    """A network must be what its factory makes after the same seed."""
    torch.manual_seed(3)
    built = nets.build("lenet", (1, 32, 32))
    torch.manual_seed(3)
    made = nets.registry.NETWORKS["lenet"].factory((1, 32, 32))
    for one, other in zip(built.parameters(), made.parameters(), strict=True):
        assert torch.equal(one, other)


def test_options_are_read_from_the_signature() -> None:
    assert list(nets.options("vgg16")) == ["width", "dropout", "norm", "start"]
    assert list(nets.options("resnet50")) == ["width", "dropout"]
    assert nets.options("lenet")["dropout"].default == 0.5
