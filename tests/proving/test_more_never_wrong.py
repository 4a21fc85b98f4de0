"""More networks that would come out wrong or be refused for nothing: helpers, counters, thresholds, fixed nodes."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.growing.helpers import train
from tests.growing.test_ways import Made
from tests.proving.test_never_wrong import Branching, X, two
from zeroforget.axes.find import CannotGrow
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import grow

OUTSIDE = nn.Linear(8, 8)
TABLE = {"outside": OUTSIDE}
SEEN = {"count": 0.0}


class Holder:
    layer = OUTSIDE


def helps(h: Tensor) -> Tensor:
    out: Tensor = OUTSIDE(h)
    return out


class Shared(nn.Module):
    layer = OUTSIDE

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(type(self).layer(self.a(x)).relu())
        return out


def by_property() -> nn.Module:
    layer = nn.Linear(8, 8)

    class ByProperty(Shared):
        layer = None  # type: ignore[assignment]

        @property
        def gain(self) -> Tensor:
            return layer.weight.mean()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x).relu()) * self.gain
            return out

    return ByProperty()


def remembering() -> nn.Module:
    net = two()

    @functools.lru_cache
    def gain(_: int) -> Tensor:
        layer: nn.Linear = net.a
        return layer.weight.mean()

    net.gain = gain
    net.run = lambda s, x: s.b(s.a(x).relu()) * s.gain(1)
    return net


LEADING: dict[str, Callable[[], nn.Module]] = {
    "a class's own": Shared,
    "property": by_property,
    "function with a memory": remembering,
    "global table": lambda: two(lambda _, h: TABLE["outside"](h)),
    "global class": lambda: two(lambda _, h: Holder.layer(h)),
    "helper": lambda: two(lambda _, h: helps(h)),
}


@pytest.mark.parametrize("how", LEADING)
def test_what_leads_outside_by_a_detour_is_refused(how: str) -> None:
    with pytest.raises(CannotGrow, match=r"as it would in any copy"):
        grow(LEADING[how](), X)


class Remembers(nn.Module):
    """Its answers hang on what it met before; `how` says where it keeps that."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.how = nn.Linear(6, 8), nn.Linear(8, 5), how
        self.count, self.last, self.by_size = 0, deque[Tensor](maxlen=3), dict[int, Tensor]()
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        if self.training:
            self.count += 1
            self.last.append(h.detach().mean())
            SEEN["count"] += 0.1 * (self.how == "global")
        if self.mean is None:
            self.mean = h.detach().mean(0)
        start = self.by_size.setdefault(len(x), h.detach().mean())
        match self.how:
            case "number":
                h = h * (1 + self.count)
            case "queue":
                h = h * (1 + sum(self.last))
            case "first input":
                h = h - self.mean
            case "table":
                h = h - start
            case "global":
                h = h + SEEN["count"]
        out: Tensor = self.b(h)
        return out


@pytest.mark.parametrize("how", ["number", "queue", "first input", "table", "global"])
def test_what_training_leaves_anywhere_is_refused_where_answers_go_by_it(how: str) -> None:
    with pytest.raises(CannotGrow, match=r"keeps what it saw in training (in '|outside of itself).*register_buffer"):
        grow(Remembers(how), X)


def test_parameters_that_training_writes_into_are_refused() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.a.weight.data.clamp_(-0.1, 0.1)
            out: Tensor = self.b(self.a(x).relu())
            return out

    net = Clipped()
    before = net.a.weight.detach().clone()
    with pytest.raises(CannotGrow, match=r"writes into its own parameter 'a.weight' in training mode"):
        grow(net, X)
    assert torch.equal(net.a.weight, before)


def grown_twice(net: nn.Module, x: Tensor, **options: object) -> GrowingNetwork:
    """Two tasks, the second of which is wider and trained; the first one's answers are then what they were."""
    grown = grow(net, x, **options)  # type: ignore[arg-type]
    grown.add_task("0", 2)
    before = grown.eval()(x, "0")
    grown.add_task("1", 2, growth=dict.fromkeys(grown.axes.sizes, 2))
    train(grown, x)
    assert torch.equal(grown(x, "0"), before)
    return grown


def test_a_branch_that_other_numbers_take_grows_with_the_rest() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = grown_twice(Branching(by_data=True), X.abs())
    assert net(10 + X, 1).shape == (4, 2)
    assert net.dense(1).get_parameter("features.aux.weight").shape == (10, 10)


@pytest.mark.parametrize(
    "asks", [lambda n: n > 30, lambda n: n % 16 == 0, lambda n: n >= 12], ids=["> 30", "% 16", ">= 12"]
)
def test_code_that_asks_whether_a_width_is_large_is_noticed_and_only_that_is_kept(asks: Callable[[int], bool]) -> None:
    net = two(lambda _, h: h.tanh() if asks(h.shape[1]) else h)
    with pytest.raises(CannotGrow, match=r"\('tanh' runs only there\).*keep=\['a'\]"):
        grow(net, X)
    assert set(grow(net, X, keep=["a"]).axes.sizes) == {"b"}


@pytest.mark.parametrize("dense", [True, False])
def test_rows_that_are_the_nodes_of_a_fixed_graph_are_not_cut(dense: bool) -> None:
    def around(s: nn.Module, h: Tensor) -> Tensor:
        if dense:
            return s.get_buffer("graph") @ h
        to = s.get_buffer("edges")[1][:, None].expand(-1, h.shape[1])
        return torch.zeros_like(h).scatter_add(0, to, h[s.get_buffer("edges")[0]])

    net = two(around)
    net.register_buffer("graph", torch.rand(4, 4))
    net.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))
    assert set(grown_twice(net, X).axes.sizes) == {"a", "b"}


def put(h: Tensor) -> Tensor:
    return torch.zeros_like(h).index_put((torch.arange(len(h)),), h)


FOLLOWED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "tensordot": lambda _, h: h * torch.tensordot(h, h.relu(), dims=([1], [1])).sum(1, keepdim=True),
    "index_put": lambda _, h: put(h),
    "polar": lambda _, h: torch.polar(h.abs(), h).real,
    "ravel": lambda _, h: h.ravel().view(len(h), -1),
    "atleast_3d": lambda _, h: torch.atleast_3d(h).squeeze(-1),
    "mv": lambda _, h: h * torch.mv(h, h[0])[:, None],
}


@pytest.mark.parametrize("operator", FOLLOWED)
def test_more_operators_are_followed(operator: str) -> None:
    assert set(grown_twice(two(FOLLOWED[operator]), X).axes.sizes) == {"a", "b"}


def test_an_operator_with_odd_arguments_is_kept_not_refused() -> None:
    net = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 8), dim=None),  # type: ignore[arg-type]
        nn.ReLU(),
        nn.Linear(8, 5),
    )
    with pytest.raises(CannotGrow, match=r"'_weight_norm' in module '0.*keep=\["):
        grow(net, X)


def test_a_network_all_without_gradients_learns_by_its_heads() -> None:
    net = Made(lambda s, x: s.a(x).detach(), a=nn.Linear(6, 8))
    with pytest.warns(UserWarning, match="no gradient from the answer reaches 'a'"):
        grown = grow(net, X)
    grown.add_task("0", 2)
    train(grown, X)
    assert not grown.axes.sizes


def test_what_is_no_number_in_double_precision_is_proved_in_its_own() -> None:
    net = Made(
        lambda s, x: s.b(s.a(x) / (0.0 if x.dtype == torch.float64 else 1.0)), a=nn.Linear(6, 8), b=nn.Linear(8, 5)
    )
    assert set(grown_twice(net, X).axes.sizes) == {"a", "b"}


def test_a_sparse_buffer_has_a_fingerprint() -> None:
    net = two()
    net.register_buffer("graph", torch.eye(3).to_sparse())
    grown = grow(net, X)
    grown.add_task("0", 2)
    assert grown.fingerprint("0") == grown.fingerprint("0")
