"""Moments of per-sample gradients against a plain loop over samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.methods import helpers
from zeroforget.methods import registry
from zeroforget.methods.importance import (
    MEMORY,
    Kept,
    fisher,
    negative_log_likelihood,
    per_sample_moments,
    room,
    sampled_labels,
    samples_of,
    squared_norm,
)
from zeroforget.training import Fit


def classifier() -> nn.Module:
    """With BatchNorm whose statistics are not the identity, an in-place ReLU, and dropout."""
    net = nn.Sequential(helpers.normed_net(), nn.Linear(32, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 3))
    net.train()(torch.randn(16, 1, 8, 8))
    return net


def batch(count: int = 7) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    return torch.randn(count, 1, 8, 8, generator=draws), torch.randint(3, (count,), generator=draws)


@pytest.mark.parametrize("power", ["square", "abs"])
@pytest.mark.parametrize("memory", [1, 60_000, 2**28])
def test_equals_a_loop_over_samples(power: str, memory: int) -> None:
    """One sample at a time, a few, or all at once: the same moments, and the model is left as it was."""
    model, (x, y) = classifier(), batch()
    before = helpers.copied(dict(model.state_dict()))
    names = [name for name, _ in model.named_parameters()]
    objective = negative_log_likelihood if power == "square" else squared_norm
    found = per_sample_moments(model, names, [(x[:4], y[:4]), (x[4:], y[4:])], objective, power=power, memory=memory)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    model.eval()
    for name, p in model.named_parameters():
        total = torch.zeros_like(p)
        for i in range(len(x)):
            out = model(x[i : i + 1])
            value = F.cross_entropy(out, y[i : i + 1]) if power == "square" else (out**2).sum()
            (gradient,) = torch.autograd.grad(value, p)
            total += gradient**2 if power == "square" else gradient.abs()
        torch.testing.assert_close(found[name], total / len(x), rtol=1e-4, atol=1e-6)


class Branching(nn.Module):
    """Looks at a number to decide what to compute, which cannot be done for many samples at once."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 3), nn.Linear(64, 3)])

    def forward(self, x: Tensor) -> Tensor:
        """Bright images go one way, dark ones the other."""
        self.calls += 1
        out: Tensor = self.layers[int(x.mean() > 0)](x.flatten(1))
        return out


def test_what_cannot_run_together_runs_sample_by_sample() -> None:
    model, (x, y) = Branching(), batch()
    names = [name for name, _ in model.named_parameters()]
    found = per_sample_moments(model, names, [(x[:4], y[:4]), (x[4:], y[4:])], negative_log_likelihood)
    assert model.calls == len(x) + 1  # together once, in vain
    for name, p in model.named_parameters():
        losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]
        gradients = [torch.autograd.grad(loss, p, materialize_grads=True)[0] for loss in losses]
        torch.testing.assert_close(found[name], torch.stack(gradients).square().mean(0))


def test_batches_do_not_change_the_fisher() -> None:
    """The trap: squares of a batch's mean gradient depend on the batch size."""
    model, (x, y) = classifier(), batch(12)
    names = [name for name, _ in model.named_parameters()]
    whole = fisher(model, names, [(x, y)])
    parts = fisher(model, names, zip(x.split(5), y.split(5), strict=True))
    for name in names:
        torch.testing.assert_close(whole[name], parts[name])


def test_moments_of_some_parameters_hold_on_to_nothing() -> None:
    """The others require gradients as well, and a sum that knew it would keep every sample's alive."""
    model = classifier()
    found = fisher(model, ["1.weight"], [batch()])
    assert not found["1.weight"].requires_grad


def test_sampled_labels_follow_the_model() -> None:
    model = nn.Linear(1, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.7, 0.2, 0.1]).log())
    x = torch.zeros(4000, 1)
    ((_, labels),) = sampled_labels(model, [(x, torch.zeros(4000).long())], draws=torch.Generator().manual_seed(0))
    torch.testing.assert_close(labels.bincount() / 4000, torch.tensor([0.7, 0.2, 0.1]), atol=0.03, rtol=0)
    ((_, again),) = sampled_labels(model, [(x, labels)], draws=torch.Generator().manual_seed(0))
    assert torch.equal(again, labels)


def test_sampled_labels_are_those_of_the_network_as_it_answers() -> None:
    """In eval mode: neither dropout nor the batch decides, and no statistics move."""
    model, (x, y) = classifier().train(), batch(64)
    before = helpers.copied(dict(model.state_dict()))
    found = [
        list(sampled_labels(model, [(part, y)], draws=torch.Generator().manual_seed(1))) for part in (x, x.clone())
    ]
    assert torch.equal(found[0][0][1], found[1][0][1])
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_number_of_samples_is_chosen_by_the_seed() -> None:
    task = helpers.tasks()[0]
    assert sum(len(y) for _, y in samples_of(task, Fit(), 0)) == len(task.train)
    first, again, other = (torch.cat([x for x, _ in samples_of(task, Fit(seed=s), 0, 20)]) for s in (0, 0, 1))
    assert len(first) == 20
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, torch.cat([x for x, _ in samples_of(task, Fit(), 1, 20)]))


def test_chosen_samples_keep_their_labels() -> None:
    """Images lie in a larger tensor, of which a task has some rows."""
    task = helpers.tasks()[1]
    every, some = (
        [
            (x.tobytes(), y)
            for xs, ys in samples_of(task, Fit(), 0, n)
            for x, y in zip(xs.numpy(), ys.tolist(), strict=True)
        ]
        for n in (None, 30)
    )
    assert len(some) == 30
    assert set(every) >= set(some)


def test_as_many_samples_at_once_as_there_is_memory_for() -> None:
    assert room(torch.device("cpu")) == MEMORY

    class Counted(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x.flatten(1))

    model, (x, y) = Counted(64, 3), batch(7)
    size = 4 * sum(p.numel() for p in model.parameters())
    per_sample_moments(model, ["weight", "bias"], [(x, y)], squared_norm, memory=3 * size)
    assert model.calls == 3  # of three, three and one


def test_wrong_words_are_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'cube'"):
        per_sample_moments(model, ["weight"], [], squared_norm, power="cube")
    with pytest.raises(ValueError, match="'guessed'"):
        fisher(model, ["weight"], [], labels="guessed")


def test_kept_tensors_are_in_the_state_under_their_names() -> None:
    kept = Kept({"0.weight": torch.ones(2), "1.bias": torch.zeros(3)})
    held = kept["0.weight"]
    kept.put({"0.weight": torch.full((2,), 5.0)})
    assert list(kept.state_dict()) == ["0/weight", "1/bias"]
    assert kept["0.weight"].tolist() == [5, 5]
    assert kept["0.weight"] is held


@pytest.mark.parametrize("name", ["ewc", "r-ewc", "imm-mode", "mas", "ssl", "progress-compress"])
def test_samples_that_cannot_be_meant_are_refused_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="samples is how many"):
        registry.build(name, nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4), samples=0)


@pytest.mark.parametrize("name", ["ewc", "r-ewc"])
def test_labels_of_no_kind_are_refused_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="labels are 'true' or 'sampled'"):
        registry.build(name, nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4), labels="some")
