"""What a network's owner froze stays as it was given, whatever the method does with the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.methods import helpers
from zeroforget.methods import Method, find, names
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.columns import Pnn
from zeroforget.methods.packnet import PackNet
from zeroforget.methods.per_task import maskable
from zeroforget.methods.piggyback import Piggyback
from zeroforget.methods.progress_compress import ProgressCompress
from zeroforget.methods.tfm import Tfm

SHORT = replace(helpers.REGIME, epochs=2, options={"momentum": 0.9, "weight_decay": 0.01})
NAMES = [name for name in names() if not issubclass(find(name)[0], Tfm)]


def frozen_net(*layers: int) -> nn.Module:
    """A network some of whose layers are frozen; the first one unless told."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 80), nn.BatchNorm1d(80), nn.ReLU(), nn.Linear(80, 60)
    )
    for layer in layers or (1,):
        net[layer].requires_grad_(False)
    return net


def frozen(net: nn.Module) -> dict[str, Tensor]:
    """Its frozen parameters as they are."""
    return {name: p.detach().clone() for name, p in net.named_parameters() if not p.requires_grad}


def after_tasks(name: str, net: nn.Module, **options: object) -> Method:
    """The method when it has learned three short tasks."""
    method = helpers.make(name, lambda: net, **options)
    sequence = helpers.tasks(((0, 1), (2, 3, 4), (5, 6)), 12)
    for k, task in enumerate(sequence):
        helpers.learn(method, task, sequence[:k], regime=SHORT)
    return method


def holds(net: nn.Module, given: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(net.get_parameter(n), t) and not net.get_parameter(n).requires_grad for n, t in given.items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_layer_does_not_move_by_a_bit_and_the_others_learn(name: str) -> None:
    net = frozen_net()
    given, free = frozen(net), net.get_parameter("6.weight").detach().clone()
    assert given.keys() == {"1.weight", "1.bias"}
    method = after_tasks(name, net)
    assert holds(method.net, given)
    learned = [p for n, p in method.net.named_parameters() if n.startswith("6.") and p.dim() > 1]
    assert learned
    assert all(p.shape != free.shape or not torch.equal(p, free) for p in learned)


@pytest.mark.parametrize("name", NAMES)
def test_a_network_that_is_frozen_as_a_whole_still_serves_its_tasks(name: str) -> None:
    net = frozen_net(1, 3, 4, 6)
    given = frozen(net)
    method = after_tasks(name, net, **({"full": True} if name == "pnn" else {}))
    assert holds(method.net, given)
    assert helpers.answers(method, 2, helpers.tasks()[2]).isfinite().all()


def test_packnet_and_piggyback_mask_only_what_learns() -> None:
    given = frozen(frozen_net())
    assert maskable(frozen_net()).keys() == {"3.weight", "6.weight"}
    for name in ("packnet", "piggyback"):
        method = after_tasks(name, frozen_net())
        assert isinstance(method, PackNet | Piggyback)
        for task in range(3):
            assert holds(method.task_net(task), given)


@pytest.mark.parametrize("full", [True, False])
def test_every_column_of_pnn_has_the_frozen_layers_as_given(full: bool) -> None:
    net = frozen_net()
    given = frozen(net)
    method = after_tasks("pnn", net, full=full)
    assert isinstance(method, Pnn)
    for task in range(3):
        assert holds(method.column(task), given)
    assert method.column(1)[3].weight.requires_grad  # type: ignore[index]
    assert (method.net[6].out_features == 60) == full  # type: ignore[index]
    assert method.column(2)[1].weight is method.net[1].weight  # type: ignore[index]
    column, laterals = (sum(t.numel() for t in part.parameters()) for part in (method.net, method.laterals))
    statistics = 32 * 2 * method.net[4].num_features + 64  # type: ignore[index, operator]
    shared = sum(t.numel() for t in given.values())
    assert method.overhead().inference == 2 * (32 * (column - shared) + statistics) + 32 * laterals
    twin = helpers.make("pnn", lambda: frozen_net(), full=full)
    twin.replay(method.structure())
    twin.load_state_dict(method.state_dict())
    assert torch.equal(helpers.answers(twin, 2, helpers.tasks()[2]), helpers.answers(method, 2, helpers.tasks()[2]))


def test_all_columns_with_what_they_share_fit_into_the_network() -> None:
    net = frozen_net()
    method = helpers.make("pnn", lambda: net)
    for name in "abcde":
        method.add_task(TaskSpec(name, 10))
    counted = {id(p): p.numel() for n, p in method.named_parameters() if not n.startswith("heads")}
    assert sum(counted.values()) <= sum(p.numel() for p in net.parameters())


def test_frozen_layers_too_wide_for_the_budget_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"frozen layers keep their width.*full=True"):
        helpers.make("pnn", lambda: frozen_net(3, 6))


def test_the_active_column_starts_with_the_frozen_layers_as_given() -> None:
    net = frozen_net()
    method = after_tasks("progress-compress", net)
    assert isinstance(method, ProgressCompress)
    assert holds(method.active, frozen(net))
    assert not torch.equal(method.active.get_parameter("3.weight"), net.get_parameter("3.weight"))
