"""The face of a growing network: what it tells, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.growing.helpers import growing, train
from zeroforget.axes.find import CannotGrow
from zeroforget.growing.births import State
from zeroforget.growing.layers import FeatureNorm, GrowingLayer
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import adopt, grow


@pytest.fixture
def net() -> tuple[GrowingNetwork, Tensor]:
    net, x = growing("lenet")
    net.add_task("birds", 3)
    train(net, x)
    net.add_task("cars", 5, growth=0.25)
    train(net, x)
    return net, x


def test_tasks_go_by_name_or_number(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, x = net
    assert network.tasks == ("birds", "cars")
    assert torch.equal(network(x, "cars"), network(x, 1))
    assert network(x, "birds").shape == (6, 3)
    assert network(x, "cars").shape == (6, 5)


def test_a_network_prints_a_row_for_each_task(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, _ = net
    birds, cars = (sum(network.widths(task).values()) for task in ("birds", "cars"))
    title, _, *rows = str(network).splitlines()
    assert title.endswith(": 2 tasks")
    assert [row.split() for row in rows] == [
        ["birds", "3", str(birds), f"+{birds}"],
        ["cars", "5", str(cars), f"+{cars - birds}"],
    ]
    assert repr(network).endswith(f"tasks: 'birds', 'cars'; {cars} features)")
    assert network._repr_html_().count("<tr>") == 3


def test_births_masks_and_widths_tell_one_story(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, _ = net
    for axis, births in network.births.items():
        assert births.tolist() == sorted(births.tolist())
        assert (births <= 0).sum() == network.widths("birds")[axis]
        assert len(births) == network.widths()[axis]
        first, second = network.masks("birds")[axis], network.masks(1)[axis]
        old = births == 0
        assert (first[old] == State.NORMAL).all()
        assert (first[~old] == State.MASKED).all()
        assert (second[old] == State.FORWARD_ONLY).all()
        assert (second[~old] == State.NORMAL).all()
    assert any((births == 1).any() for births in network.births.values())


def test_parameters_are_exactly_what_the_newest_task_trains(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, x = net
    assert [id(p) for p in network.parameters()] == [id(p) for p in network.newborn()]
    network.train()
    network(x, "cars").sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_newborn_parameters_lie_in_memory_of_their_own(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, _ = net
    held = [*network.parameters(), *network.buffers()]
    assert len({t.untyped_storage().data_ptr() for t in held}) == len(held)
    assert all(p.is_contiguous() for p in network.parameters())


@pytest.mark.parametrize("name", ["lenet", "resnet18"])
def test_after_a_task_is_dropped_the_one_before_trains_what_it_did(name: str) -> None:
    net, x = growing(name)
    net.add_task("birds", 3)
    net.add_task("cars", 3, growth=0.25)
    shapes = {n: (p.shape, p.requires_grad) for n, p in net.named_parameters()}
    widths, shares, left, births = net.widths(), net.shares, net.left(), net.births
    net.add_task("boats", 4, growth=0.1)
    net.drop_task()
    assert {n: (p.shape, p.requires_grad) for n, p in net.named_parameters()} == shapes
    assert (net.widths(), net.shares, net.left()) == (widths, shares, left)
    assert all(torch.equal(now, births[axis]) for axis, now in net.births.items())
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    train(net, x)
    assert not any(torch.equal(p, before[n]) for n, p in net.named_parameters())


def test_a_task_that_is_newest_again_answers_as_it_learns_on(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, x = net
    before = network(x, "birds")
    network.drop_task()
    assert torch.equal(network(x, "birds"), before)
    train(network, x)
    after = network(x, "birds")
    network.add_task("boats", 2, growth=0.25)
    assert not torch.equal(after, before)
    assert torch.equal(network(x, "birds"), after)


def test_an_earlier_task_follows_what_becomes_of_the_whole_network(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, x = net
    before = network(x, "birds")
    network.load_state_dict({k: v + 0.01 if v.is_floating_point() else v for k, v in network.state_dict().items()})
    after = network(x, "birds")
    assert not torch.equal(after, before)
    assert torch.equal(after, network.dense("birds")(x))
    network.double()
    assert torch.equal(network(x.double(), "birds"), network.dense("birds")(x.double()))


def test_what_is_told_of_a_network_is_a_copy(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, _ = net
    widths, shares = network.widths("birds"), dict(network.shares)
    for births in network.births.values():
        births.fill_(7)
    network.shares.clear()
    assert network.widths("birds") == widths
    assert network.shares == shares


def test_one_axis_can_grow_alone(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, x = net
    axis = next(iter(network.widths()))
    before = network.widths()
    seen = [network(x, k) for k in range(2)]
    network.add_task("boats", 2, growth={axis: 1})
    assert network.widths() == before | {axis: before[axis] + 1}
    train(network, x)
    assert all(torch.equal(network(x, k), s) for k, s in enumerate(seen))


def test_a_task_without_growth_learns_its_head_and_normalization(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, x = net
    network.add_task("boats", 2)
    names = [name for name, _ in network.named_parameters()]
    assert names
    assert all(name.startswith("heads.2.") or ".norms.2." in name for name in names)
    seen = network(x, 1)
    train(network, x)
    assert torch.equal(network(x, 1), seen)


def test_feature_normalization_covers_what_it_says() -> None:
    for fn, first, second in [("reused", 0, 1), ("all", 1, 2), ("none", 0, 0)]:
        net, _ = growing("lenet", fn=fn)
        net.add_task("0", 2)
        net.add_task("1", 2, growth=0.25)
        for layer in (m for m in net.body.modules() if isinstance(m, GrowingLayer)):
            widths = [int((net.births_along(layer) <= k).sum()) for k in range(2)]
            covered = [len(n.covered) for n in layer.norms if isinstance(n, FeatureNorm)]
            assert covered[0] == (widths[0] if first else 0)
            assert covered[1] == {0: 0, 1: widths[0], 2: widths[1]}[second]


def test_layers_before_a_normalization_get_no_second_one() -> None:
    net, _ = growing("resnet18")
    net.add_task("0", 2)
    net.add_task("1", 2, growth=0.25)
    assert not any(".norms." in name for name, _ in net.named_parameters())
    assert any(".tasks.1." in name for name, _ in net.named_parameters())


def test_overhead_counts_masks_and_normalization(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, _ = net
    packed = sum(-(-len(b) // 4) for b in network.births.values())
    floats = sum(p.numel() for name, p in network.named_parameters() if ".norms." in name)
    assert network.overhead("cars").masks == 8 * packed
    assert network.overhead("cars").feature_norms == 32 * floats
    assert network.overhead().masks == 2 * 8 * packed
    assert network.overhead().norms == 0
    assert network.overhead().total == network.overhead("birds").total + network.overhead("cars").total


BAD: list[tuple[Callable[[GrowingNetwork, Tensor], Any], str]] = [
    (lambda n, x: n(x[:, :, :5], "birds"), r"does not fit; the network takes \(batch, 1, 16, 16\)"),
    (lambda n, x: n(x.repeat(1, 2, 1, 1), "cars"), "does not fit"),
    (lambda n, x: n.train()(x[0, 0], "cars"), "does not fit"),
    (lambda n, x: n(x, "bird"), r"no task 'bird'; the tasks are 'birds' \(0\), 'cars' \(1\)"),
    (lambda n, x: n(x, 2), "no task 2"),
    (lambda n, x: n(x, -1), "no task -1"),
    (lambda n, x: n(x, True), "no task True"),
    (lambda n, x: n(x, torch.tensor([0, 1])), "no task tensor"),
    (lambda n, x: n(x.numpy(), "birds"), "takes one tensor, a batch of inputs, not ndarray"),
    (lambda n, x: n.dense("bird"), "no task"),
    (lambda n, x: n.masks(7), "no task"),
    (lambda n, x: n.add_task("cars", 3), "already"),
    (lambda n, x: n.add_task("", 3), "needs a name"),
    (lambda n, x: n.add_task("boats", 1), "number of a task's classes, at least 2, not 1"),
    (lambda n, x: n.add_task("boats", 2.0), "number of a task's classes, at least 2, not 2.0"),
    (lambda n, x: n.add_task("boats", 2, growth=-0.1), "0 or more"),
    (lambda n, x: n.add_task("boats", 2, growth=float("nan")), "0 or more"),
    (lambda n, x: n.add_task("boats", 2, growth="0.1"), "0 or more, not '0.1'"),
    (lambda n, x: n.add_task("boats", 2, growth=[0.1]), "0 or more"),
    (lambda n, x: n.add_task("boats", 2, growth=True), "0 or more, not True"),
    (lambda n, x: n.add_task("boats", 2, growth=0.5), r"beyond the limit: 0.25 is left"),
    (lambda n, x: n.add_task("boats", 2, growth={"nowhere": 1}), "no axis 'nowhere'"),
    (lambda n, x: n.add_task("boats", 2, growth={next(iter(n.widths())): -1}), "whole number"),
    (lambda n, x: n.add_task("boats", 2, growth={next(iter(n.widths())): 999}), "cannot grow by 999"),
    (lambda n, x: n.add_task("boats", 2, growth={next(iter(n.widths())): 0.5}), "cannot grow by 0.5"),
    (lambda n, x: n.add_task("boats", 2, growth={next(iter(n.widths())): float("nan")}), "0 or more, not nan"),
    (lambda n, x: n.add_task("boats", 2, growth={next(iter(n.widths())): "half"}), "not 'half'"),
    (lambda n, x: n.load_state_dict({}), "holds 0 tasks and this network has 2: first add the tasks"),
    (lambda n, x: list(n.newborn("birds")), "read by 'cars', which would change"),
]


@pytest.mark.parametrize(("act", "message"), BAD, ids=[m for _, m in BAD])
def test_mistakes_are_explained_and_change_nothing(
    net: tuple[GrowingNetwork, Tensor], act: Callable[[GrowingNetwork, Tensor], Any], message: str
) -> None:
    network, x = net
    before = {k: v.clone() for k, v in network.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        act(network, x)
    network.eval()
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    network.add_task("boats", 2, growth=0.1)
    train(network, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(start=0.0), "start is a share"),
        (dict(start=1.5), "start is a share"),
        (dict(start="0.5"), "start is a share"),
        (dict(limit=float("nan")), "limit is a share"),
        (dict(limit="0.5"), "limit is a share"),
        (dict(limit=float("inf")), "limit is a share"),
        (dict(align=1.5), "align is a whole number"),
        (dict(align=True), "align is a whole number"),
        (dict(start=0.5, limit=0.3), "below start"),
        (dict(fn="some"), "fn is"),
        (dict(bridge="warm"), "bridge is"),
        (dict(unit="neurons"), "unit is"),
    ],
)
def test_grow_checks_its_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grow(nn.Linear(3, 4), torch.randn(2, 3), **options)


def test_numbers_may_be_numpys_or_torchs(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, x = net
    axis, before = max(network.widths().items(), key=lambda pair: pair[1])
    network.add_task("boats", np.int64(3), growth=np.float32(0.1))  # type: ignore[arg-type]
    network.add_task("ships", torch.tensor(3), growth={axis: np.int64(1)})  # type: ignore[arg-type]
    assert [type(value) for value in (network.history[2].classes, network.history[2].growth)] == [int, float]
    assert network.history[3].growth == {axis: 1}
    assert network.widths()[axis] > before
    assert torch.equal(network(x, np.int64(1)), network(x, "cars"))  # type: ignore[arg-type]


def test_a_state_dict_is_loaded_once_its_tasks_are_there(net: tuple[GrowingNetwork, Tensor]) -> None:
    network, x = net
    again = growing("lenet", start=0.5)[0]
    with pytest.raises(ValueError, match="holds 2 tasks and this network has 0"):
        again.load_state_dict(network.state_dict())
    for record in network.history:
        again.add_task(record.name, record.classes, record.growth)
    again.load_state_dict(network.state_dict())
    assert all(torch.equal(again.eval()(x, task), network.eval()(x, task)) for task in network.tasks)


def test_nothing_works_before_the_first_task() -> None:
    net = grow(nn.Linear(3, 4), torch.randn(2, 3))
    with pytest.raises(ValueError, match="call add_task first"):
        net(torch.randn(2, 3), 0)
    with pytest.raises(ValueError, match="call add_task first"):
        list(net.newborn())
    with pytest.raises(ValueError, match="no task to drop"):
        net.drop_task()
    assert list(net.parameters()) == []


def test_the_first_task_cannot_be_dropped() -> None:
    net = grow(nn.Linear(3, 4), torch.randn(2, 3))
    net.add_task("0", 2)
    with pytest.raises(ValueError, match="first task cannot be dropped"):
        net.drop_task()


def test_growth_without_a_limit_goes_beyond_the_given_width() -> None:
    x = torch.randn(2, 3)
    net = grow(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)), x)
    net.add_task("0", 2)
    for task in range(1, 5):
        net.add_task(str(task), 2, growth=0.5)
    assert net.widths() == {"0": 12, "2": 15}
    assert net.left() == float("inf")


def test_the_given_network_is_left_as_it_is() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
    state = {k: v.clone() for k, v in plain.state_dict().items()}
    x = torch.randn(4, 3)
    net = grow(plain, x)
    net.add_task("0", 2)
    train(net, x)
    assert plain.training
    assert all(torch.equal(v, state[k]) for k, v in plain.state_dict().items())
    assert all(p.requires_grad for p in plain.parameters())


def test_the_first_task_at_full_width_starts_as_the_network_was_given() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(8, 3)
    plain(x)  # move the statistics
    net = grow(plain, x)
    net.add_task("0", 2)
    assert torch.equal(net.dense(0).get_submodule("features")(x), plain.eval()(x))


def test_narrow_starts_have_the_spread_of_a_fresh_network() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
    net = grow(plain, torch.randn(2, 400), start=0.25)
    net.add_task("0", 2)
    fresh = nn.Linear(100, 100).weight.detach().std()
    assert float(net.dense(0).get_submodule("features.2").weight.std()) == pytest.approx(float(fresh), rel=0.05)
    net.add_task("1", 2, growth=0.25)
    newborn = net.dense(1).get_submodule("features.2").weight[100:]
    assert float(newborn.std()) == pytest.approx(float(nn.Linear(200, 100).weight.detach().std()), rel=0.05)


def test_a_network_can_be_grown_where_gradients_are_off() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        net = grow(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)), torch.randn(2, 4))
        net.add_task("a", 2)
    net.train()(torch.randn(3, 4), "a").sum().backward()
    assert all(p.grad is not None for p in net.newborn())


def test_a_network_can_be_grown_in_inference_mode() -> None:
    torch.manual_seed(0)
    x, classifier = torch.randn(5, 4), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.inference_mode():
        net = adopt(classifier, x)
        expected = classifier(x)
        net.add_task("a", 2, growth=0.5)
        net.add_task("b", 2, growth=0.5)
        net.drop_task()
        made = nn.Linear(3, 4)
    train(net, x)
    assert torch.equal(net(x, 0), expected)
    with pytest.raises(CannotGrow, match=r"made in torch\.inference_mode"):
        grow(made, torch.randn(2, 3))


class ByKeyword(nn.Module):
    """Calls its layers, as torch allows, by the name of their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.relu(input=self.n(input=self.a(input=x)))
        return nn.functional.relu(self.b(input=h.flatten(1)))


def test_layers_called_by_keyword_grow() -> None:
    x = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    net = grow(ByKeyword(), x, start=0.5)
    net.add_task("first", 3)
    train(net, x)
    before = net.eval()(x, "first")
    net.add_task("second", 2, 0.5)
    train(net, x)
    assert net.widths() == {"a": 6, "b": 8}
    assert torch.equal(net.eval()(x, "first"), before)


def test_a_first_task_computes_with_its_parameters_themselves() -> None:
    net, x = growing("lenet")
    net.add_task("birds", 3)
    tensors = [layer.grown for layer in net.modules() if isinstance(layer, GrowingLayer)]
    assert tensors
    for tensor in tensors:
        assert tensor.rows is not None
        assert tensor.synced().data_ptr() == tensor.rows.data_ptr()
    train(net, x)
    state = net.state_dict()
    for name, module in net.named_modules():
        if module in tensors:
            assert torch.equal(state[f"{name}.value"], state[f"{name}.rows"])
    learned = net.eval()(x, "birds")
    net.add_task("cars", 5, growth=0.25)
    assert all(tensor.synced() is tensor.value for tensor in tensors)
    assert torch.equal(net(x, "birds"), learned)


def test_a_network_without_tasks_says_what_to_call() -> None:
    network = grow(nn.Linear(3, 4), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"^no task 'birds'; there is none yet, call add_task first$"):
        network(torch.randn(2, 3), "birds")
