"""Runs on a real Ray cluster of three nodes on this machine: the bits of serial ones, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experiments.helpers import write_toml
from tests.experiments.test_parallel import Seen, epochs, files
from zeroforget.experiments.cluster import Cluster
from zeroforget.experiments.experiment import Experiment, RunConfig
from zeroforget.experiments.folder import read_log
from zeroforget.experiments.results import Results
from zeroforget.experiments.runner import Failed, run
from zeroforget.training import Progress

ray = pytest.importorskip("ray", reason="Ray is large, and no part of 'all': pip install 'zeroforget[ray]'")
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("ray")]
SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head that trains nothing, and two that train one run each."""
    from ray.cluster_utils import Cluster as Nodes

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "disabled")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Nodes(initialize_head=True, head_node_args={**SMALL, "num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(**SMALL)
    yield made
    ray.shutdown()
    made.shutdown()
    patch.undo()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class KillANode(Seen):
    """Kills the node that a run is learning its second task on, once, and brings another."""

    def __init__(self, nodes: Any) -> None:
        super().__init__()
        self.nodes, self.killed = nodes, False
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        if progress.index == 1 and progress.last is not None and not self.killed:
            self.killed = True
            self.nodes.remove_node(self.nodes.worker_nodes.copy().pop(), allow_graceful=False)
            self.nodes.add_node(**SMALL)


def test_a_node_is_killed_and_the_bits_are_those_of_serial_runs(nodes: Any, tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path, epochs=200))
    serial = run(experiment, tmp_path / "serial")
    seen = KillANode(nodes)
    found = run(experiment, tmp_path / "hosts", cluster=Cluster(nodes.address), watch=seen)
    assert [r.comparable() for r in found] == [r.comparable() for r in serial]
    assert files(tmp_path / "hosts") == files(tmp_path / "serial")
    assert epochs(tmp_path / "hosts") == epochs(tmp_path / "serial")
    assert seen.most == 2
    assert [text for text in seen.notices if "its host or its process died" in text and "goes on elsewhere" in text]
    events = [event["event"] for log in (tmp_path / "hosts").rglob("log.jsonl") for event in read_log(log)]
    assert events.count("started") + events.count("resumed") == 3, "one of two was begun twice"
    assert sum(event == "done" for event, _ in seen.events) == 2
    again = Seen()
    assert run(experiment, tmp_path / "hosts", cluster=Cluster(nodes.address), watch=again) == found
    assert [event for event, _ in again.events] == ["repeated"] * 2
    assert not list((tmp_path / "hosts").glob(".shared*"))


def test_each_that_fails_is_named_and_the_others_finish(nodes: Any, tmp_path: Path) -> None:
    more = "".join(
        f'\n[methods.{name}]\nmethod = "tests.experiments.{place}"\n'
        for name, place in (("exploding", "helpers:Exploding"), ("killed", "test_parallel:Killed"))
    )
    experiment = Experiment.load(write_toml(tmp_path, epochs=1, more=more), methods=["exploding", "killed", "pulled"])
    with pytest.raises(Failed) as caught:
        run(experiment, tmp_path, cluster=Cluster(nodes.address))
    said = str(caught.value)
    assert said.startswith("2 of 3 runs failed, the others are finished:\n")
    assert "loss became inf" in said
    assert "its host or its process died 6 times" in said
    assert [found.method for found in caught.value.results] == ["pulled"]


def test_ctrl_c_ends_all_and_the_same_command_goes_on(nodes: Any, tmp_path: Path) -> None:
    toml, out = write_toml(tmp_path, epochs=200), tmp_path / "out"
    words = ["run", toml, "--out", out, "--ray", nodes.address, "--set", "regime.patience=10000"]
    began = subprocess.Popen(
        [sys.executable, "-m", "zeroforget", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
    )
    for _ in range(600):
        if len(list(out.rglob("phase-000.safetensors"))) == 2 or began.poll() is not None:
            break
        time.sleep(0.1)
    os.killpg(began.pid, signal.SIGINT)
    said = began.communicate(timeout=60)[0]
    assert began.returncode == 130, said
    assert "stopped. The same command goes on where it stopped" in said
    assert "Traceback" not in said
    sizes = [log.stat().st_size for log in out.rglob("log.jsonl")]
    time.sleep(1.0)
    assert [log.stat().st_size for log in out.rglob("log.jsonl")] == sizes, "nothing goes on there"
    changes = ["regime.patience=10000"]
    seen = Steps()
    run(Experiment.load(toml, changes=changes), out, cluster=Cluster(nodes.address), watch=seen)
    assert seen.first
    assert min(seen.first.values()) > 0, "no epoch is learned twice"


class Steps(Seen):
    """The first epoch of which each run tells."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Path, float] = {}

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        self.first.setdefault(config.folder, progress.index * progress.epochs + progress.epoch)


def test_a_host_that_does_not_see_the_folder_says_so(nodes: Any, tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path, epochs=1), methods=["pulled"], seeds=[0, 1])
    work = Elsewhere()
    engine = Cluster(nodes.address).engine(work, tmp_path / "out", None, Seen())
    with engine.opened():
        next((tmp_path / "out").glob(".shared-*")).rename(tmp_path / "away")
        job = engine.start(experiment.runs()[0], Seen())
        done: list[Any] = []
        while not done:
            done = engine.ended(Seen())
    assert done == [job]
    assert "--out must be a folder that all hosts share" in job.outcome


class Elsewhere:
    """Work that is never begun."""

    def __call__(self, config: RunConfig, watch: object) -> Results:
        raise AssertionError
