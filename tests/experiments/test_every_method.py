"""Every method there is, through the runner: stopped between tasks and within one, its results stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zeroforget.experiments.experiment import Experiment, RunConfig
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.results import Results
from zeroforget.experiments.runner import run
from zeroforget.methods import registry
from zeroforget.methods.tfm import Tfm
from zeroforget.training import Progress

OURS = [*registry.names(), "zeroforget.experiments.alone:Alone", "zeroforget.experiments.again:Again"]


class Interrupted(BaseException):
    """As abrupt as Ctrl-C."""


class StopTwice(Observer):
    """Stops after the first task; then, started again, in the middle of the second."""

    every = 0.0

    def __init__(self) -> None:
        self.stopped = 0

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        if record["index"] == 0:
            self.stopped += 1
            raise Interrupted

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        if self.stopped == 1 and progress.epoch == 1 and progress.step == 2:
            self.stopped += 1
            raise Interrupted


def experiment(method: str, **more: Any) -> Experiment:
    raw = {
        "name": "each",
        "scenario": {"name": "tests.experiments.helpers:three_digits", "tasks": 3, "images": 40},
        "network": {"name": "small", "width": 0.25},
        "methods": [method],
        "regime": {"epochs": 2, "batch_size": 16},
    }
    return Experiment.from_dict(raw | more)


def stopped_twice(wanted: Experiment, out: Path) -> Results:
    watch = StopTwice()
    for _ in range(2):
        with pytest.raises(Interrupted):
            run(wanted, out, watch=watch)
    return run(wanted, out)[0]


@pytest.mark.parametrize("method", OURS)
def test_stopped_and_started_again_it_finds_the_same(method: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    wanted = experiment(method)
    (whole,) = run(wanted, tmp_path / "whole")
    assert stopped_twice(wanted, tmp_path / "cut").comparable() == whole.comparable()
    if registry.find(method)[0].zero_forgetting:
        assert whole.unchanged == [True, True, True]
        assert whole.forgetting == [0.0, 0.0, 0.0]
    assert bool(whole.growth) == issubclass(registry.find(method)[0], Tfm)
    assert all(width == sorted(width) and len(width) == 3 for width in whole.growth.values())
    assert whole.parameters == sorted(whole.parameters)


@pytest.mark.soak
@pytest.mark.parametrize("method", [name for name in OURS if registry.find(name)[0].tradeoff])
def test_every_trade_off_can_be_searched_and_resumed(method: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    search = {"enabled": True, "learning_rates": [0.1, 0.02], "halvings": 3, "drop": 0.05}
    wanted = experiment(method, search=search)
    (whole,) = run(wanted, tmp_path / "whole")
    found = whole.logs[1]["notes"]["hyperparameters"]
    assert found["option"] == registry.find(method)[0].tradeoff
    assert found["value"] <= wanted.methods[0].all_options()[found["option"]]
    assert stopped_twice(wanted, tmp_path / "cut").comparable() == whole.comparable()
