"""Every pattern that well-known architectures are made of: grows, trains, forgets nothing, and each axis matters."""

from __future__ import annotations

import copy
import json
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.growing.helpers import train
from tests.proving.patterns import IMAGES, PATTERNS, ROWS, Swin, VisionTransformer
from zeroforget.axes.find import CannotGrow, find_axes
from zeroforget.axes.labels import Named, Product
from zeroforget.proving.grow import grow


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_grows_trains_and_forgets_nothing(pattern: str) -> None:
    cls, x, axes, coupled = PATTERNS[pattern]
    torch.manual_seed(0)
    plain = cls().requires_grad_(False).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = grow(plain, x)
    assert (len(net.axes.sizes), len(net.axes.coupled)) == (axes, coupled)
    assert net.axes.kept == (("tokens.2",) if pattern == "Mixer" else ())
    net.eval()
    net.add_task("0", 3)
    with torch.no_grad():
        assert torch.equal(net.dense(0).get_submodule("features")(x), plain(x))
    train(net, x)
    seen = [net(x, 0)]
    for task in (1, 2):
        net.add_task(str(task), 3, growth=dict.fromkeys(net.widths(), task))
        net.train()
        net(x, task).square().sum().backward()
        assert all(p.grad is not None for p in net.parameters())
        net.zero_grad()
        train(net, x)
        seen.append(net(x, task))
        for k, before in enumerate(seen):
            assert torch.equal(net(x, k), before)
            assert torch.equal(net.dense(k)(x), before)
    wide = net.double()
    wide.train()
    for module in wide.modules():
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.Dropout)):
            module.eval()
    y = x.double() if x.is_floating_point() else x
    live = wide.body.eval() and wide.newest_logits(y).detach()
    torch.testing.assert_close(live, wide.dense(2)(y), rtol=1e-9, atol=1e-9)
    net.drop_task()
    for k, before in enumerate(seen[:2]):
        torch.testing.assert_close(net.dense(k).float()(x), before)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_with_a_random_bridge_each_axis_changes_the_output(pattern: str) -> None:
    cls, x, _, _ = PATTERNS[pattern]
    torch.manual_seed(0)
    net = grow(cls(), x, bridge="random", keep=["tokens.2"] if pattern == "Mixer" else [])
    net.add_task("0", 2)
    with torch.no_grad():
        narrow = net.dense(0).get_submodule("features")(x)
        for axis in net.axes.sizes:
            wide = copy.deepcopy(net)
            wide.add_task("1", 2, growth={axis: 4})
            got = wide.dense(1).get_submodule("features")(x)
            assert got.shape != narrow.shape or not torch.allclose(got, narrow, rtol=1e-6, atol=1e-7), axis


def test_heads_grow_whole_and_the_module_remembers_them() -> None:
    net = grow(VisionTransformer(), IMAGES)
    heads = "blocks.0.attn.qkv"
    assert net.axes.sizes[heads] == 3
    assert net.axes.tensors[f"{heads}.weight"][0] == Product((3, Named(heads), 4))
    net.add_task("0", 2)
    net.add_task("1", 2, growth={heads: 2})
    for task, wanted in ((0, 3), (1, 5)):
        attention = net.dense(task).get_submodule("features.blocks.0.attn")
        assert (attention.num_heads, attention.head_dim, attention.attn_dim) == (wanted, 4, 4 * wanted)
    assert net.body.get_submodule("blocks.0.attn").num_heads == 5
    net.drop_task()
    assert net.body.get_submodule("blocks.0.attn").num_heads == 3


def test_the_residual_stream_can_be_kept() -> None:
    with pytest.warns(UserWarning, match="keep their width"):
        net = grow(VisionTransformer(), IMAGES, keep=["patch"])
    assert set(net.axes.sizes) == {"blocks.0.attn.qkv", "blocks.0.mlp.0", "blocks.1.attn.qkv", "blocks.1.mlp.0"}
    assert not net.axes.coupled


def test_heads_whose_width_comes_from_the_stream_are_tied_to_it() -> None:
    net = grow(Swin(), IMAGES)
    assert net.axes.tensors["first.proj.weight"][0] == Product((Named("patch"), 4))
    assert net.axes.tensors["first.table"] == (9, Named("patch"))
    assert net.axes.attributes["first", "heads"] == (Named("patch"),)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(5, 6), nn.Linear(2, 3)
        self.lstm = nn.LSTM(6, 4, proj_size=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(F.relu(self.before(x)).unsqueeze(1))
        return self.after(out[:, -1])


def test_what_cannot_be_followed_is_refused_with_all_that_must_be_kept() -> None:
    with pytest.raises(CannotGrow, match=r"'lstm' in module 'lstm'.*keep=\['before', 'lstm'\]"):
        grow(Projected(), ROWS)
    with pytest.warns(UserWarning, match=r"cannot follow the operator 'lstm'.*: before, lstm"):
        net = grow(Projected(), ROWS, unknown="keep")
    assert net.axes.sizes == {"after": 3}
    assert grow(Projected(), ROWS, keep=["before", "lstm"]).axes.sizes == {"after": 3}


class SliceOfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y[:, :3] = y[:, :3].relu()
        return self.last(y)


class NormedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.first(x)))


@pytest.mark.parametrize(
    ("network", "operator", "keep"),
    [(SliceOfItsOwn, "baked in", "first"), (NormedWeight, "'mv'", "first.parametrizations.weight")],
)
def test_the_remedy_that_is_named_helps(network: type[nn.Module], operator: str, keep: str) -> None:
    with pytest.raises(CannotGrow, match=rf"{operator}.*keep=\['{keep}'\]"):
        grow(network(), ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for net in (grow(network(), ROWS, keep=[keep]), grow(network(), ROWS, unknown="keep")):
            assert net.axes.sizes == {"last": 3}
            net.add_task("0", 2)
            train(net, ROWS)


class Terse(nn.Module):
    """Attention that calls the number of its heads whatever it likes; their width may come from the stream."""

    def __init__(self, name: str, width: str) -> None:
        super().__init__()
        setattr(self, name, 2)
        self.name, self.width = name, width
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        h = getattr(self, self.name)
        each = c // h if self.width == "stream" else -1
        q, k, v = (layer(x).view(b, n, h, each).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))


class Attending(nn.Module):
    """Two of them on one stream."""

    def __init__(self, name: str, width: str) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 4, stride=4)
        self.first, self.second = Terse(name, width), Terse(name, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.first(x)
        return (x + self.second(x)).mean(1)


@pytest.mark.parametrize(("width", "axes"), [("own", {"patch", "first.q", "second.q"}), ("stream", {"patch"})])
def test_a_number_of_heads_may_have_any_name(width: str, axes: set[str]) -> None:
    torch.manual_seed(0)
    plain = Attending("h", width).requires_grad_(False).eval()
    net = grow(plain, IMAGES).eval()
    assert set(net.axes.sizes) == axes
    net.add_task("0", 2)
    assert torch.equal(net.dense(0).get_submodule("features")(IMAGES), plain(IMAGES))
    train(net, IMAGES)
    before = net(IMAGES, 0)
    net.add_task("1", 2, growth=dict.fromkeys(axes, 2))
    train(net, IMAGES)
    assert torch.equal(net(IMAGES, 0), before)
    assert [net.dense(task).get_submodule("features.first").h for task in (0, 1)] == [2, 4]


@pytest.mark.parametrize(("width", "axes"), [("own", {"patch"}), ("stream", set())])
def test_where_no_number_of_heads_is_found_the_advice_helps_at_once(width: str, axes: set[str]) -> None:
    with pytest.raises(CannotGrow, match=r"'first.*number of heads baked in.*self\.heads = 4, with no") as told:
        grow(Attending("_h", width), IMAGES)
    advised = re.search(r"keep=(\[.*?\])", str(told.value))
    assert advised is not None
    with pytest.warns(UserWarning, match="keep their width"):
        net = grow(Attending("_h", width), IMAGES, keep=json.loads(advised[1].replace("'", '"')))
    assert set(net.axes.sizes) == axes
    with pytest.warns(UserWarning, match="baked in"):
        assert grow(Attending("_h", width), IMAGES, unknown="keep").axes.sizes == net.axes.sizes


def test_what_depends_on_the_numbers_is_watched_for_real() -> None:
    class Depends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.heads = nn.Linear(5, 12), nn.Linear(4, 3), 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            if float(y.detach().sum()) > 1e9:
                return y
            q, k, v = y.view(len(x), 3, self.heads, 2).unbind(1)
            return self.last((q * k * v).flatten(1))

    assert grow(Depends(), ROWS).axes.sizes == {"first": 2, "last": 3}


def test_a_cache_of_the_user_is_neither_used_nor_lost() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4)
            self.bias = nn.Parameter(torch.randn(4))
            self.cache: dict[str, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if "b" not in self.cache:
                self.cache["b"] = self.bias.tanh()
            return self.linear(x) * (self.bias.tanh() if self.training else self.cache["b"])

    plain = Cached().eval()
    with torch.no_grad():
        before = plain(ROWS)
    net = grow(plain, ROWS)
    assert list(plain.cache) == ["b"]
    net.add_task("0", 2)
    net.add_task("1", 2, growth={"linear": 3})
    assert net.dense(1).get_submodule("features")(ROWS).shape == (4, 7)
    assert torch.equal(net.dense(0).get_submodule("features")(ROWS), before)


def test_a_wider_network_that_computes_something_else_is_caught_in_numbers() -> None:
    class Divided(nn.Module):
        """No operator shows that the code divides by the width."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x / x.shape[1])

    with pytest.raises(CannotGrow, match=r"new features of 'first' change what old ones compute.*keep=\['first'\]"):
        grow(Divided(), ROWS)
    assert grow(Divided(), ROWS, keep=["first"]).axes.sizes == {"second": 3}


def test_a_buffer_with_values_of_its_own_keeps_its_features() -> None:
    class Shifted(nn.Module):
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
            self.register_buffer("shift", torch.arange(4.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.linear(x) + self.shift)

    with pytest.warns(UserWarning, match="keep their width.*: linear"):
        assert grow(Shifted(), ROWS).axes.sizes == {"last": 3}


def test_unknown_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match="'refuse' or 'keep', not 'guess'"):
        grow(VisionTransformer(), IMAGES, unknown="guess")


def test_watching_leaves_the_network_as_it_was() -> None:
    plain = VisionTransformer().train()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    find_axes(plain, IMAGES)
    assert plain.training
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    assert not any(p.is_inference() for p in plain.parameters())
