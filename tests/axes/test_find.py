"""Finding feature axes by watching operators, pattern by pattern, and refusing what cannot be followed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.growing.helpers import train
from zeroforget.axes.find import CannotGrow, find_axes
from zeroforget.axes.labels import Concat, Named, Product
from zeroforget.nets import build
from zeroforget.proving.grow import grow


class Residual(nn.Module):
    """Two branches added: their outputs are one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.inner = nn.Conv2d(6, 4, 3, padding=1)
        self.outer = nn.Conv2d(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.norm(self.stem(x)))
        x = x + self.outer(F.relu(self.inner(x)))
        return x.mean((2, 3))


class Dense(nn.Module):
    """Concatenation: new features land inside the axis that the next layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(9)
        self.c = nn.Linear(9 * 4, 6)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        x = torch.cat([a, F.relu(self.b(a))], dim=1)
        return F.relu(self.c(F.adaptive_avg_pool2d(self.norm(x), 2).flatten(1)))


class Gate(nn.Module):
    """Squeeze and excitation, depthwise convolution, a learned scale of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv2d(3, 8, 1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.squeeze = nn.Conv2d(8, 3, 1)
        self.excite = nn.Conv2d(3, 8, 1)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.depth(F.relu(self.up(x))))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return (self.scale * x * gate).mean((2, 3))


class Halves(nn.Module):
    """One layer cut into a value and a gate: both halves grow together."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(5, 8)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(x).chunk(2, dim=1)
        return self.out(value * torch.sigmoid(gate))


class Twice(nn.Module):
    """One module used twice, and a weight tied between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.shared = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)
        self.other.weight = self.shared.weight
        self.alias = self.shared

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.other(F.relu(self.alias(F.relu(self.shared(x)))))


class Groups(nn.Module):
    """Group normalization and layer normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.GroupNorm(4, 12)
        self.grouped = nn.Conv2d(12, 8, 3, groups=4)
        self.linear = nn.Linear(8 * 16, 10)
        self.last = nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.grouped(F.relu(self.norm(self.conv(x)))))
        return self.last(self.linear(F.adaptive_avg_pool2d(x, 4).flatten(1)))


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
PATTERNS = {cls.__name__: (cls, x) for cls, x in [
    (Residual, IMAGES), (Dense, IMAGES), (Gate, IMAGES), (Halves, ROWS), (Twice, ROWS), (Groups, IMAGES)
]}  # fmt: skip


def test_residual_sums_tie_axes() -> None:
    axes = find_axes(Residual(), IMAGES)
    assert dict(axes.sizes) == {"stem": 6, "inner": 4}
    assert axes.tensors["outer.weight"] == (Named("stem"), Named("inner"), 1, 1)
    assert axes.tensors["norm.running_var"] == (Named("stem"),)
    assert axes.output == Named("stem")
    assert axes.normalized == {"stem"}


def test_concatenation_and_flattening_are_sums_and_products() -> None:
    axes = find_axes(Dense(), IMAGES)
    both = Concat((Named("a"), Named("b")))
    assert axes.tensors["norm.weight"] == (both,)
    assert axes.tensors["c.weight"] == (Named("c"), Product((both, 4)))


def test_halves_of_a_cut_grow_together() -> None:
    axes = find_axes(Halves(), ROWS)
    assert axes.tensors["both.weight"] == (Concat((Named("both"), Named("both"))), 5)
    assert axes.sizes["both"] == 4


def test_groups_are_born_whole() -> None:
    axes = find_axes(Groups(), IMAGES)
    assert axes.tensors["norm.weight"] == (Product((Named("conv"), 3)),)
    assert axes.attributes["grouped", "groups"] == (Named("conv"),)
    assert axes.attributes["norm", "num_groups"] == (Named("conv"),)
    assert axes.coupled == {"linear"}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_grows_trains_and_forgets_nothing(pattern: str) -> None:
    cls, x = PATTERNS[pattern]
    torch.manual_seed(0)
    plain = cls()
    net = grow(plain, x)
    net.eval()
    net.add_task("0", 3)
    assert torch.equal(net.dense(0).get_submodule("features")(x), plain.eval()(x))
    train(net, x)
    seen = [net(x, 0)]
    for task in range(1, 4):
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
    # The learning network and the dense one compute the same function.
    wide = net.double()
    wide.train()
    for module in wide.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    live = wide(x.double(), 3).detach()
    torch.testing.assert_close(live, wide.dense(3)(x.double()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("lenet", (1, 16, 16), 4),
        ("alexnet", (3, 63, 63), 7),
        ("vgg16-tiny", (3, 16, 16), 12),
        ("resnet18", (3, 8, 8), 12),
    ],
)
def test_our_networks_have_the_axes_they_should(name: str, shape: tuple[int, int, int], axes: int) -> None:
    found = find_axes(build(name, shape, width=0.1), torch.randn(2, *shape))
    assert len(found.sizes) == axes
    assert not found.kept


class Sorts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 6)
        self.after = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(x).cumsum(1))


class Baked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 8)
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).view(-1, 4))


def test_an_operator_without_a_rule_is_named_with_the_remedy() -> None:
    with pytest.raises(CannotGrow, match=r"'cumsum'.*keep=\['before'\]"):
        grow(Sorts(), ROWS)
    net = grow(Sorts(), ROWS, keep=["before"])
    assert net.axes.sizes == {"after": 4}
    net.add_task("0", 2)
    net.add_task("1", 2, growth={"after": 2})
    assert net.widths() == {"after": 6}


def test_a_size_baked_into_code_is_found_by_the_trial_growth() -> None:
    with pytest.raises(CannotGrow, match=r"baked in.*keep=\['conv'\]"):
        grow(Baked(), IMAGES)
    assert grow(Baked(), IMAGES, keep=["conv"]).axes.sizes == {"linear": 5}


def test_a_layer_tied_to_the_input_keeps_its_width_with_a_notice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Linear(5, 5)
            self.free = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.free(x + self.same(x))

    with pytest.warns(UserWarning, match="keep their width.*same"):
        net = grow(Tied(), ROWS)
    assert net.axes.sizes == {"free": 4}


def test_an_empty_slice_behind_a_width_that_is_written_down_keeps_it() -> None:
    class Parted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            out: Tensor = self.second(torch.cat([h[:, :8], 2 * h[:, 8:]], 1))
            return out

    with pytest.warns(UserWarning, match="keep their width"):
        net = grow(Parted(), torch.randn(2, 6))
    assert dict(net.axes.sizes) == {"second": 5}


def test_networks_that_are_no_feature_extractors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must return \(batch, features\)"):
        grow(nn.Conv2d(3, 4, 3), IMAGES)

    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return x, super().forward(x)

    with pytest.raises(ValueError, match="one tensor"):
        grow(Pair(ROWS.shape[1], 4), ROWS)


def test_keep_checks_its_names() -> None:
    with pytest.raises(ValueError, match="did you mean 'before'"):
        find_axes(Sorts(), ROWS, keep=["befor"])
    with pytest.raises(ValueError, match="takes a list"):
        find_axes(Sorts(), ROWS, keep="before")


def test_a_user_buffer_that_training_moves_stays_with_its_task() -> None:
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4)
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return self.linear(x - self.mean)

    torch.manual_seed(0)
    net = grow(Average(), ROWS)
    net.add_task("0", 2)
    train(net, ROWS)
    seen = net(ROWS, 0)
    net.add_task("1", 2, growth={"linear": 1})
    train(net, ROWS + 3)
    assert torch.equal(net(ROWS, 0), seen)
    assert torch.equal(net.dense(0)(ROWS), seen)


def test_a_layer_overwritten_in_place_still_learns_its_normalization() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.next = nn.Conv2d(4, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.next(F.leaky_relu_(self.conv(x), 0.3))).mean((2, 3))

    torch.manual_seed(0)
    net = grow(InPlace(), IMAGES)
    assert net.axes.overwritten == {"conv"}
    net.add_task("0", 2)
    train(net, IMAGES)
    net.add_task("1", 2, growth={"conv": 1, "next": 2})
    train(net, IMAGES)
    net.double().train()
    assert torch.autograd.gradcheck(
        lambda *_: net(IMAGES.double(), 1), tuple(net.parameters()), fast_mode=True, nondet_tol=1e-12
    )


def test_a_rectifier_in_place_in_the_networks_own_forward_overwrites_its_layer() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.next = nn.Conv2d(4, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.next(F.relu(self.conv(x), inplace=True)), inplace=True).mean((2, 3))

    net = grow(InPlace(), IMAGES)
    assert net.axes.overwritten == {"conv", "next"}
    net.add_task("0", 2)
    net.add_task("1", 2, growth={"conv": 1})
    train(net, IMAGES)


def test_one_feature_at_one_position_grows_through_flatten() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 1, 2, 2, 1), nn.ReLU(), nn.Conv2d(1, 1, 3), nn.Flatten())
    net = grow(plain, torch.randn(2, 2, 4, 4))
    net.add_task("a", 2)
    net.add_task("b", 2, growth={"0": 1, "2": 2})
    assert net.widths() == {"0": 2, "2": 3}
