"""SSL's inhibition against a double loop, its neurons against single samples, and how it finds its layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.methods import helpers
from zeroforget.methods.anchored import Mas, Ssl, inhibition
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.importance import samples_of
from zeroforget.training import Fit


def by_double_loop(h: Tensor, alpha: Tensor, sigma: float) -> float:
    total, h = 0.0, h.detach()
    for i in range(h.shape[1]):
        for j in range(h.shape[1]):
            if i != j:
                near = math.exp(-((i - j) ** 2) / (2 * sigma**2)) * math.exp(-float(alpha[i] + alpha[j]))
                total += near * float((h[:, i] * h[:, j]).sum())
    return total / len(h)


def test_inhibition_equals_a_double_loop() -> None:
    h, alpha = torch.rand(5, 9), torch.rand(9)
    assert float(inhibition(h, alpha, 1.5)) == pytest.approx(by_double_loop(h, alpha, 1.5), rel=1e-5)


def test_half_precision_does_not_blur_the_distance_between_neurons() -> None:
    h, alpha = torch.rand(3, 700).bfloat16(), torch.zeros(700)
    plain = inhibition(h.float(), alpha, 2.0)
    torch.testing.assert_close(inhibition(h, alpha, 2.0), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which would multiply in bfloat16 again
        torch.testing.assert_close(inhibition(h, alpha, 2.0), plain)


class Oddly(nn.Module):
    """Names that mean nothing, functional ReLUs, a BatchNorm and a dropout in between, one linear without a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 12), nn.Linear(12, 9), nn.Linear(9, 7)
        self.norm = nn.BatchNorm1d(9)

    def forward(self, x: Tensor) -> Tensor:
        """ReLU in place after a, ReLU after norm(b), none after c."""
        h = F.relu_(self.a(x.flatten(1)))
        h = torch.relu(F.dropout(self.norm(self.b(h)), 0.0, self.training))
        out: Tensor = self.c(h)
        return out


def test_loss_is_that_of_mas_and_the_inhibition_of_each_hidden_layer() -> None:
    torch.manual_seed(0)
    method = Ssl(Oddly(), helpers.EXAMPLE, sparsity=0.3, reach=1 / 3).eval()
    assert [len(t) for t in method.neurons.buffers()] == [12, 9]
    method.add_task(helpers.run("ssl").method.specs[0])
    method.neurons.put({"0": torch.rand(12), "1": torch.rand(9)})
    x, y = torch.randn(6, 1, 8, 8), torch.randint(5, (6,))
    net = method.net
    h1 = net.a(x.flatten(1)).relu()
    h2 = net.norm(net.b(h1)).relu()
    activity = by_double_loop(h1, method.neurons["0"], 4.0) + by_double_loop(h2, method.neurons["1"], 3.0)
    expected = float(Mas.loss(method, x, y, 0).detach()) + 0.3 * activity
    assert float(method.loss(x, y, 0).detach()) == pytest.approx(expected, rel=1e-4)


def test_neurons_that_mattered_are_found() -> None:
    task = helpers.tasks()[0]
    method = helpers.make("ssl", helpers.plain_net, samples=25)
    assert isinstance(method, Ssl)
    helpers.learn(method, task)
    method.samples = None
    method.neurons.put({name: torch.zeros_like(t) for name, t in method.neurons.named_buffers()})

    method.end_task(task, Fit())
    x = task.prepare.test(task.train.images[task.train.rows])
    net = method.eval().net
    total = torch.zeros(16)
    for i in range(len(x)):
        h = net[:3](x[i : i + 1]).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(method.heads[0](net[3:](h)).square().sum(), h)
        total += gradient[0].abs()
    torch.testing.assert_close(method.neurons["0"], total / len(x), rtol=1e-3, atol=1e-4)


def test_strong_inhibition_makes_a_sparser_code() -> None:
    task = helpers.tasks()[0]
    x = task.prepare.test(task.test.images[task.test.rows])
    active = {}
    for sparsity in (0.0, 0.01):
        method = helpers.make("ssl", lambda: helpers.plain_net(width=32), sparsity=sparsity)
        helpers.learn(method, task)
        active[sparsity] = float((method.eval().net(x) > 0).float().mean())
        assert helpers.score(method, 0, task) > 0.85
    assert active[0.01] < 0.8 * active[0.0]


def test_channels_stand_in_where_no_linear_layer_is_hidden() -> None:
    net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    method = Ssl(net, helpers.EXAMPLE)
    assert [len(t) for t in method.neurons.buffers()] == [5]
    helpers.learn(method, helpers.tasks()[2])
    assert float(method.neurons["0"].max()) > 0
    with pytest.raises(ValueError, match="ReLU"):
        Ssl(nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh()), helpers.EXAMPLE)


def test_channels_are_judged_by_all_their_positions_and_inhibited_by_their_mean() -> None:
    task = helpers.tasks()[2]
    net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    method = Ssl(net, helpers.EXAMPLE, sparsity=1.0, samples=10)
    method.add_task(TaskSpec("a", 2))
    method.end_task(task, Fit())
    data = [sample for x, _ in samples_of(task, Fit(), 0, 10) for sample in x.split(1)]
    assert len(data) == 10
    total = torch.zeros(5)
    for x in data:
        h = net[:2](x).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(method.heads[0](net[2:](h)).square().sum(), h)
        total += gradient[0].sum((1, 2)).abs()  # a channel is one neuron
    torch.testing.assert_close(method.neurons["0"], total / 10, rtol=1e-3, atol=1e-5)
    x, y = torch.cat(data), torch.zeros(10).long()
    h = net[:2](x).mean((2, 3))
    extra = method.loss(x, y, 0) - Mas.loss(method, x, y, 0)
    torch.testing.assert_close(extra, inhibition(h, method.neurons["0"], 5 / 6), rtol=1e-3, atol=1e-5)


def test_neurons_are_judged_as_the_network_answers() -> None:
    """In eval mode: dropout, which thins what training sees, has no say."""
    task = helpers.tasks()[2]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.9))
    method = Ssl(net, helpers.EXAMPLE).train()
    method.add_task(TaskSpec("a", 2))
    found = []
    for _ in range(2):
        method.neurons.put({"0": torch.zeros(8)})
        method.end_task(task, Fit())
        found.append(method.neurons["0"].clone())
    assert torch.equal(*found)
    assert method.training


def test_importance_is_that_of_mas_and_neurons_add_theirs_up() -> None:
    """Also where more samples are asked for than there are."""
    first, second, _ = helpers.tasks(((0, 1), (2, 3), (4, 5)), 20)
    method = Ssl(helpers.plain_net(), helpers.EXAMPLE, sparsity=0.0, samples=1000)
    other = Mas(helpers.plain_net(), helpers.EXAMPLE, strength=method.strength)
    grown = []
    for task in (first, second):
        for learner in (method, other):
            helpers.learn(learner, task)
        grown.append(helpers.copied(dict(method.neurons.named_buffers())))
    for name in method.weights():
        assert torch.equal(method.importance[name], other.importance[name])
    method.neurons.put({name: torch.zeros_like(t) for name, t in grown[0].items()})
    method.samples = None
    method.end_task(second, Fit())
    for name, alone in method.neurons.named_buffers():
        torch.testing.assert_close(grown[1][name], grown[0][name] + alone)
        assert grown[0][name].any()


def test_what_it_keeps_is_what_mas_keeps_and_a_number_for_each_neuron() -> None:
    method = Ssl(helpers.plain_net(), helpers.EXAMPLE)
    weights = sum(p.numel() for p in method.net.parameters())
    assert method.overhead().training == 32 * (2 * weights + 16 + 16)
