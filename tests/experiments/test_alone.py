"""A network of its own for each task: each begins where the first began, and none knows of another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.experiments.helpers import three_digits, tiny_net
from zeroforget.experiments.alone import Alone
from zeroforget.methods.base import Overhead, TaskSpec
from zeroforget.training import Fit, Regime
from zeroforget.training.seeding import seeded


def alone() -> Alone:
    with seeded("net"):
        return Alone(tiny_net((1, 8, 8)), three_digits().example())


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_every_task_begins_at_the_same_network_and_leaves_it_as_it_was() -> None:
    method, tasks = alone(), three_digits().tasks
    untrained = state(method.net)
    learned: list[dict[str, Tensor]] = []
    for index, task in enumerate(tasks[:2]):
        method.add_task(TaskSpec(task.name, 2))
        assert equal(state(method.columns[index]), untrained)
        head = state(method.heads[index])
        Fit(Regime(epochs=1, lr=0.1))(method, task, index)
        learned.append(state(method.columns[index]))
        assert not equal(learned[index], untrained)
        assert not equal(state(method.heads[index]), head)
    assert equal(state(method.net), untrained)
    assert equal(state(method.columns[0]), learned[0])


def test_what_trains_is_the_newest_network_with_its_head() -> None:
    method = alone()
    for name in ("a", "b"):
        method.add_task(TaskSpec(name, 2))
    newest = {*method.columns[1].parameters(), *method.heads[1].parameters()}
    assert set(method.trainable()) == newest
    assert set(method.moving()) == {
        *(f"columns.1.{name}" for name in method.columns[1].state_dict()),
        *(f"heads.1.{name}" for name in method.heads[1].state_dict()),
    }
    method.drop_task()
    assert (len(method.columns), len(method.heads), len(method.specs)) == (1, 1, 1)


def test_all_networks_but_one_are_beside_the_network() -> None:
    method = alone()
    one = 32 * sum(parameter.numel() for parameter in method.net.parameters())
    for extra in (0, one, 2 * one):
        method.add_task(TaskSpec("a", 2))
        assert method.overhead() == Overhead(training=extra, inference=extra)
