"""IMM's merged weights, element by element, and that they are really written into the network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.methods import helpers
from tests.methods.small_tasks import answers, example, learned, net, regime, replayed, right, tasks
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.imm import Imm
from zeroforget.methods.registry import find
from zeroforget.training import Fit


def test_the_mean_is_the_mean_of_the_tasks_weights() -> None:
    method = learned("imm-mean", epochs=2)
    assert isinstance(method, Imm)
    assert method.strength == 0.1
    for name, parameter in method.net.named_parameters():
        own = [method._kept(k)[name] for k in range(3)]
        for element in range(0, parameter.numel(), 7):
            expected = sum(float(w.flatten()[element]) for w in own) / 3
            assert float(parameter.detach().flatten()[element]) == pytest.approx(expected, abs=1e-6)
        assert not torch.equal(parameter, own[-1]), "the merge was never written"


def test_the_mode_weighs_each_element_by_its_fisher_information() -> None:
    method = learned("imm-mode", epochs=2)
    assert isinstance(method, Imm)
    for name, parameter in method.net.named_parameters():
        own = [method._kept(k)[name].flatten().tolist() for k in range(3)]
        fisher = [method._fisher(k)[name].flatten().tolist() for k in range(3)]
        for element in range(0, parameter.numel(), 7):
            shares = [f[element] + 1e-8 for f in fisher]
            expected = sum(s * w[element] for s, w in zip(shares, own, strict=True)) / sum(shares)
            assert float(parameter.detach().flatten()[element]) == pytest.approx(expected, abs=1e-5)


def test_tied_weights_are_merged_by_the_mode_too() -> None:
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9))
    tied[5].weight = tied[3].weight
    method = Imm(tied, example(), merge="mode")
    for each in tasks(2):
        method.learn(each, Fit(regime(2)))
    own, shares = (torch.stack([kept(k)["3.weight"] for k in range(2)]) for kept in (method._kept, method._fisher))
    shares = shares + 1e-8
    merged = method.net.get_parameter("3.weight")
    torch.testing.assert_close(merged.detach(), (shares * own).sum(0) / shares.sum(0))
    assert not torch.allclose(merged, own.mean(0))
    assert method.net.get_parameter("5.weight") is merged


def test_the_fisher_information_is_that_of_the_unmerged_network() -> None:
    method = learned("imm-mode", count=2, epochs=1)
    assert isinstance(method, Imm)
    alone = Imm(net(), example(), merge="mode")
    fit = Fit(regime(1))
    alone.learn(tasks()[0], fit)
    images, labels = tasks()[0].train.batch(torch.arange(len(tasks()[0].train)))
    total = torch.zeros_like(alone.net.get_parameter("9.weight"))
    for x, y in zip(images, labels, strict=True):
        alone.zero_grad()
        torch.nn.functional.cross_entropy(alone(x[None], 0), y[None]).backward()
        gradient = alone.net.get_parameter("9.weight").grad
        assert gradient is not None
        total += gradient.square()
    torch.testing.assert_close(method._fisher(0)["9.weight"], total / len(labels), rtol=1e-4, atol=1e-9)


def test_learning_goes_on_from_the_last_tasks_own_weights() -> None:
    method = Imm(net(), example(), merge="mean")
    method.learn(tasks()[0], Fit(regime(1)))
    method.learn(tasks()[1], Fit(regime(1)))
    own = method._kept(1)["9.weight"].clone()
    method.learn(tasks()[2], Fit(regime(1, lr=1e-12, min_lr=1e-13)))
    torch.testing.assert_close(method._kept(2)["9.weight"], own)


def test_learning_begins_with_the_last_tasks_own_statistics_too() -> None:
    begun: list[dict[str, Tensor]] = []

    class Noting(Imm):
        def before_step(self, done: float) -> None:
            begun.append({name: t.detach().clone() for name, t in self._floats().items()})

    method = Noting(net(norm=True), example(), merge="mean")
    for each in tasks(3):
        begun.clear()
        method.learn(each, Fit(regime(1)))
    assert all(torch.equal(tensor, method._kept(1)[name]) for name, tensor in begun[0].items())
    assert {"1.running_mean", "1.running_var", "1.weight", "9.weight"} <= begun[0].keys()


def test_what_the_network_itself_does_not_save_is_not_merged_either() -> None:
    method = Imm(helpers.centred_net(), example(), merge="mean")
    method.add_task(TaskSpec("a", 2))
    assert {name for name in method.tasks[0].state_dict() if name.startswith("2/")} == {"2/mean"}


def test_the_transfer_term_is_the_squared_distance() -> None:
    method = learned("imm-mean", count=1, epochs=1, strength=3.0)
    method.add_task(TaskSpec("more", 3))
    with torch.no_grad():
        for parameter in method.net.parameters():
            parameter += 0.01
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    count = sum(p.numel() for p in method.net.parameters())
    plain = torch.nn.functional.cross_entropy(method(x, 1), y)
    torch.testing.assert_close(method.loss(x, y, 1), plain + 3.0 * count * 0.01**2, rtol=1e-4, atol=0)


def test_statistics_become_those_of_the_mixture() -> None:
    method = learned("imm-mean", count=2, norm=True, epochs=1)
    assert isinstance(method, Imm)
    means = torch.stack([method._kept(k)["1.running_mean"] for k in range(2)])
    variances = torch.stack([method._kept(k)["1.running_var"] for k in range(2)])
    mixture = variances.mean(0) + means.square().mean(0) - means.mean(0).square()
    torch.testing.assert_close(method.net.get_buffer("1.running_mean"), means.mean(0))
    torch.testing.assert_close(method.net.get_buffer("1.running_var"), mixture)


@pytest.mark.parametrize("name", ["imm-mean", "imm-mode"])
def test_it_learns_loads_and_counts(name: str) -> None:
    method = learned(name, norm=True, epochs=6)
    assert right(method, 0) > 0.7
    twin = replayed(method, name, norm=True)
    assert all(torch.equal(answers(twin, i), answers(method, i)) for i in range(3))
    cls, implied = find(name)
    assert cls is Imm
    assert implied["merge"] == name.removeprefix("imm-")
    parameters = sum(p.numel() for p in method.net.parameters())
    statistics = sum(b.numel() for b in method.net.buffers() if b.is_floating_point())
    times = 2 if name == "imm-mode" else 1
    assert method.overhead().training == 3 * 32 * (times * parameters + statistics)
    assert method.overhead().inference == 0


def test_one_task_is_served_by_its_own_weights() -> None:
    method = learned("imm-mode", count=1, epochs=1)
    assert isinstance(method, Imm)
    assert all(torch.equal(p, method._kept(0)[n]) for n, p in method.net.named_parameters())


def test_another_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="'mean' or 'mode'"):
        Imm(net(), example(), merge="median")
