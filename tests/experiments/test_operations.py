"""Operations are counted as torch runs them, and counting moves nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.methods import helpers
from zeroforget.experiments.costs import CountingFit, operations_of_a_step, operations_of_an_answer
from zeroforget.methods.base import TaskSpec
from zeroforget.training import Regime


def flat() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=False))


def test_a_linear_network_by_hand() -> None:
    """Two operations a weight forward; backward as many for weights, and for inputs but the first layer's."""
    method = helpers.make("finetuning", flat)
    task = helpers.tasks()[0]
    method.add_task(TaskSpec(task.name, 5))
    first, head = 64 * 16, 16 * 5
    assert operations_of_an_answer(method.predictor(0), helpers.EXAMPLE) == 2 * (first + head)
    assert operations_of_a_step(method, task, 0, "cpu") == 2 * (2 * first + 3 * head)


def test_a_fit_adds_up_all_phases_and_images() -> None:
    task, fit = helpers.tasks()[0], CountingFit(Regime(epochs=2, batch_size=16))
    helpers.make("finetuning", flat).learn(task, fit)
    assert fit.operations == 2 * len(task.train) * 2 * (2 * 64 * 16 + 3 * 16 * 5)
    twice = CountingFit(Regime(epochs=2, batch_size=16))
    helpers.make("packnet", flat).learn(task, twice)
    assert twice.operations == 2 * fit.operations


@pytest.mark.parametrize("name", ["packnet", "hat", "tfm", "lwf", "wsn"])
def test_counting_changes_not_one_bit(name: str) -> None:
    kept = []
    for counting in (False, True):
        method = helpers.make(name)
        for task in helpers.tasks(((0, 1), (2, 3)), 20):
            if counting:
                fit = CountingFit(Regime(lr=0.05, epochs=2, batch_size=16, clip=2.0))
                with helpers.seeded("structure", 0, len(method.specs)):
                    method.learn(task, fit)
                assert fit.operations > 0
            else:
                helpers.learn(method, task, regime=Regime(lr=0.05, epochs=2, batch_size=16, clip=2.0))
        kept.append(helpers.copied(dict(method.state_dict())))
    assert all(torch.equal(tensor, kept[1][name]) for name, tensor in kept[0].items())
