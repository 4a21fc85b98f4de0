"""Rank births: exact for every older task, folded to the same bits everywhere, learned without the old block."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.growing.helpers import growing, train
from tests.proving.patterns import VisionTransformer
from zeroforget.growing.layers import GrowingLayer
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.rank_births import RankBirth, input_samples, leading, orthonormal
from zeroforget.proving.grow import grow


def depthwise() -> nn.Sequential:
    """Separable convolutions, one with a few groups."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=2, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 12, 1), nn.ReLU(), nn.Conv2d(12, 12, 3, groups=4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 10)),
    )


class Attending(nn.Module):
    """PyTorch's own attention: its projections are parameters of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(len(x), -1, 6))
        return self.mlp(x + self.attention(x, x, x, need_weights=False)[0]).mean(1)


def network(kind: str) -> tuple[GrowingNetwork, Tensor]:
    if kind in {"vgg16-tiny", "resnet18"}:
        return growing(kind)
    torch.manual_seed(0)
    if kind == "depthwise":
        x = torch.randn(6, 3, 7, 7)
        return grow(depthwise(), x, start=0.5), x
    if kind == "attention":
        x = torch.randn(6, 24)
        return grow(Attending(), x, start=0.5), x
    x = torch.randn(6, 3, 8, 8)
    return grow(VisionTransformer(), x, start=0.5), x


KINDS = ["vgg16-tiny", "resnet18", "transformer", "depthwise", "attention"]


@pytest.mark.parametrize(("kind", "optimizer"), [*zip(KINDS, ["adamw", "sgd"] * 3, strict=False)])
def test_every_task_keeps_its_bits_through_five_more(kind: str, optimizer: str) -> None:
    net, x = network(kind)
    net.add_task("0", 3)
    train(net, x, kind=optimizer)
    seen, prints = [net(x, 0)], [net.fingerprint(0)]
    for task, (growth, rank) in enumerate([(0.1, 4), (0.0, 3), (0.2, 0), (0.0, 0.4), (0.1, 2)], 1):
        net.add_task(str(task), 3, growth, rank, images=x if task % 2 else None, quiet=True)
        assert torch.equal(net(x, task - 1), seen[-1])
        train(net, x, kind=optimizer)
        seen.append(net(x, task))
        prints.append(net.fingerprint(task))
        for k, before in enumerate(seen):
            assert torch.equal(net(x, k), before), f"task {k} changed while {task} was learned"
    for k, before in enumerate(seen):
        assert torch.equal(net.dense(k)(x), before)
        assert net.fingerprint(k) == prints[k]
    assert any(net.ranks(task) for task in range(1, 6))

    again, _ = network(kind)
    for record in net.history:
        again.add_task(record.name, record.classes, record.growth, record.rank, quiet=True)
    again.load_state_dict(net.state_dict())
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = [again.eval(), copy.deepcopy(net), torch.load(file, weights_only=False)]
    for other in copies:
        for k, before in enumerate(seen):
            assert torch.equal(other(x, k), before), f"task {k} changed by a copy"
            assert other.fingerprint(k) == prints[k]
    net.drop_task()
    for k, before in enumerate(seen[:-1]):
        assert torch.equal(net(x, k), before), f"task {k} changed when the task after it was dropped"
    train(net, x, kind=optimizer)  # the one before is open again, with its rank birth
    for k, before in enumerate(seen[:-2]):
        assert torch.equal(net(x, k), before)
    assert not torch.equal(net(x, 4), seen[4])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_birth_alone_learns_and_makes_a_difference(kind: str) -> None:
    """The negative control: switched off, the task's own answers change, and those of older tasks do not."""
    net, x = network(kind)
    net.add_task("0", 3)
    train(net, x)
    before = net(x, 0)
    net.add_task("1", 3, rank=4)
    train(net, x)
    own = net(x, 1)
    for weight in net.leaning().values():
        birth = weight.newest_rank()
        assert birth is not None
        with torch.no_grad():
            birth.up.zero_()
    assert not torch.equal(net(x, 1), own)
    assert torch.equal(net(x, 0), before)


def test_a_new_task_starts_with_the_function_it_was_given() -> None:
    net, x = network("resnet18")
    net.add_task("0", 3)
    train(net, x)
    before = net.dense(0).get_submodule("features")(x)
    net.add_task("1", 3, rank=8, images=x)
    assert torch.equal(net.dense(1).get_submodule("features")(x), before)


def test_rank_zero_is_the_network_without_rank_births() -> None:
    seen = []
    for rank in (None, 0, 0.0, {}):
        net, x = growing("lenet")
        net.add_task("0", 3)
        train(net, x)
        torch.manual_seed(1)
        net.add_task("1", 3, 0.1, rank)
        train(net, x)
        seen.append(net.fingerprint(1))
    assert len(set(seen)) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 30), st.integers(0, 2**16), st.floats(-30, 10))
def test_the_fold_is_exact_in_whatever_order_it_is_summed(
    outputs: int, inputs: int, rank: int, seed: int, size: float
) -> None:
    draws = torch.Generator().manual_seed(seed)
    up = torch.randn(outputs, rank, generator=draws) * 10**size
    birth = RankBirth(up, torch.randn(rank, inputs, generator=draws))
    birth.close()
    found: list[Tensor] = []
    birth.step(lambda first, rows: found.append(rows))
    step = torch.cat(found)
    order = torch.randperm(rank, generator=draws)
    again = torch.zeros_like(step)
    for r in order:
        again += birth.numbers("up")[:, r, None] * birth.numbers("down")[None, r]
    assert torch.equal(step, again)
    rounded = up @ birth.numbers("down").float()
    torch.testing.assert_close(step.float(), rounded, rtol=1e-3, atol=1e-3 * float(up.abs().max()))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_what_was_written_down_is_written_down_the_same_again(values: list[float]) -> None:
    birth = RankBirth(torch.tensor([values]).t().contiguous(), torch.ones(1, 1))
    birth.close()
    first = [birth.numbers("up"), birth.numbers("down")]
    birth.reopen(torch.float64)
    birth.close()
    assert all(torch.equal(a, b) for a, b in zip(first, [birth.numbers("up"), birth.numbers("down")], strict=True))
    largest = max(map(abs, values))
    assert float((first[0].flatten() - torch.tensor(values).double()).abs().max()) <= largest * 2**-14


def test_threads_and_devices_fold_the_same_bits() -> None:
    net, x = growing("lenet")
    net.add_task("0", 3)
    net.add_task("1", 3, rank=8)
    train(net, x)
    threads = torch.get_num_threads()
    try:
        prints = set()
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            prints.add(net.fingerprint(1))
        assert len(prints) == 1
    finally:
        torch.set_num_threads(threads)


LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "tokens": (lambda: nn.Linear(6, 5, bias=False), (4, 3, 6)),
    "1-D": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 4, 9)),
    "2-D": (lambda: nn.Conv2d(4, 6, (3, 2), dilation=(2, 1), padding=(1, 2)), (4, 4, 7, 6)),
    "circular": (lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"), (4, 4, 5, 5)),
    "3-D": (lambda: nn.Conv3d(2, 4, 2, stride=(1, 2, 1)), (3, 2, 4, 5, 3)),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), (3, 4, 5, 5)),
    "depthwise": (lambda: nn.Conv1d(4, 4, 3, groups=4), (3, 4, 6)),
}


class Flat(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.flatten(1)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_the_whole_weight(kind: str) -> None:
    """Every kind of layer, in float64, against the plain operator on a weight that autograd sees whole."""
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    alone = kind in {"groups", "depthwise"}  # its features are those of its input
    net = grow(Flat(make(), nn.Tanh()).double(), x, keep=["0"] if alone else [])
    net.add_task("0", 2)
    for task in range(1, 3):
        net.add_task(str(task), 2, growth=0.0 if alone else 0.5, rank=2, images=x)
        with torch.no_grad():
            for parameter in net.newborn():
                parameter += torch.randn_like(parameter)
    layer = next(m for m in net.body.modules() if isinstance(m, GrowingLayer))
    net.train()
    found = []
    for call in (layer, lambda given: plain(layer, given)):
        given_x = x.clone().requires_grad_()
        for parameter in net.newborn():
            parameter.grad = None
        out = call(given_x)
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
        found.append([out.detach(), given_x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) >= 5
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


def plain(layer: GrowingLayer, x: Tensor) -> Tensor:
    """The operator that torch has for it, scaled and shifted as equation 7 says."""
    norm = layer.norms[-1]
    if layer.convolution is None:
        y, channel = F.linear(x, layer.weight, layer.bias), -1
    else:
        numbers = layer.convolution
        padding = numbers["padding"]
        if numbers["padding_mode"] != "zeros":
            x, padding = F.pad(x, numbers["_reversed_padding_repeated_twice"], mode=numbers["padding_mode"]), 0
        convolve = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
        y = convolve(x, layer.weight, layer.bias, numbers["stride"], padding, numbers["dilation"], layer.groups)
        channel = 1
    shape = [1] * y.dim()
    shape[channel] = -1
    scale, shift = norm.vectors(y.shape[channel])  # type: ignore[operator]
    return y * scale.view(shape) + shift.view(shape)


def test_no_gradient_of_an_old_block_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a convolution nor of a matrix: weight gradients are as thin as the rank, or of newborn parts."""
    from zeroforget.operators import plain as operators

    net, x = growing("alexnet")
    net.add_task("0", 3)
    net.add_task("1", 3, rank=2)
    shapes: list[torch.Size] = []
    made = operators.weight_gradient

    def watched(g: Tensor, x: Tensor, like: Tensor, geometry: operators.Geometry | None) -> Tensor:
        shapes.append(like.shape)
        return made(g, x, like, geometry)

    monkeypatch.setattr(operators, "weight_gradient", watched)
    F.cross_entropy(net.train()(x, 1), torch.zeros(len(x), dtype=torch.long)).backward()
    assert shapes
    assert all(min(shape[:2]) <= 2 for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_learns_in_mixed_precision(dtype: torch.dtype) -> None:
    net, x = growing("resnet18")
    net.add_task("0", 3)
    train(net, x)
    before = net(x, 0)
    net.add_task("1", 3, 0.1, rank=4)
    optimizer = torch.optim.SGD(net.newborn(), lr=0.02)
    y, losses = torch.arange(6) % 3, []
    net.train()
    for _ in range(15):
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(net(x, 1).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(net.eval()(x, 0), before)


def test_down_starts_where_the_inputs_are_largest() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 8))
    hidden = torch.randn(200, 2) @ torch.randn(2, 20)  # inputs that lie in a plane
    grown = grow(net, hidden)
    grown.add_task("0", 2)
    grown.add_task("1", 2, rank=2, images=hidden)
    birth = grown.leaning()["0.weight"].newest_rank()
    assert birth is not None
    kept = hidden @ birth.down.t() @ birth.down
    torch.testing.assert_close(kept, hidden, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(birth.down @ birth.down.t(), torch.eye(2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["1-D", "2-D", "circular", "3-D"])
def test_samples_of_a_convolutions_inputs_are_what_it_reads(kind: str) -> None:
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    conv, x = make(), torch.randn(shape)
    found = input_samples(_as_dense(conv), x)["0.weight"]
    out = (found.flatten(1) @ conv.weight.flatten(1).t() + conv.bias).sort(0)[0]  # type: ignore[union-attr, operator]
    expected = conv(x).movedim(1, -1).flatten(0, -2).sort(0)[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def _as_dense(layer: nn.Module) -> nn.Module:
    whole = nn.Module()
    whole.add_module("features", nn.Sequential(layer))
    whole.forward = whole.get_submodule("features").forward
    return whole


def test_directions_are_made_up_where_there_are_not_enough() -> None:
    few = torch.randn(3, 12)
    found = leading(few, 6)
    torch.testing.assert_close(found @ found.t(), torch.eye(6), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(few @ found.t() @ found, few, rtol=1e-3, atol=1e-3)
    assert orthonormal(12, 12, few).shape == (12, 12)


def test_ranks_can_be_named_shared_and_counted() -> None:
    net = network("depthwise")[0]
    with pytest.raises(ValueError, match="first task has nothing older to lean on"):
        net.add_task("0", 3, rank=4)
    net.add_task("0", 3)
    for wrong in (-1, 1.5, "4", True, float("nan")):
        with pytest.raises(ValueError, match="a rank is a whole number of directions"):
            net.add_task("1", 3, rank=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no weight 'conv' that a rank could be given to; there are 0\.weight"):
        net.add_task("1", 3, rank={"conv": 4})
    net.add_task("1", 3, rank={"0.weight": 2, "11.weight": 0.5})
    assert net.ranks() == {"0.weight": 2, "11.weight": min(net.leaning()["11.weight"].old_block()) // 2}
    named = net.ranks()
    sizes = [birth.up.numel() + birth.down.numel() + 2 for w in net.leaning().values() if (birth := w.newest_rank())]
    assert net.overhead("1").rank_births == 16 * sum(sizes)
    net.add_task("2", 3, rank=10**6)  # no more than there is
    assert net.ranks()["3.weight"] == 4
    assert net.ranks("1") == named


def test_a_network_has_a_rank_for_all_its_later_tasks() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    net = grow(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), x, rank=2)
    net.add_task("0", 2)
    net.add_task("1", 2)
    net.add_task("2", 2, rank=0)
    assert [net.ranks(task) for task in range(3)] == [{}, {"0.weight": 2, "2.weight": 2}, {}]
    assert [record.rank for record in net.history] == [0, 2, 0]


def test_a_rank_birth_that_is_no_number_cannot_be_kept() -> None:
    net, x = growing("lenet")
    net.add_task("0", 3)
    net.add_task("1", 3, rank=2)
    weight = next(iter(net.leaning().values()))
    birth = weight.newest_rank()
    assert birth is not None
    with torch.no_grad():
        birth.up[0, 0] = float("nan")
    assert net.dense(1)(x).isnan().any()  # it shows
    with pytest.raises(ValueError, match="cannot be kept: drop_task"):
        net.add_task("2", 3)
    assert net.tasks == ("0", "1")
    net.drop_task()
    assert net(x, 0).isfinite().all()
