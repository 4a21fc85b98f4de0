"""Several processes that train one run together: as one would, the same on every one, resumed with the same number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experiments.helpers import write_toml
from tests.store.helpers import QUICK, pictures
from tests.training.ranks import free_port, together
from zeroforget.experiments.experiment import Experiment, RunConfig
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.runner import run
from zeroforget.processes import current
from zeroforget.store import open_model

METHODS = ["tfm", "pulled"]


class Killed(Observer):
    """Ends the second process in the middle of the second task."""

    def progress(self, config: RunConfig, progress: Any, trial: str | None) -> None:
        if current().rank == 0 and (progress.index, progress.epoch) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def ran(toml: Path, out: Path, watch: Observer | None = None, parallel: int = 1) -> list[Any]:
    experiment = Experiment.load(toml, methods=METHODS, changes=["regime.clip=1.0"])
    found = run(experiment, out, watch=watch or Observer(), parallel=parallel)
    return [(each.accuracy, each.unchanged, each.logs[-1]["epochs"][-1]["loss"]) for each in found]


@pytest.mark.parametrize("world", [2, 3])
def test_a_run_of_several_processes_is_the_same_in_each(world: int, tmp_path: Path) -> None:
    toml = write_toml(tmp_path)
    first, *others = together(world, ran, toml, tmp_path / "several")
    assert isinstance(first, list), first
    assert all(other == first for other in others)
    assert all(all(unchanged) for _, unchanged, _ in first[:1])
    folders = sorted((tmp_path / "several").rglob("config.json"))
    assert len(folders) == len(METHODS)
    for file in folders:
        assert json.loads(file.read_text())["processes"] == world
        events = [json.loads(line) for line in (file.parent / "log.jsonl").read_text().splitlines()]
        assert [event["event"] for event in events].count("finished") == 1
        assert [event["event"] for event in events].count("task") == 3
    assert ran(toml, tmp_path / "several") == first, "one process reads what several have finished"


def test_a_killed_process_ends_a_run_and_all_go_on_to_the_same_end(tmp_path: Path) -> None:
    toml = write_toml(tmp_path)
    whole = together(2, ran, toml, tmp_path / "whole")
    dead, left = together(2, ran, toml, tmp_path / "cut", Killed(), lost=[0])
    assert dead is None
    assert left.startswith("PeerLost: process 1 of 2: another process of this training has ended")
    with pytest.raises(
        ValueError, match="was begun by 2 processes and would go on with 1: what they draw would differ"
    ):
        ran(toml, tmp_path / "cut")
    assert together(2, ran, toml, tmp_path / "cut") == whole


def test_runs_beside_each_other_are_not_for_processes_that_share_one(tmp_path: Path) -> None:
    toml = write_toml(tmp_path)
    for said in together(2, ran, toml, tmp_path, None, 2):
        assert "2 processes train one run together: leave out --parallel, or torchrun" in said


def learned(path: Path, data: Path) -> list[Any]:
    model = open_model(path)
    for task, more in (("low", {**QUICK, "shift": 0}), ("middle", {"epochs": 3, "rank": 2, "growth": 0.1})):
        model.learn(data / task, task, progress=False, **more)
    return [(facts.network, facts.accuracy, facts.hash) for facts in model.tasks]


@pytest.mark.parametrize("world", [2, 3])
def test_a_model_is_taught_by_several_processes(world: int, tmp_path: Path) -> None:
    data = pictures(tmp_path / "data")
    first, *others = together(world, learned, tmp_path / "model", data)
    assert isinstance(first, list), first
    assert all(other == first for other in others)
    model = open_model(tmp_path / "model")
    assert model.verify()
    assert [facts.hash for facts in model.tasks] == [entry[2] for entry in first]
    assert first[0][1] > 0.8
    assert not (tmp_path / "model" / ".training").exists()


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2])
def test_torchrun_starts_a_run_and_says_why_it_ends(world: int, tmp_path: Path) -> None:
    toml = write_toml(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    launcher += ["--master-port", str(free_port()), "-m", "zeroforget"]
    words = ["run", str(toml), "--methods", "tfm", "--out", str(tmp_path / "runs")]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("runs are in") == 1, "one process speaks"
    again = subprocess.run([*launcher, *words, "--parallel", "2"], capture_output=True, text=True, check=False)
    assert (again.returncode == 0) is (world == 1), again.stderr
    assert torch.distributed.is_available()
