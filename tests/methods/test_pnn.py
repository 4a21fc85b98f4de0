"""Progressive networks: laterals at every layer, gradients into the new column only, and all columns in one budget."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.methods.small_tasks import answers, example, learned, net, regime, replayed, right, tasks
from zeroforget import nets
from zeroforget.axes.find import find_axes
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.columns import SMALL, ColumnStart, Lateral, Pnn, narrowed, size_of
from zeroforget.training import Fit

PAPERS = {
    "small": (1, 8, 8),
    "lenet": (1, 28, 28),
    "alexnet": (3, 64, 64),
    "vgg16-tiny": (3, 32, 32),
    "resnet18": (3, 32, 32),
}


def grown(count: int, **options: object) -> Pnn:
    method = Pnn(net(norm=True), example(), **options)  # type: ignore[arg-type]
    for index in range(count):
        method.add_task(TaskSpec(f"task {index}", 2 + index))
    return method


def total(method: Pnn) -> int:
    """Everything but heads."""
    return sum(p.numel() for part in (method.net, method.columns, method.laterals) for p in part.parameters())


def test_gradient_flows_into_the_new_column_and_its_laterals_only() -> None:
    method = grown(3, full=True)
    method.train()
    F.cross_entropy(method(torch.randn(6, 1, 8, 8), 2), torch.tensor([0, 1, 2, 3, 0, 1])).backward()
    new = [*method.column(2).parameters(), *method.laterals[2].parameters(), *method.heads[2].parameters()]
    assert all(p.grad is not None for p in new)
    assert {id(p) for p in method.trainable()} == {id(p) for p in new}
    assert all(p.grad is None for p in method.parameters() if id(p) not in {id(q) for q in new})


def test_every_layer_but_the_first_listens_the_head_included() -> None:
    method = grown(2, full=True).eval()
    x = torch.randn(4, 1, 8, 8)
    laterals = cast(nn.ModuleList, method.laterals[1])
    assert len(laterals) == 3  # a convolution, a linear layer and the head; the first convolution reads the images
    before = method(x, 1)
    for lateral in laterals:
        assert isinstance(lateral, Lateral)
        with torch.no_grad():
            lateral.scale += 1
        now = method(x, 1)
        assert not torch.equal(now, before)
        before = now


def test_a_lateral_is_what_the_equation_says() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU())
    method = Pnn(plain, torch.zeros(2, 3), full=True)
    for index in range(3):
        method.add_task(TaskSpec(str(index), 2))
    x = torch.randn(6, 3)
    inner = [lateral.project.shape for lateral in cast(nn.ModuleList, method.laterals[2])]
    assert inner == [(4, 2 * 4), (2, 2 * 5)]  # no wider than what the layer reads, or writes

    def column(k: int, hidden: list[list[Tensor]]) -> Tensor:
        """h_i = f(W h_(i-1) + U f(V a h_(i-1) of the columns before)), with a matrix for each column before."""
        layers = [method.column(k)[0], method.column(k)[2], method.heads[k]]  # type: ignore[index]
        h, mine = x, []
        for i, layer in enumerate(layers):
            mine.append(h)
            out = layer(h)
            if i and k:
                lateral = method.laterals[k][i - 1]  # type: ignore[index]
                width = h.shape[1]
                parts = [lateral.project[:, j * width : (j + 1) * width] for j in range(k)]
                seen = sum((lateral.scale[j] * hidden[j][i]) @ parts[j].T for j in range(k))
                out = out + F.relu(seen) @ lateral.weight.T
            h = F.relu(out) if i < 2 else out
        hidden.append(mine)
        return h

    hidden: list[list[Tensor]] = []
    for k in range(3):
        torch.testing.assert_close(method(x, k), column(k, hidden))


def test_old_columns_and_their_statistics_do_not_move_by_a_bit() -> None:
    method = Pnn(net(norm=True), example(), tasks=3)
    fit = Fit(regime(2, options={"momentum": 0.9, "weight_decay": 0.1}))
    then, states = [], []
    for index, each in enumerate(tasks()):
        method.learn(each, fit)
        then.append(answers(method, index))
        states.append({n: t.clone() for n, t in method.column(index).state_dict().items()})
    for index, logits in enumerate(then):
        assert torch.equal(answers(method, index), logits)
        now = method.column(index).state_dict()
        assert all(torch.equal(now[name], tensor) for name, tensor in states[index].items())


def test_later_columns_use_what_earlier_ones_learned() -> None:
    method = learned("pnn", count=2, full=True)
    before = answers(method, 1)
    with torch.no_grad():
        for parameter in method.net.parameters():
            parameter.zero_()
    assert not torch.equal(answers(method, 1), before)


@pytest.mark.parametrize(("count", "classes"), [(2, 10), (5, 10), (10, 10), (5, 40)])
def test_all_columns_together_are_as_large_as_the_network(count: int, classes: int) -> None:
    wide = net(norm=True, width=32)
    method = Pnn(wide, example(), tasks=count, classes=classes)
    for index in range(count):
        method.add_task(TaskSpec(str(index), classes))
    room = sum(p.numel() for p in wide.parameters())
    assert 0.8 * room < total(method) <= room


def test_the_size_of_columns_is_counted_as_they_are() -> None:
    wide = net(norm=True)
    method = Pnn(wide, example(), full=True)
    for index in range(3):
        method.add_task(TaskSpec(str(index), 6))
    assert size_of(wide.eval(), example(), 3, 6) == total(method)


def test_answers_have_no_gradient() -> None:
    method = grown(2)
    assert not any(method.predictor(task)(example()).requires_grad for task in range(2))


def test_scalars_of_laterals_start_small_and_differ() -> None:
    scales = torch.cat([lateral.scale.detach() for lateral in grown(3).laterals[2].children()])  # type: ignore[union-attr]
    assert len(scales.unique()) == len(scales)
    assert 0 <= float(scales.min()) < float(scales.max()) <= SMALL


def test_tied_layers_stay_tied_in_narrower_columns() -> None:
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24))
    tied[5].weight = tied[3].weight
    column = Pnn(tied, example(), tasks=2).net
    assert column[5].weight is column[3].weight  # type: ignore[index]
    assert column[3].out_features < 24  # type: ignore[index]


def test_fresh_weights_lie_around_zero_and_fresh_biases_where_they_were() -> None:
    layer = nn.Linear(40, 30)
    with torch.no_grad():
        layer.weight += 2.0
        layer.bias += 2.0
    ColumnStart(layer).renew(layer)
    assert abs(float(layer.weight.detach().mean())) < 0.05
    assert abs(float(layer.bias.detach().mean()) - 2.0) < 0.1


def test_full_columns_are_as_wide_as_the_network() -> None:
    method = grown(2, full=True)
    sizes = [sum(p.numel() for p in method.column(k).parameters()) for k in range(2)]
    assert sizes == [sum(p.numel() for p in net(norm=True).parameters())] * 2
    assert not torch.equal(method.column(0)[0].weight, method.column(1)[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("name", PAPERS)
def test_any_network_of_ours_shrinks_and_listens(name: str) -> None:
    shape = PAPERS[name]
    torch.manual_seed(0)
    wide = nets.build(name, shape, width=1.0 if name == "small" else 0.1)
    x = torch.randn(2, *shape)
    method = Pnn(wide, x, tasks=2).eval()
    method.add_task(TaskSpec("a", 2))
    method.add_task(TaskSpec("b", 3))
    assert method(x, 1).shape == (2, 3)
    assert total(method) <= sum(p.numel() for p in wide.parameters())


def test_a_narrower_network_is_cut_out_of_the_wider_one() -> None:
    wide = net(norm=True)
    axes = find_axes(wide, example())
    widths = {"0": 3, "4": 5, "9": 7}
    narrow = narrowed(wide, axes, widths).eval()
    assert narrow(example()).shape == (2, 7)
    assert narrow[9].in_features == 5 * 4  # type: ignore[index]  # flattening repeats each feature
    kept = torch.arange(5 * 4)
    torch.testing.assert_close(narrow[9].weight, wide[9].weight[:7, kept] * (64 / 20) ** 0.5)  # type: ignore[index]
    assert torch.equal(narrow[5].running_var, wide[5].running_var[:5])  # type: ignore[index]


def test_a_fresh_column_looks_like_the_network_as_it_was_given() -> None:
    torch.manual_seed(0)
    given = nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300))
    start, column = ColumnStart(given), nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300))
    column(torch.randn(8, 200))
    start.renew(column)
    assert float(column[0].weight.std().detach()) == pytest.approx(float(given[0].weight.std().detach()), rel=0.02)
    assert not torch.equal(column[0].weight, given[0].weight)
    assert torch.equal(column[1].weight, torch.ones(300))
    assert not column[1].running_mean.any()  # type: ignore[union-attr]


def test_it_learns_and_loads() -> None:
    method = learned("pnn", norm=True, tasks=3, classes=5, epochs=8)
    assert min(right(method, i) for i in range(3)) > 0.7
    twin = replayed(method, "pnn", norm=True, tasks=3, classes=5)
    assert all(torch.equal(answers(twin, i), answers(method, i)) for i in range(3))


def test_overhead_counts_the_later_columns_and_all_laterals() -> None:
    method = grown(3, full=True)
    column = sum(t.numel() * t.element_size() * 8 for t in method.net.state_dict().values())
    laterals = 32 * sum(p.numel() for p in method.laterals.parameters())
    assert method.overhead().inference == 2 * column + laterals


class Baked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(256, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).view(-1, 256))
        return out


def test_a_width_baked_into_code_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="full=True"):
        Pnn(Baked(), example(), tasks=3)
    method = Pnn(Baked(), example(), full=True)
    method.add_task(TaskSpec("a", 2))
    assert method(example(), 0).shape == (2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tasks": 0}, "tasks.*at least 1"), ({"classes": 0}, "classes.*at least 1"), ({"tasks": 400}, "fewer tasks")],
)
def test_impossible_numbers_of_columns_and_classes_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pnn(net(), example(), **options)  # type: ignore[arg-type]


class Strided(nn.Module):
    """Convolutions with all that a lateral must follow, one of them called by the names of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=2), nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2)
        self.third = nn.Conv2d(6, 6, 3, padding=1, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6)"""
        h = F.relu(self.second(F.relu(self.first(x))))
        h = F.conv2d(input=h, weight=self.third.weight, bias=self.third.bias, padding=1, groups=3)
        return F.relu(h).mean((2, 3))


def test_laterals_into_convolutions_have_their_stride_padding_and_dilation() -> None:
    method = Pnn(Strided(), example(), full=True)
    for index in range(2):
        method.add_task(TaskSpec(str(index), 2))
    x, (first, second) = torch.randn(3, 1, 8, 8), (cast(Strided, method.column(k)) for k in range(2))
    into = cast(list[Lateral], list(cast(nn.ModuleList, method.laterals[1])))
    old = [F.relu(first.first(x))]
    old.append(F.relu(first.second(old[0])))
    old.append(F.relu(first.third(old[1])))

    def heard(k: int, **extra: int) -> Tensor:
        lateral = into[k]
        return F.conv2d(F.relu(F.conv2d(lateral.scale * old[k], lateral.project)), lateral.weight, **extra)

    h = F.relu(second.second(F.relu(second.first(x))) + heard(0, stride=2, padding=1, dilation=2))
    h = F.relu(second.third(h) + heard(1, padding=1)).mean((2, 3))
    seen = F.relu(F.linear(into[2].scale * old[2].mean((2, 3)), into[2].project))
    torch.testing.assert_close(method(x, 1), method.heads[1](h) + F.linear(seen, into[2].weight))


def test_one_task_alone_gets_the_network_as_it_is() -> None:
    wide = net()
    assert Pnn(wide, example(), tasks=1).net is wide


def test_a_fresh_column_has_seen_nothing_though_the_method_trains() -> None:
    method = Pnn(net(norm=True), example(), full=True).train()
    for index in range(2):
        method.add_task(TaskSpec(str(index), 2))
    assert not method.column(1)[1].running_mean.any()  # type: ignore[index, union-attr]
    assert int(method.column(1)[1].num_batches_tracked) == 0  # type: ignore[index, arg-type]


def test_columns_are_as_wide_as_fits() -> None:
    """A thousandth more of each layer would be too much, or no feature more."""
    wide = net(norm=True, width=32)
    axes, room = find_axes(wide, example()), sum(p.numel() for p in wide.parameters())
    column = Pnn(wide, example(), tasks=3).net.eval()
    assert size_of(column, example(), 3, 10) <= room
    share = max(column[k].weight.shape[0] / axes.sizes[str(k)] for k in (0, 4, 9)) + 0.001  # type: ignore[index, union-attr]
    wider = {axis: int(size * share) + 1 for axis, size in axes.sizes.items()}
    assert size_of(narrowed(wide, axes, wider).eval(), example(), 3, 10) > room
