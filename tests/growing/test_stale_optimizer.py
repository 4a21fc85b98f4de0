"""An optimizer that does not know the newest task is noticed; one that does is never accused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import grow

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 2


class OldStyle(torch.optim.SGD):
    """Writes through `.data`, past torch's count of changes."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(0.1 * parameter.grad.data)


def learned() -> tuple[GrowingNetwork, torch.optim.Optimizer]:
    """A network with one task, and the optimizer that it was learned with."""
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    net = grow(plain, X, start=0.5)
    net.add_task("first", 2)
    optimizer = torch.optim.SGD(net.newborn(), lr=0.1)
    steps(net, optimizer)
    return net, optimizer


def steps(net: GrowingNetwork, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    net.train()
    for _ in range(count):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X, net.tasks[-1]), Y).backward()
        optimizer.step()


def test_an_optimizer_of_the_task_before_is_noticed_when_the_new_one_is_used_or_followed() -> None:
    net, optimizer = learned()
    net.add_task("second", 2, 0.2)
    steps(net, optimizer)
    with pytest.warns(UserWarning, match=r"task 'second' has gradients, but no step .* from `net.newborn\(\)`"):
        net.eval()(X, "second")
    with pytest.warns(UserWarning, match="task 'second' has gradients"):
        net.dense("second")
    with pytest.warns(UserWarning, match="task 'second' has gradients"):
        net.add_task("third", 2, 0.2)
    assert net.tasks == ("first", "second", "third")


@pytest.mark.parametrize(
    ("kind", "lr"), [(torch.optim.SGD, 0.1), (torch.optim.AdamW, 0.1), (OldStyle, 0.1), (torch.optim.SGD, 1e-20)]
)
def test_an_optimizer_that_knows_the_task_is_not_accused(kind: type[torch.optim.Optimizer], lr: float) -> None:
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(parameters, lr=lr)  # type: ignore[call-arg]

    net, _ = learned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("second", "third"):
            net.add_task(name, 2, 0.1)
            net.eval()(X, name)  # nothing has begun
            steps(net, optimizer(net.newborn()), 1)
            net.eval()(X, name)
        copy.deepcopy(net)(X, "third")
        net.dense("first")
        net.drop_task()
        net(X, "second")
        net.add_task("fourth", 2, 0.1)


def test_a_network_that_was_pickled_before_steps_were_counted_is_used_as_ever() -> None:
    net, optimizer = learned()
    assert net._begun is not None
    net._begun = net._begun[:2]  # type: ignore[assignment]
    net.eval()(X, "first")
    net.add_task("second", 2, 0.2)
    net._begun = net._begun[:2]  # type: ignore[assignment]
    steps(net, optimizer)
    with pytest.warns(UserWarning, match="task 'second' has gradients"):
        net.dense("second")


def test_gradients_that_are_gathered_for_a_step_to_come_are_no_reason_to_warn() -> None:
    net, old = learned()
    net.add_task("second", 2, 0.2)
    new = torch.optim.SGD(net.newborn(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            nn.functional.cross_entropy(net.train()(X, "second"), Y).backward()
            net.eval()(X, "second")
        new.step()
        new.zero_grad()
        net(X, "second")
    net.add_task("third", 2, 0.2)
    nn.functional.cross_entropy(net.train()(X, "third"), Y).backward()
    old.step()
    with pytest.warns(UserWarning, match="task 'third' has gradients"):
        net.eval()(X, "third")
