"""R-EWC: turned, the network computes the same function, and its Fisher information is nearer to diagonal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.methods import helpers
from zeroforget.data import Task
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.importance import Batches, sampled_labels, samples_of
from zeroforget.methods.r_ewc import REwc, eigenvectors
from zeroforget.training import Fit, Regime
from zeroforget.training.seeding import generator


def learned(net: nn.Module) -> REwc:
    """A network trained on the first task, not yet turned."""

    class Unturned(REwc):
        def end_task(self, task: Task, fit: Fit) -> None:
            pass

    method = Unturned(net, helpers.EXAMPLE)
    helpers.learn(method, helpers.tasks()[0])
    return method


def full_fisher(method: REwc, name: str, task: Task) -> Tensor:
    """E[g gᵀ] of one layer's weight, every pair of entries, sample by sample."""
    weight = method.weights()[name]
    x, y = task.prepare.test(task.train.images[task.train.rows]), task.train.labels
    rows = [
        torch.autograd.grad(F.cross_entropy(method(x[i : i + 1], 0), y[i : i + 1]), weight)[0].flatten()
        for i in range(0, len(x), 4)
    ]
    gradients = torch.stack(rows).double()
    return gradients.T @ gradients / len(rows)


def off_diagonal(fisher: Tensor) -> float:
    """The share of the matrix's energy that a diagonal cannot hold."""
    return 1 - float(fisher.diag().square().sum() / fisher.square().sum())


def test_turning_changes_nothing_but_the_axes() -> None:
    task = helpers.tasks()[0]
    method = learned(helpers.normed_net()).eval()
    assert len(method.rotations()) == 3
    before = helpers.answers(method, 0, task)
    weight = method.weights()["0.parametrizations.weight.original"].detach().clone()
    for samples in (None, 30):  # the second time there is a rotation to recombine
        method.turn(samples_of(task, Fit(), 0, samples))
        torch.testing.assert_close(helpers.answers(method, 0, task), before, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(weight, method.weights()["0.parametrizations.weight.original"], atol=1e-2)
    for rotation in method.rotations().values():
        for basis in rotation.bases:
            torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)), rtol=0, atol=1e-5)


def test_rounding_chooses_no_axes() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 5, generator=generator, dtype=torch.float64) @ torch.randn(
        5, 16, generator=generator, dtype=torch.float64
    )  # 11 of 16 directions carry nothing
    values[:, 3] = 0
    moment = values.T @ values
    axes = eigenvectors(moment)
    for seed in range(5):
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        other = values * (1 + 1e-7 * noise)
        torch.testing.assert_close(eigenvectors(other.T @ other), axes, rtol=0, atol=1e-4)
    torch.testing.assert_close(axes.T @ axes, torch.eye(16, dtype=torch.float64))
    turned = axes.T @ moment @ axes
    assert float((turned - turned.diag().diag()).norm()) < 1e-7 * float(moment.norm())


def test_turned_fisher_is_nearer_to_diagonal() -> None:
    task = helpers.tasks()[0]
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6, 5),
    )
    method = learned(net).eval()
    names = ["2.parametrizations.weight.original", "5.parametrizations.weight.original"]
    before = [off_diagonal(full_fisher(method, name, task)) for name in names]
    method.turn(samples_of(task, Fit(), 0))
    after = [off_diagonal(full_fisher(method, name, task)) for name in names]
    assert after[0] < before[0]
    assert after[1] < 0.6 * before[1]


def test_older_importance_is_carried_to_the_new_axes() -> None:
    """The diagonal of Q diag(F) Qᵀ, with Q the turn from the old axes to the new ones, built in full."""
    task = helpers.tasks()[0]
    method = learned(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    name = "1.parametrizations.weight.original"
    method.turn(samples_of(task, Fit(), 0, 50))
    old = torch.rand(3, 64)
    method.importance.put({name: old})
    rotation = method.rotations()[name]
    out_before, in_before = (basis.clone() for basis in rotation.bases)
    method.turn(samples_of(task, Fit(seed=1), 0, 60))
    turn = torch.kron(rotation.bases[0].T @ out_before, rotation.bases[1].T @ in_before)
    expected = (turn @ old.flatten().diag() @ turn.T).diag().reshape(3, 64)
    torch.testing.assert_close(method.importance[name], expected, rtol=1e-3, atol=1e-4)


def test_grouped_and_wide_layers_stay_unturned() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 5))
    assert list(REwc(net, helpers.EXAMPLE, widest=10).rotations()) == ["0.parametrizations.weight.original"]
    assert not REwc(helpers.plain_net(), helpers.EXAMPLE, widest=0).rotations()
    assert len(REwc(helpers.plain_net(), helpers.EXAMPLE, widest=64).rotations()) == 2
    assert len(REwc(helpers.plain_net(), helpers.EXAMPLE, widest=63).rotations()) == 1


def moments(net: nn.Module, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What axes are found from, before they are: the sums over all batches, each layer's outputs and inputs."""
    monkeypatch.setattr("zeroforget.methods.r_ewc.eigenvectors", lambda symmetric: symmetric)
    method = REwc(net, helpers.EXAMPLE)
    torch.manual_seed(1)
    method.add_task(TaskSpec("a", 5))
    data = next(samples_of(helpers.tasks()[0], Fit(), 0, 12))
    parts = zip(*(part.split(sizes) for part in data), strict=True)
    return [moment for pair in method._axes(parts).values() for moment in pair]


def test_axes_depend_neither_on_batches_nor_on_rectifiers_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, inplace = helpers.plain_net(), helpers.plain_net()
    inplace[2] = nn.ReLU(inplace=True)  # type: ignore[index]
    whole = moments(plain, [12], monkeypatch)
    for net, sizes in ((helpers.plain_net(), [9, 3]), (inplace, [12])):
        for found, expected in zip(moments(net, sizes, monkeypatch), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)


def test_a_weight_that_is_set_is_the_weight_that_is_read() -> None:
    method = learned(helpers.plain_net())
    method.turn(samples_of(helpers.tasks()[0], Fit(), 0, 30))
    layer, wanted = method.net[1], torch.randn(16, 64)  # type: ignore[index]
    layer.weight = wanted
    torch.testing.assert_close(layer.weight.detach(), wanted, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # turned twice in bfloat16 it would be blurred
        torch.testing.assert_close(layer.weight.detach(), wanted, rtol=1e-4, atol=1e-4)


def test_forgets_less_than_fine_tuning_and_epochs_leave_rotations_out() -> None:
    first = helpers.tasks()[0]
    kept = {name: helpers.score(helpers.run(name).method, 0, first) for name in ("finetuning", "r-ewc")}
    assert kept["r-ewc"] > kept["finetuning"] + 0.1
    method = helpers.run("r-ewc").method
    assert any(name.endswith(".inward") for name in method.state_dict())
    assert not any(name.endswith((".inward", ".outward")) for name in method.moving())


class Positions(nn.Module):
    """A linear layer over the channels of every position, which come last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 2, 2), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 10)"""
        channels_last = torch.relu(self.first(x)).permute(0, 2, 3, 1)
        return torch.relu(self.second(channels_last)).mean((1, 2))


class Tied(nn.Module):
    """Two layers with one weight, and a third one whose weight is a table too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(64, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 7)
        self.c.weight = self.b.weight
        self.table = nn.Embedding(7, 9)
        self.table.weight = self.d.weight

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7)"""
        h = torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x.flatten(1)))))))
        out: Tensor = self.d(h + self.table.weight[0])
        return out


@pytest.mark.parametrize("net", [Positions, Tied])
def test_channels_at_the_end_and_tied_weights_are_turned_too(net: type[nn.Module]) -> None:
    """By the kind of layer, not the number of dimensions; a weight that two layers share has one rotation."""
    torch.manual_seed(0)
    method = learned(net()).eval()
    turned = {"Positions": {"first", "second"}, "Tied": {"a", "b"}}[net.__name__]
    assert {name.split(".")[0] for name in method.rotations()} == turned
    task = helpers.tasks()[0]
    before = helpers.answers(method, 0, task)
    for samples in (None, 30):
        method.turn(samples_of(task, Fit(), 0, samples))
        torch.testing.assert_close(helpers.answers(method, 0, task), before, rtol=1e-3, atol=1e-4)
    assert all(not torch.equal(r.bases[0], torch.eye(len(r.bases[0]))) for r in method.rotations().values())
    again = REwc(net(), helpers.EXAMPLE)
    for each in helpers.tasks()[1:]:
        helpers.learn(again, each, regime=replace(helpers.REGIME, epochs=1))


@pytest.mark.parametrize("options", [{}, {"labels": "sampled"}, {"labels": "true"}])
def test_axes_are_found_by_the_labels_asked_for_and_by_the_networks_own_if_none_are(options: dict[str, str]) -> None:
    seen: list[Tensor] = []

    class Noting(REwc):
        def turn(self, data: Batches) -> None:
            before.append(helpers.copied(dict(self.state_dict())))
            pairs = list(data)
            seen.extend(y for _, y in pairs)
            super().turn(pairs)

    task, fit = helpers.tasks()[0], Fit(Regime(epochs=1), seed=5)
    before: list[dict[str, Tensor]] = []
    method = Noting(helpers.plain_net(), helpers.EXAMPLE, samples=40, **options)  # type: ignore[arg-type]
    method.learn(task, fit)
    method.load_state_dict(before[0])  # as it was when labels were drawn
    data = list(samples_of(task, fit, 0, 40))
    drawn = [y for _, y in sampled_labels(method, data, 0, draws=generator("axes", 5, 0))]
    expected, other = (
        (drawn, [y for _, y in data]) if options.get("labels") != "true" else ([y for _, y in data], drawn)
    )
    assert torch.equal(torch.cat(seen), torch.cat(expected))
    assert not torch.equal(torch.cat(seen), torch.cat(other))


def test_axes_are_those_of_the_network_as_it_answers_and_nothing_listens_afterwards() -> None:
    method = REwc(helpers.normed_net(), helpers.EXAMPLE).train()
    method.add_task(TaskSpec("a", 5))
    before = helpers.copied(dict(method.net.named_buffers()))
    data = list(samples_of(helpers.tasks()[0], Fit(), 0, 12))
    first, second = method._axes(data), method._axes(data)
    assert all(torch.equal(a, b) for name in first for a, b in zip(first[name], second[name], strict=True))
    assert all(torch.equal(method.net.get_buffer(name), buffer) for name, buffer in before.items())
    assert method.net.training
    assert not any(module._forward_hooks for module in method.net.modules())


def test_what_it_keeps_is_importance_anchor_and_rotations() -> None:
    method = REwc(helpers.plain_net(), helpers.EXAMPLE)
    weights = sum(p.numel() for p in method.net.parameters())
    assert method.overhead().training == 32 * (2 * weights + 64**2 + 3 * 16**2)
    assert method.overhead().inference == 0


def test_layers_called_by_keyword_are_turned_alike() -> None:
    class ByKeyword(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            for layer in self:
                input = layer(input=input)  # noqa: A001
            return input

    kept = {}
    for kind in (nn.Sequential, ByKeyword):
        method = REwc(kind(*helpers.plain_net().children()), helpers.EXAMPLE)
        helpers.learn(method, helpers.tasks()[0], regime=Regime(lr=0.05, epochs=1))
        kept[kind] = method.state_dict()
    assert kept[nn.Sequential].keys() == kept[ByKeyword].keys()
    assert all(torch.equal(value, kept[ByKeyword][name]) for name, value in kept[nn.Sequential].items())
