"""Networks that would come out wrong: what copies share, code that asks for widths, state that training leaves."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.growing.helpers import train
from tests.growing.test_ways import Made
from zeroforget.axes.find import CannotGrow
from zeroforget.proving.grow import adopt, grow

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
WORDS = torch.arange(28).reshape(4, 7) % 11
OUTSIDE = nn.Linear(6, 8)
a = OUTSIDE  # which shares its name with a layer below, and no more


def two(between: Callable[[nn.Module, Tensor], Tensor] = lambda _, h: h) -> nn.Module:
    torch.manual_seed(0)
    return Made(lambda s, x: s.b(between(s, s.a(x).relu())), a=nn.Linear(6, 8), b=nn.Linear(8, 5))


def hooked(*, before: bool) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh())
    layer = net[2]
    if before:
        net[3].register_forward_pre_hook(lambda _, args: (args[0] + layer.bias,))
    else:
        net[3].register_forward_hook(lambda _m, _a, out: out * layer.weight.mean())
    return net


def with_default() -> nn.Module:
    net = two()
    net.run = lambda s, x, layer=net.a: s.b(s.a(x).relu()) * layer.weight.mean()
    return net


def closing_over(*, tensor: bool) -> nn.Module:
    net = two()
    held = [net.a.weight.detach()] if tensor else {"layers": (net.a,)}
    first = (lambda: held[0].mean()) if tensor else (lambda: held["layers"][0].weight.mean())
    net.run = lambda s, x: s.b(s.a(x).relu()) * first()
    return net


def referring() -> nn.Module:
    net = two()
    net.first = weakref.ref(net.a)
    net.run = lambda s, x: s.b(s.a(x).relu()) * s.first().weight.mean()
    return net


class ReadsOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b((self.a(x) + OUTSIDE(x)).relu())
        return out


def keeping(name: str, value: object) -> nn.Module:
    net = two()
    setattr(net, name, value)
    return net


SHARED = {
    "hook": (lambda: hooked(before=False), "module '3' has a hook that holds on to a module of the given network"),
    "hook before": (lambda: hooked(before=True), "module '3' has a hook that holds on to a module of the given"),
    "default argument": (with_default, "keeps 'run', a function that holds on to a module of the given network"),
    "closure over a tensor": (
        lambda: closing_over(tensor=True),
        "keeps 'run', .* a tensor that every copy would share",
    ),
    "closure over a list": (lambda: closing_over(tensor=False), "keeps 'run', .* a module of the given network"),
    "weak reference": (referring, "keeps 'first', a weak reference that holds on to a module of the given network"),
    "global": (ReadsOutside, r"\(ReadsOutside\) reads the Linear 'OUTSIDE' from outside"),
    "lock": (lambda: keeping("lock", threading.Lock()), "keeps 'lock', a lock, which cannot be copied"),
    "generator": (lambda: keeping("rows", (i for i in range(3))), "keeps 'rows', a generator, which cannot be copied"),
}


@pytest.mark.parametrize("how", SHARED)
def test_what_copies_would_share_is_refused(how: str) -> None:
    make, message = SHARED[how]
    with pytest.raises(CannotGrow, match=message):
        grow(make(), X)
    with pytest.raises(CannotGrow, match=message):
        adopt(make(), X)


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, pytest.raises(CannotGrow, match="keeps 'log', a TextIOWrapper"):
        grow(keeping("log", file), X)


def test_functions_that_hold_nothing_are_welcome() -> None:
    net = two(lambda _, h: F.gelu(h))
    net.scale, net.act = (lambda h: h * 2), F.relu
    net.run = lambda s, x: s.b(s.scale(s.act(s.a(x))))
    net.b.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
    assert grow(two(lambda _, h: F.gelu(h)), X).axes.sizes == {"a": 8, "b": 5}


class Skipping(nn.Module):
    """A skip wherever the shapes happen to agree."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(into, out) for into, out in pairs)
        self.last = nn.Linear(widths[-1], 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x).relu()
            x = h + x if h.shape == x.shape else h
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("widths", [(6, 5), (6, 4), (6, 12, 9), (6, 12, 31), (6, 20, 10, 5)])
def test_code_that_asks_for_a_width_is_noticed(widths: tuple[int, ...]) -> None:
    with pytest.raises(
        CannotGrow, match=r"computes other things in the network's own forward \('add' runs only there\)"
    ):
        grow(Skipping(*widths), X)
    with pytest.warns(UserWarning, match="keep their width"):
        net = grow(Skipping(*widths), X, unknown="keep")
    net.add_task("0", 2)
    net.eval()
    before = net.dense("0").get_submodule("features")(X)
    for axis, size in net.axes.sizes.items():
        net.add_task(axis, 2, growth={axis: 6 + size})
    after = net.dense(len(net.tasks) - 1).get_submodule("features")(X)
    torch.testing.assert_close(after[:, : before.shape[1]], before)


class Keeping(nn.Module):
    """Answers by what it saw in training, which it keeps in a plain attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.how = nn.Linear(6, 8), nn.Linear(8, 5), how
        self.kept: list[Tensor] | Tensor | None = [] if how == "list" else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        if self.training and isinstance(self.kept, list):
            self.kept.append(h.detach().mean())
        elif self.training:
            self.kept = h.detach().mean()
        if self.how != "unread" and self.kept is not None:
            h = h * (1 + (sum(self.kept) if isinstance(self.kept, list) else self.kept))
        out: Tensor = self.b(h)
        return out


def test_state_that_training_leaves_in_attributes_is_refused_where_answers_go_by_it() -> None:
    for how in ("list", "tensor"):
        with pytest.raises(CannotGrow, match=r"keeps what it saw in training in 'kept'.*register_buffer"):
            grow(Keeping(how), X)
    net = Keeping("unread")
    assert grow(net, X).axes.sizes == {"a": 8, "b": 5}
    assert net.kept is None


class WritesInEval(nn.Module):
    """Counts its calls and follows its features in buffers, in any mode."""

    def __init__(self, *, sort: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.sort = nn.Linear(6, 8), nn.Linear(8, 5), sort
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        self.calls += 1
        self.seen.append(len(x))
        self.mean = 0.9 * self.get_buffer("mean") + 0.1 * h.detach().mean(0)
        out: Tensor = self.b(h)
        return out.sort(1).values if self.sort else out


@pytest.mark.parametrize("take", [grow, adopt])
@pytest.mark.parametrize("sort", [False, True])
def test_the_given_network_is_left_as_it_was_even_if_it_is_refused(take: Callable[..., object], sort: bool) -> None:
    net = WritesInEval(sort=sort).train()
    net(X)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    warnings.simplefilter("ignore")  # of features that its average ties
    if sort:
        with pytest.raises(CannotGrow, match=r"sort|straight from one linear"):
            take(net, X)
    else:
        take(net, X)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.training
    assert net.seen == [4]


def test_an_embedding_that_shortens_its_rows_is_refused_untouched() -> None:
    embedding = nn.Embedding(11, 6, max_norm=0.5)
    net = Made(lambda s, x: s.b(s.e(x).mean(1)), e=embedding, b=nn.Linear(6, 4))
    before = embedding.weight.detach().clone()
    for take in (grow, adopt):
        with pytest.raises(CannotGrow, match=r"'e' has max_norm=0.5.*set its max_norm to None"):
            take(net, WORDS)
        with pytest.raises(CannotGrow, match=r"'e' has max_norm=0.5"):
            grow(net, WORDS, keep=["e"], unknown="keep")
    assert torch.equal(embedding.weight, before)


def test_a_network_that_writes_into_its_own_parameters_is_refused_untouched() -> None:
    def clamped(s: nn.Module, h: Tensor) -> Tensor:
        s.b.weight.data.clamp_(-0.1, 0.1)
        return h

    net = two(clamped)
    before = net.b.weight.detach().clone()
    for take in (grow, adopt):
        with pytest.raises(CannotGrow, match=r"writes into its own parameter 'b.weight'.*weight\.clone\(\)"):
            take(net, X)
    assert torch.equal(net.b.weight, before)


@pytest.mark.parametrize("pool", [F.max_pool1d, F.avg_pool1d])
@pytest.mark.parametrize("seed", range(3))
def test_pooling_over_features_keeps_them_whatever_the_seed(pool: Callable[..., Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    net = Made(
        lambda s, x: s.b(pool(s.a(x).relu()[:, None], 3, stride=1, padding=1)[:, 0]),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 4),
    )
    with pytest.warns(UserWarning, match="keep their width"):
        assert grow(net, X).axes.sizes == {"b": 4}


class PoolsByHand(nn.Module):
    """The largest of each feature and its neighbour, in operators that show nothing of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        out: Tensor = self.b(torch.maximum(h, h[:, [*range(1, h.shape[1]), 0]]))
        return out


@pytest.mark.parametrize("seed", range(3))
def test_what_one_draw_hides_another_shows(seed: int) -> None:
    torch.manual_seed(seed)
    with pytest.warns(UserWarning, match="keep their width"):
        assert grow(PoolsByHand(), X, unknown="keep").axes.sizes == {"b": 4}


class Branching(nn.Module):
    """A branch for training, or for large inputs."""

    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.aux, self.by_data = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 8), by_data

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        if float(x.mean()) > 3 if self.by_data else self.training:
            h = h + self.aux(h)
        out: Tensor = self.b(h)
        return out


def test_a_branch_for_training_grows_with_the_rest() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = grow(Branching(by_data=False), X)
    for task in range(3):
        net.add_task(str(task), 2, growth=dict.fromkeys(net.axes.sizes, 2 if task else 0.0) if task else None)
        train(net, X)
    assert net.dense(2).get_parameter("features.aux.weight").shape == (12, 12)


def test_an_empty_parameter_is_no_obstacle() -> None:
    net = two()
    net.token = nn.Parameter(torch.randn(0, 8))
    net.run = lambda s, x: s.b(torch.cat([s.token, s.a(x).relu()]))
    grown = grow(net, X)
    grown.add_task("0", 2)
    grown.add_task("1", 2, growth=dict.fromkeys(grown.axes.sizes, 2))
    train(grown, X)


def test_half_precision_is_refused_with_the_way_out() -> None:
    with pytest.raises(CannotGrow, match=r"'a.weight' is of torch.float16.*net\.float\(\).*autocast"):
        grow(two().half(), X.half())


def test_gradients_in_a_forward_are_refused_in_words() -> None:
    class Descending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                z = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.a(z).relu().sum(), z)
            out: Tensor = self.b(self.a(x - slope).relu())
            return out

    with pytest.raises(CannotGrow, match=r"asks for gradients in its own forward.*grow the part of it"):
        grow(Descending(), X)


def test_sparse_buffers_and_sparse_gradients() -> None:
    net = two(lambda s, h: torch.sparse.mm(s.graph, h))
    net.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(CannotGrow, match=r"'_sparse_mm'.*keep=\['a'\]"):
        grow(net, X[:2])
    bag = Made(lambda s, x: s.b(s.e(x)), e=nn.EmbeddingBag(11, 6, sparse=True), b=nn.Linear(6, 4))
    with pytest.raises(CannotGrow, match="'e' has sparse gradients"):
        grow(bag, WORDS)


def test_nothing_that_grows_is_not_silent() -> None:
    net = Made(lambda s, x: (-(x[:, None] - s.c).square().sum(-1)).exp(), c=nn.Parameter(torch.randn(7, 6)))
    with pytest.warns(UserWarning, match="keep their shape, .*: c"):
        grown = grow(net, X)
    grown.add_task("0", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grown.add_task("1", 2)
    with pytest.warns(UserWarning, match="nothing in this network can grow"):
        grown.add_task("2", 2, growth=0.25)
