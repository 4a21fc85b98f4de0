"""Networks written in other ways than most: they grow, their dense forms compute what was learned, nothing is lost."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests.growing.helpers import train
from zeroforget.proving.grow import grow

ROWS = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
WORDS = torch.arange(28).reshape(4, 7) % 11
PADDED = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0], [5, 3, 5, 8, 0], [9, 7, 9, 3, 2]])
Forward = Callable[[nn.Module, Tensor], Tensor]


class Made(nn.Module):
    """Named parts and the function that runs them."""

    def __init__(self, run: Forward, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def two(run: Forward) -> nn.Module:
    return Made(run, a=nn.Linear(5, 6), b=nn.Linear(6, 4))


def maps(run: Forward) -> nn.Module:
    c, d, e = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 4, 1)
    return Made(run, c=c, d=d, e=e)


def gain(n: int) -> nn.Parameter:
    return nn.Parameter(torch.rand(n) + 0.5)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2)


class Listed(nn.Module):
    """Layers kept in a plain list and dictionary beside their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[nn.Module] = []
        for i, step in enumerate((nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 4))):
            self.add_module(f"step{i}", step)
            self.steps.append(step)
        self.ends = {"last": (self.steps.pop(),)}

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        out: Tensor = self.ends["last"][0](x.relu())
        return out


class Activated(nn.BatchNorm2d):
    """A normalization with an activation inside that learns."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.act = nn.PReLU(features)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(super().forward(x))
        return out


class Kept(nn.Module):
    """It keeps what it computed last, to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.last: Tensor | None = None
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.gate(x).sigmoid()
        self.all.append(self.last)
        return x * self.last


class Sequences(nn.Module):
    """The whole transformer of torch, which compares the width of what it reads with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(11, 8), nn.Linear(8, 4)
        self.both = nn.Transformer(8, 2, 1, 1, 10, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        words = self.embed(x)
        out: Tensor = self.last(self.both(words, words).mean(1))
        return out


class Padded(nn.Module):
    """Attention that does not look at padding: torch makes a mask for each head of it."""

    def __init__(self, *, weights: bool, causal: bool) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(11, 8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.weights, self.causal = weights, causal

    def forward(self, x: Tensor) -> Tensor:
        words, n = self.embed(x), x.shape[1]
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        read, _ = self.attention(
            words, words, words, key_padding_mask=x == 0, attn_mask=later, need_weights=self.weights
        )
        out: Tensor = self.last(read.mean(1))
        return out


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def doubled() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 4))
    parametrize.register_parametrization(net[0], "weight", Twice())
    return net


class LowRank(nn.Module):
    """Something of low rank is added to a weight."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.up, self.down = matrix(out, 2), matrix(2, into)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def lowranks() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    for layer in (net[0], net[2]):
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    return net


def rebound() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    net[0].forward = types.MethodType(lambda self, x: 2 * F.linear(x, self.weight, self.bias), net[0])
    return net


def compiled() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    net.compile(backend="eager")
    return net


WAYS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, int]]] = {
    # Other code reads what a layer would fold its normalization into.
    "weight read": (lambda: two(lambda s, x: s.b(s.a(x).relu()) * s.a.weight.abs().mean()), ROWS, {"a": 6, "b": 4}),
    "length of rows": (lambda: two(lambda s, x: s.b(s.a(x) / s.a.weight.norm(dim=1))), ROWS, {"a": 6, "b": 4}),
    "bias read": (lambda: two(lambda s, x: s.b(s.a(x).relu() + s.a.bias)), ROWS, {"a": 6, "b": 4}),
    "kind of a weight": (lambda: two(lambda s, x: s.b(s.a(x.type_as(s.a.weight)).relu())), ROWS, {"a": 6, "b": 4}),
    # Weights that are computed before they are used.
    "transposed": (
        lambda: Made(lambda s, x: (x @ s.v.t()).relu() @ s.w.t(), v=matrix(6, 5), w=matrix(4, 6)),
        ROWS,
        {"features": 6, "features#2": 4},
    ),
    "on the left": (
        lambda: Made(lambda s, x: (s.w @ (s.v @ x.T + s.c).relu()).T, v=matrix(6, 5), w=matrix(4, 6), c=matrix(6, 1)),
        ROWS,
        {"features": 6, "features#2": 4},
    ),
    "on the left, computed": (
        lambda: Made(lambda s, x: ((2 * s.w) @ (s.v.T @ x.T).relu()).T, v=matrix(5, 6), w=matrix(4, 6)),
        ROWS,
        {"features": 6, "features#2": 4},
    ),
    "on the left of pixels": (
        lambda: Made(lambda s, x: s.b((s.v @ x.flatten(2)).relu().mean(2)), v=matrix(6, 3), b=nn.Linear(6, 4)),
        IMAGES,
        {"features": 6, "b": 4},
    ),
    "a linear layer's input": (
        lambda: Made(lambda s, x: s.b(F.linear(s.v, x).T.relu()), v=matrix(6, 5), b=nn.Linear(6, 4)),
        ROWS,
        {"features": 6, "b": 4},
    ),
    "scaled": (
        lambda: Made(lambda s, x: (x @ (2 * s.v)).relu() @ s.w.tanh(), v=matrix(5, 6), w=matrix(6, 4)),
        ROWS,
        {"features": 6, "features#2": 4},
    ),
    "parametrized": (doubled, ROWS, {"0": 6, "2": 4}),
    "another forward": (rebound, ROWS, {"0": 6, "2": 4}),
    "experts": (
        lambda: Made(
            lambda s, x: s.b((x.expand(3, -1, -1) @ s.v).relu().bmm(s.w).sum(0)),
            v=matrix(3, 5, 6),
            w=matrix(3, 6, 7),
            b=nn.Linear(7, 4),
        ),
        ROWS,
        {"features": 6, "features#2": 7, "b": 4},
    ),
    "two weights make one": (
        lambda: Made(lambda s, x: (x @ (s.u @ s.v)).relu() @ s.w, u=matrix(5, 3), v=matrix(3, 6), w=matrix(6, 4)),
        ROWS,
        {"features": 6, "features#2": 4},
    ),
    "low ranks": (lowranks, ROWS, {"0": 6, "2": 4}),
    "a length for each input": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), weight_norm(nn.ConvTranspose2d(6, 4, 2)), nn.MaxPool2d(7), nn.Flatten()
        ),
        IMAGES,
        {"0": 6, "2": 4},
    ),
    "of length one": (
        lambda: Made(lambda s, x: F.linear(F.normalize(s.a(x)), F.normalize(s.w)), a=nn.Linear(5, 6), w=matrix(4, 6)),
        ROWS,
        {"a": 6, "features": 4},
    ),
    # Names.
    "keys and values": (
        lambda: Made(lambda s, x: F.linear(x, s.keys).relu() @ s.values, keys=matrix(6, 5), values=matrix(6, 4)),
        ROWS,
        {"features": 6, "features#2": 4},
    ),
    "slashes": (
        lambda: Made(
            lambda s, x: s.b(s.p["g/h"] * s.m["r/s"](s.a(x))),
            a=nn.Linear(5, 6),
            p=nn.ParameterDict({"g/h": gain(6)}),
            m=nn.ModuleDict({"r/s": nn.PReLU(6)}),
            b=nn.Linear(6, 4),
        ),
        ROWS,
        {"a": 6, "b": 4},
    ),
    "lists": (Listed, ROWS, {"step0": 6, "step2": 4}),
    # What modules remember.
    "last activations": (
        lambda: Made(lambda s, x: s.b(s.k(s.a(x))), a=nn.Linear(5, 6), k=Kept(), b=nn.Linear(6, 4)),
        ROWS,
        {"a": 6, "b": 4},
    ),
    "unflattened": (
        lambda: nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Unflatten(1, (6, 4)), nn.Conv1d(6, 3, 4), nn.Flatten()),
        ROWS,
        {"0": 6, "3": 3},
    ),
    "transformer": (
        Sequences,
        WORDS,
        {"embed": 2, "both.encoder.layers.0.linear1": 10, "both.decoder.layers.0.linear1": 10, "last": 4},
    ),
    "padded": (lambda: Padded(weights=False, causal=False), PADDED, {"embed": 2, "last": 4}),
    "padded, with weights": (lambda: Padded(weights=True, causal=False), PADDED, {"embed": 2, "last": 4}),
    "padded and causal": (lambda: Padded(weights=False, causal=True), PADDED, {"embed": 2, "last": 4}),
    # One example at a time.
    "vectors": (
        lambda: two(lambda s, x: torch.stack([s.b(s.a(row).relu()) for row in x])),
        ROWS,
        {"a": 6, "b": 4},
    ),
    "a gate from a vector": (
        lambda: Made(
            lambda s, x: s.b(s.a(x).relu() * s.gate(s.code)),
            a=nn.Linear(5, 6),
            code=matrix(3),
            gate=nn.Linear(3, 6),
            b=nn.Linear(6, 4),
        ),
        ROWS,
        {"a": 6, "b": 4},
    ),
    "single images": (
        lambda: maps(lambda s, x: torch.stack([s.e(s.d(s.c(image).relu())).mean((1, 2)) for image in x])),
        IMAGES,
        {"c": 6, "e": 4},
    ),
    # A layer's numbers.
    "groups": (
        lambda: maps(
            lambda s, x: s.e(F.conv2d(s.c(x), s.d.weight, s.d.bias, padding=1, groups=s.d.groups)).mean((2, 3))
        ),
        IMAGES,
        {"c": 6, "e": 4},
    ),
    "channels": (
        lambda: maps(lambda s, x: s.e(s.d(s.c(x).view(len(x), s.d.in_channels, 8, 8))).mean((2, 3))),
        IMAGES,
        {"c": 6, "e": 4},
    ),
    "shuffled": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.ChannelShuffle(2), nn.Conv2d(6, 4, 6), nn.Flatten()),
        IMAGES,
        {"0": 3, "2": 4},
    ),
    "compiled": (compiled, ROWS, {"0": 6, "2": 4}),
    # Normalizations.
    "instances": (
        lambda: Made(
            lambda s, x: s.d(s.n(s.c(x)).relu()).mean((2, 3)),
            c=nn.Conv2d(3, 6, 3),
            n=nn.InstanceNorm2d(6),
            d=nn.Conv2d(6, 4, 3),
        ),
        IMAGES,
        {"c": 6, "d": 4},
    ),
    "activated": (
        lambda: Made(
            lambda s, x: s.d(s.n(s.c(x))).mean((2, 3)), c=nn.Conv2d(3, 6, 3), n=Activated(6), d=nn.Conv2d(6, 4, 3)
        ),
        IMAGES,
        {"c": 6, "d": 4},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_grows_and_its_dense_form_is_what_was_learned(way: str) -> None:
    make, x, sizes = WAYS[way]
    torch.manual_seed(0)
    net = grow(make(), x)
    assert list(net.axes.sizes.items()) == list(sizes.items())
    before: list[Tensor] = []
    for task, growth in enumerate((None, 0.5, 0.0, 0.5)):
        net.add_task(str(task), 3, growth)
        train(net, x)
        before.append(net(x, task))
        torch.testing.assert_close(net.newest_logits(x).detach(), before[-1], rtol=1e-4, atol=1e-5)
        for k, answers in enumerate(before):
            assert torch.equal(net(x, k), answers)
            assert torch.equal(net.dense(k)(x), answers)
    other = copy.deepcopy(net)
    assert all(torch.equal(other(x, k), answers) for k, answers in enumerate(before))
    net.drop_task()
    torch.testing.assert_close(net.newest_logits(x).detach(), before[-2], rtol=1e-4, atol=1e-5)


def test_what_a_module_keeps_is_left_as_it_was() -> None:
    plain = WAYS["last activations"][0]()
    grow(plain, ROWS)
    assert plain.k.last is None
    assert plain.k.all == []


def test_an_instance_norm_knows_its_features() -> None:
    net = grow(WAYS["instances"][0](), IMAGES)
    net.add_task("0", 2)
    net.add_task("1", 2, growth={"c": 2})
    assert net.dense(1).get_submodule("features.n").num_features == 8


def test_a_group_norm_that_never_runs_is_no_obstacle() -> None:
    plain = Made(lambda s, x: s.c(x).mean((2, 3)), c=nn.Conv2d(3, 4, 3), unused=nn.GroupNorm(2, 4))
    with pytest.warns(UserWarning, match="'unused' took no part"):
        assert grow(plain, IMAGES).axes.sizes == {"c": 4}


def test_normalizations_that_share_their_parameters_learn_as_one() -> None:
    norms = nn.ModuleList([nn.LayerNorm(6), nn.LayerNorm(6)])
    norms[1].weight = norms[0].weight
    plain = Made(
        lambda s, x: s.b(s.norms[1](s.m(s.norms[0](s.a(x))).relu())),
        a=nn.Linear(5, 6),
        norms=norms,
        m=nn.Linear(6, 6),
        b=nn.Linear(6, 4),
    )
    net = grow(plain, ROWS)
    for task in range(3):
        net.add_task(str(task), 2, growth=0.5 if task else None)
        train(net, ROWS)
    net.drop_task()
    train(net, ROWS)
    for task in range(2):
        one, other = (net.dense(task).get_submodule(f"features.norms.{i}") for i in range(2))
        assert torch.equal(one.weight, other.weight)
        assert not torch.equal(one.bias, other.bias)


def test_a_buffer_of_two_modules_stays_one() -> None:
    class Mean(nn.Module):
        mean: Tensor

        def __init__(self, mean: Tensor) -> None:
            super().__init__()
            self.register_buffer("mean", mean)

    def run(s: nn.Module, x: Tensor) -> Tensor:
        y = s.a(x)
        if s.training:
            with torch.no_grad():
                s.m.mean.lerp_(y.mean(0), 0.5)
        return s.b(y - s.n.mean)

    mean = torch.zeros(6)
    net = grow(Made(run, a=nn.Linear(5, 6), m=Mean(mean), n=Mean(mean), b=nn.Linear(6, 4)), ROWS)
    for task in range(3):
        net.add_task(str(task), 2, growth=0.5 if task else None)
        train(net, ROWS)
        assert net.body.m.mean is net.body.n.mean
        assert net.body.m.mean.any()
    net.drop_task()
    assert net.body.m.mean is net.body.n.mean


def test_new_features_of_the_word_that_pads_are_zero() -> None:
    plain = Made(lambda s, x: s.b(s.e(x).sum(1)), e=nn.Embedding(11, 6, padding_idx=2), b=nn.Linear(6, 4))
    net = grow(plain, WORDS)
    net.add_task("0", 2)
    net.add_task("1", 2, growth={"e": 3})
    train(net, WORDS)
    weight = net.dense(1).get_submodule("features.e").weight
    assert weight.shape == (11, 9)
    assert not weight[2].any()
    assert weight[3].all()


@pytest.mark.parametrize("kind", ["product", "transposed"])
def test_fixed_features_read_new_inputs_of_zero(kind: str) -> None:
    inner = nn.Module()
    inner.w = matrix(6, 4)
    parts: dict[str, tuple[Forward, Tensor, dict[str, nn.Module]]] = {
        "product": (
            lambda s, x: s.b((s.a(x).relu() @ s.k.w).relu()),
            ROWS,
            {"a": nn.Linear(5, 6), "k": inner, "b": nn.Linear(4, 3)},
        ),
        "transposed": (
            lambda s, x: s.b(s.k(s.a(x).relu()).relu()).mean((2, 3)),
            IMAGES,
            {"a": nn.Conv2d(3, 6, 3), "k": nn.ConvTranspose2d(6, 4, 2), "b": nn.Conv2d(4, 3, 1)},
        ),
    }
    run, x, modules = parts[kind]
    net = grow(Made(run, **modules), x, keep=["k"], start=0.5)
    net.add_task("0", 2)
    given, taken = modules["k"], net.dense(0).get_submodule("features.k")
    name = "w" if kind == "product" else "weight"
    torch.testing.assert_close(getattr(taken, name), getattr(given, name)[:3] * 2**0.5)
    narrow = net.dense(0).get_submodule("features")(x)
    net.add_task("1", 2, growth={"a": 2})
    torch.testing.assert_close(net.dense(1).get_submodule("features")(x), narrow)
