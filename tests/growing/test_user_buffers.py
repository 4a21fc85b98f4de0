"""What a user's own modules bring along: parameters that are no layer's, buffers, constants, odd ways to be used."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.tensors import GrowingTensor
from zeroforget.proving.grow import adopt, grow

WORDS = torch.arange(42).reshape(6, 7)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(50, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.embed(x).mean(1)))
        return out


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)
        self.gain = nn.Parameter(torch.ones(1, 16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.gain * self.first(x))).mean((2, 3))
        return out


class Product(nn.Module):
    """A weight with its inputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(12, 8)
        self.weight = nn.Parameter(torch.randn(16, 12) / 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(torch.relu(self.first(x)) @ self.weight))
        return out


class Centered(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        if self.training:
            with torch.no_grad():
                mean.lerp_(x.mean(0), 0.1)
        return x - mean


class Table(nn.Module):
    """Makes its table anew where an input is longer than it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(50, 16), nn.Linear(16, 8)
        self.make(16)

    def make(self, length: int) -> None:
        self.register_buffer("table", torch.cos(torch.arange(length) / 3.0)[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.get_buffer("table")):
            self.make(x.shape[1])
        out: Tensor = self.last(torch.relu(self.embed(x) * self.get_buffer("table")[: x.shape[1]]).mean(1))
        return out


class Late(nn.Module):
    """A buffer that is there only once the network has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if self._buffers["mask"] is None:
            self._buffers["mask"] = torch.ones(1)
        out: Tensor = self.first(x) * self.get_buffer("mask")
        return out


def train(net: GrowingNetwork, x: Tensor, steps: int = 20) -> None:
    optimizer = torch.optim.SGD(net.newborn(), lr=0.1)
    net.train()
    y = torch.arange(len(x)) % 3
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x, len(net.history) - 1), y).backward()
        optimizer.step()
    net.eval()


@pytest.mark.parametrize("plain", [Words, Gain, Product])
def test_new_features_of_any_parameter_start_alive(plain: type[nn.Module]) -> None:
    torch.manual_seed(0)
    given, x = plain(), {Words: WORDS, Gain: torch.randn(6, 3, 8, 8), Product: torch.randn(6, 8)}[plain]
    net = grow(given, x, start=0.5)
    net.add_task("a", 3)
    train(net, x)
    was = net(x, "a")
    before = net.dense("a").get_submodule("features")(x)
    net.add_task("b", 3, 0.25)
    after = net.dense("b").get_submodule("features")(x)
    assert torch.allclose(after[:, : before.shape[1]], before, atol=1e-5)  # the bridge is zero
    (tensor,) = net.loose.values()
    assert isinstance(tensor, GrowingTensor)
    old = tensor.at(0).shape[1]  # in all three the second dimension writes features, or meets them
    fresh = tensor.at(1)[:, old:].clone()
    assert fresh.shape[1] > 0
    assert bool((fresh != 0).transpose(0, 1).flatten(1).any(1).all())
    train(net, x)
    assert bool((tensor.at(1)[:, old:] != fresh).any())
    assert torch.equal(net(x, "a"), was)


def test_a_narrow_start_scales_weights_alone() -> None:
    torch.manual_seed(0)
    net = grow(Gain(), torch.randn(6, 3, 8, 8), start=0.25)
    net.add_task("a", 3)
    assert torch.equal(net.dense("a").get_parameter("features.gain"), torch.ones(1, 4, 1, 1))
    words = grow(Words(), WORDS, start=0.25)
    given = words.loose["embed/weight"].get_buffer("value")[:, :4].clone()
    words.add_task("a", 3)
    assert torch.equal(words.dense("a").get_parameter("features.embed.weight"), given)


class Scaled(nn.BatchNorm1d):
    """A normalization with a parameter that only it has."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.gain = nn.Parameter(torch.full((features,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def test_what_only_a_subclass_of_a_normalization_has_starts_at_its_mean() -> None:
    x = torch.randn(8, 8)
    net = grow(nn.Sequential(nn.Linear(8, 16), Scaled(16), nn.ReLU(), nn.Linear(16, 8)), x, start=0.5)
    net.add_task("a", 3)
    net.add_task("b", 3, 0.25)
    assert torch.equal(net.dense("b").get_parameter("features.1.gain"), torch.full((12,), 2.0))


def test_an_average_over_all_batches_counts_those_of_its_task() -> None:
    x = torch.randn(8, 8)
    plain = nn.Sequential(nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 6))
    net = grow(plain, x, start=0.5)
    net.add_task("a", 3)
    train(net, x, 3)
    first = net.dense("a").get_submodule("features.0")
    net.add_task("b", 3, 0.25)
    net.train()(x + 2, "b")
    second = net.dense("b").get_submodule("features.0")
    torch.testing.assert_close(second.running_mean, (x + 2).mean(0))
    assert [int(norm.get_buffer("num_batches_tracked")) for norm in (first, second)] == [3, 1]


@pytest.mark.parametrize("mode", [True, False])
def test_what_is_born_is_in_the_mode_of_the_network(mode: bool) -> None:
    x = torch.randn(8, 8)
    plain = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)).train(not mode)
    net = grow(plain, x, start=0.5)
    net.train(mode)
    net.add_task("a", 3)
    net.add_task("b", 3, 0.25)
    assert all(module.training == mode for module in net.body.get_submodule("1").modules())


class Calmed(nn.BatchNorm1d):
    """A normalization that counts, in one number."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.get_buffer("seen")
        if self.training:
            seen += 1
        return super().forward(x) / (1 + seen)


def test_a_number_that_a_normalization_counts_stays_with_its_task() -> None:
    x = torch.randn(8, 8)
    net = grow(nn.Sequential(nn.Linear(8, 16), Calmed(16), nn.ReLU(), nn.Linear(16, 8)), x, start=0.5)
    net.add_task("a", 3)
    train(net, x, 3)
    was = net(x, "a")
    net.add_task("b", 3, 0.25)
    train(net, x, 2)
    assert torch.equal(net.dense("a")(x), was)
    assert [float(net.dense(k).get_buffer("features.1.seen")) for k in range(2)] == [3, 5]


def test_directions_and_lengths_grow() -> None:
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm
    x = torch.randn(6, 3, 6, 6)
    plain = nn.Sequential(normed(nn.Conv2d(3, 16, 3)), nn.ReLU(), nn.Flatten(), normed(nn.Linear(256, 8)))
    net = grow(plain, x, start=0.5)
    net.add_task("a", 3)
    train(net, x)
    was, before = net(x, "a"), net.dense("a").get_submodule("features")(x)
    net.add_task("b", 3, 0.25)
    assert torch.allclose(net.dense("b").get_submodule("features")(x)[:, :4], before, atol=1e-5)
    train(net, x)
    assert torch.equal(net(x, "a"), was)


def test_a_running_mean_keeps_what_it_learned() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 12) * 3 + 2
    net = grow(nn.Sequential(nn.Linear(12, 16), Centered(16), nn.ReLU(), nn.Linear(16, 8)), x, start=0.5)
    net.add_task("a", 3)
    train(net, x, 30)
    old = net.dense("a").get_buffer("features.1.mean").clone()
    assert len(set(old.tolist())) == 8
    net.add_task("b", 3, 0.25)
    assert torch.equal(net.dense("b").get_buffer("features.1.mean"), torch.cat([old, torch.zeros(4)]))
    train(net, x, 5)
    assert torch.equal(net.dense("a").get_buffer("features.1.mean"), old)
    net.drop_task()
    assert torch.equal(net.body.get_buffer("1.mean"), old)


def test_what_moves_is_all_that_learning_changes() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 12)
    plain = nn.Sequential(nn.Linear(12, 16), Centered(16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    net = grow(plain, x, start=0.5)
    for task, growth in (("a", None), ("b", 0.25)):
        net.add_task(task, 3, growth)
        before = {name: value.clone() for name, value in net.moving().items()}
        state = {name: value.clone() for name, value in net.state_dict().items()}
        train(net, x, 3)
        assert any(not torch.equal(value, state[name]) for name, value in net.state_dict().items())
        with torch.no_grad():
            for name, value in net.moving().items():
                value.copy_(before[name])
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
        train(net, x, 3)


def test_dense_networks_share_no_memory_with_the_growing_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 12)
    plain = nn.Sequential(nn.Linear(12, 16), Centered(16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    net = grow(plain, x, start=0.5)
    net.add_task("a", 3)
    net.add_task("b", 3, 0.25)
    dense = [net.dense(task) for task in net.tasks]
    places = [{t.untyped_storage().data_ptr() for t in (*m.parameters(), *m.buffers())} for m in (net, *dense)]
    assert len(set().union(*places)) == sum(map(len, places))
    before = dense[1](x)
    train(net, x, 3)
    assert torch.equal(dense[1](x), before)


def test_a_table_made_anew_stays_what_it_is() -> None:
    torch.manual_seed(0)
    net = grow(Table(), WORDS, start=0.5)
    net.add_task("a", 3)
    before = net.eval()(WORDS, "a")
    with torch.no_grad():
        net.train()(torch.zeros(6, 20, dtype=torch.int64), "a")
    assert torch.equal(net.eval()(WORDS, "a"), before)
    assert len(net.dense("a").get_buffer("features.table")) == 20


def test_a_buffer_that_comes_late() -> None:
    x = torch.randn(4, 8)
    net = grow(Late(), x, start=0.5)
    net.add_task("a", 3)
    train(net, x, 2)
    was = net(x, "a")
    net.add_task("b", 3, 0.25)
    train(net, x, 2)
    assert torch.equal(net(x, "a"), was)


def small() -> tuple[GrowingNetwork, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 1, 5, 5)
    plain = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    net = grow(plain, x, start=0.5)
    net.add_task("a", 3)
    net.add_task("b", 3, 0.25)
    return net, x


def test_torch_save_holds_a_whole_network() -> None:
    net, x = small()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).eval()(x, "a"), net.eval()(x, "a"))


def test_activations_may_be_computed_again() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.encode = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
            self.again = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            out: Tensor = checkpoint(self.encode, h, use_reentrant=False) if self.again else self.encode(h)
            return out.mean(1)

    torch.manual_seed(0)
    net = grow(Encoder(), WORDS)
    net.add_task("a", 3)
    net.train()
    grads = []
    for again in (False, True):
        net.body.again = again  # type: ignore[assignment]
        net.zero_grad()
        net(WORDS, "a").square().sum().backward()
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert len(grads[0]) == len(list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_inference_mode_leaves_nothing_behind() -> None:
    net, x = small()
    with torch.inference_mode():
        net.eval()(x, "a")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net.train()(x, "b")
        net(x, "b")
    picture = x.clone().requires_grad_()
    net.eval()(picture, "a").sum().backward()
    assert picture.grad is not None
    train(net, x, 2)


def test_what_was_given_as_a_constant_stays() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    plain = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    plain[0].requires_grad_(False)
    plain[1].requires_grad_(False)
    net = grow(plain, x, start=1.0, limit=2.0)
    net.add_task("a", 3)
    train(net, x)
    first = net.dense("a").get_submodule("features")
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(first.get_parameter(name), plain.get_parameter(name))
    assert not torch.equal(first.get_parameter("3.weight"), plain.get_parameter("3.weight"))
    net.add_task("b", 3, 0.25)
    born = net.dense("b").get_parameter("features.0.weight")[16:].clone()
    train(net, x)
    assert not torch.equal(net.dense("b").get_parameter("features.0.weight")[16:], born)
    net.drop_task()
    train(net, x)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(net.dense("a").get_parameter(f"features.{name}"), plain.get_parameter(name))


def test_the_given_network_keeps_its_modes() -> None:
    plain = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).train()
    plain[1].eval()
    modes = [module.training for module in plain.modules()]
    grow(plain[:3], torch.randn(4, 8))
    adopt(plain, torch.randn(4, 8), task="a", classes=["x", "y", "z"])
    assert [module.training for module in plain.modules()] == modes


def test_a_scale_that_reaches_zero() -> None:
    net, x = small()
    net.train()
    scale = net.get_parameter("body.0.norms.1.scale")
    with torch.no_grad():
        scale[0] = 0.0
        net.get_parameter("body.0.norms.1.shift")[0] = 1.0
    net(x, "b").square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
    net.zero_grad()
    net.train()(x, "b").square().sum().backward()  # from now on it is not folded in, so its gradient is known
    assert scale.grad is not None
    assert float(scale.grad[0]) != 0


def test_facts_about_fresh_values_keep_their_precision() -> None:
    net, _ = small()
    facts = [tensor.fresh.clone() for tensor in net.tensors()]
    net.half()
    assert all(torch.equal(tensor.fresh, fact) for tensor, fact in zip(net.tensors(), facts, strict=True))


def test_where_newborn_values_are_kept_does_not_depend_on_what_they_are_for() -> None:
    """Names and shapes are those in files that were saved before."""
    net = grow(Words(), WORDS, start=0.5)
    net.add_task("a", 3)
    assert net.get_parameter("loose.embed/weight.rows").shape == (50, 8)
    net.add_task("b", 3, 0.25)
    assert net.get_parameter("loose.embed/weight.cols").shape == (50, 4)


class Follows(nn.Module):
    """Keeps a running scale as a plain number, and counts its calls."""

    def __init__(self, start: float | None) -> None:
        super().__init__()
        self.scale, self.calls = start, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.scale = 0.5 * (self.scale or 0.0) + 0.5 * float(x.detach().std())
        return x / (self.scale or 1.0)


@pytest.mark.parametrize("start", [1.0, None])
def test_a_number_that_a_module_follows_without_a_buffer_is_told_with_the_way_out(start: float | None) -> None:
    torch.manual_seed(0)
    x = 10 * torch.randn(16, 8)
    net = grow(nn.Sequential(nn.Linear(8, 32), Follows(start), nn.ReLU(), nn.Linear(32, 16)), x)
    net.add_task("a", 3)
    assert net.eval()(x, "a").isfinite().all()  # nothing has changed yet, and calls are nobody's concern
    net.train()(x, "a")
    with pytest.warns(UserWarning, match=r"module '1' \(Follows\) has changed its number 'scale'.*register_buffer"):
        known = net.dense("a")(x)
    net.add_task("b", 3)
    assert torch.equal(net(x, "a"), known)


def test_a_dropout_may_follow_a_schedule() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    net = grow(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 16)), x)
    net.add_task("a", 3)
    net.body[2].p = 0.1
    net.train()(x, "a")
    assert net.eval()(x, "a").isfinite().all()  # a warning would be an error here
