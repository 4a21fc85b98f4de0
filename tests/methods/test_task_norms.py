"""Which tensors are each task's own, and that a network made of them stands alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.methods import helpers
from zeroforget.methods.packnet import PackNet
from zeroforget.methods.per_task import norm_tensors, plain_copy
from zeroforget.methods.piggyback import Piggyback


def norms_net() -> nn.Module:
    """Normalization over groups and over features, which have no statistics; and one with affine parameters alone."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.InstanceNorm2d(6, affine=True),
        nn.Flatten(),
        nn.Linear(216, 8),
        nn.LayerNorm(8),
        nn.ReLU(),
    )


def test_every_kind_of_normalization_is_found() -> None:
    assert set(norm_tensors(norms_net())) == {f"{layer}.{part}" for layer in (1, 3, 6) for part in ("weight", "bias")}
    assert {name.split(".")[1] for name in norm_tensors(helpers.normed_net())} == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


@pytest.mark.parametrize("name", ["packnet", "piggyback"])
def test_normalization_without_statistics_is_learned_anew_for_each_task_too(name: str) -> None:
    method = helpers.make(name, norms_net)
    assert isinstance(method, PackNet | Piggyback)
    sequence, then = helpers.tasks(((0, 1), (2, 3, 4)), 12), []
    for k, task in enumerate(sequence):
        helpers.learn(method, task, regime=replace(helpers.REGIME, epochs=2))
        then.append(helpers.answers(method, k, task))
    first, second = method.norms.read(0), method.norms.read(1)
    assert not any(torch.equal(first[key], second[key]) for key in norm_tensors(method.net))
    assert torch.equal(helpers.answers(method, 0, sequence[0]), then[0])


def test_a_copy_to_serve_has_memory_of_its_own_and_wants_no_gradient() -> None:
    net = helpers.normed_net().train()
    before = helpers.copied(dict(net.state_dict()))
    twin = plain_copy(net, {"1.running_mean": torch.full((8,), 3.0)})
    assert torch.equal(twin.get_buffer("1.running_mean"), torch.full((8,), 3.0))
    assert not any(p.requires_grad for p in twin.parameters())
    assert not any(module.training for module in twin.modules())
    assert {t.data_ptr() for t in twin.state_dict().values()}.isdisjoint(
        t.data_ptr() for t in net.state_dict().values()
    )
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    assert all(torch.equal(t, before[key]) for key, t in net.state_dict().items())
