"""Learners that train side by side on a GPU, at the same time, are what they would have become alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from zeroforget.data import Task, scenario
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.finetuning import Finetuning
from zeroforget.training import Fit, Regime
from zeroforget.training.graphs import lanes
from zeroforget.training.seeding import seeded


def test_without_a_gpu_and_alone_there_are_no_lanes() -> None:
    draws = torch.get_rng_state()
    for lane in [*lanes(torch.device("cpu"), 3), *lanes(torch.device("cuda"), 1)]:
        with lane():
            assert torch.equal(torch.get_rng_state(), draws)


def learner(task: Task, width: int) -> Finetuning:
    with seeded("net", width):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 32))
        method = Finetuning(net, torch.zeros(2, 1, 8, 8)).to("cuda")
        method.add_task(TaskSpec(task.name, len(task.classes)))
    return method


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("capture", [True, False])
def test_side_by_side_as_alone(capture: bool) -> None:
    task = scenario("digits/5", seed=0).tasks[0]
    regime = Regime(epochs=4, device="cuda", capture=capture)
    widths = (48, 256, 2048)
    together = [learner(task, width) for width in widths]
    before = torch.cuda.get_rng_state()
    logs = Fit(regime).race(together, task, 0)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for phase, (width, found, log) in enumerate(zip(widths, together, logs, strict=True)):
        alone = learner(task, width)
        expected = Fit(regime, _phases=Counter({0: phase}))(alone, task, 0)
        assert [epoch.loss for epoch in log.epochs] == [epoch.loss for epoch in expected.epochs]
        state = alone.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())
