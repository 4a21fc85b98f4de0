"""Runs at the same time: the same bits as one after another, however they are stopped; those that die are explained."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experiments.helpers import write_toml
from zeroforget.experiments.experiment import Experiment, RunConfig
from zeroforget.experiments.folder import OtherConfiguration, read_log
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.parallel import _cause
from zeroforget.experiments.results import Results, load_runs
from zeroforget.experiments.runner import Failed, run
from zeroforget.methods import Method
from zeroforget.training import Progress

FAILING = """
[methods.exploding]
method = "tests.experiments.helpers:Exploding"

[methods.killed]
method = "tests.experiments.test_parallel:Killed"

[methods.broken]
method = "tests.experiments.test_parallel:Broken"
"""


class Killed(Method):
    """Dies as of memory that ran out."""

    def after_step(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Broken(Method):
    """Has a mistake."""

    def after_step(self) -> None:
        raise RuntimeError("a mistake in a method")


class Seen(Observer):
    """Writes down what happens to which run, and who was under way together."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.running: set[Path] = set()
        self.most = 0

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        self.events.append(("begins", config.choice.label))
        self.running.add(config.folder)
        self.most = max(self.most, len(self.running))

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        assert config.folder in self.running

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        self.events.append(("task", config.choice.label))

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        self.events.append(("repeated" if repeated else "done", config.choice.label))
        self.running.discard(config.folder)

    def run_failed(self, config: RunConfig, error: Exception) -> None:
        self.events.append(("failed", config.choice.label))
        self.running.discard(config.folder)


def files(out: Path) -> dict[str, bytes]:
    """What is on disk, less times and where it was made."""
    return {
        str(path.relative_to(out)): path.read_bytes() if path.suffix == ".safetensors" else b""
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def epochs(out: Path) -> list[list[dict[str, Any]]]:
    return [
        [{k: v for k, v in event.items() if k != "seconds"} for event in read_log(log) if event["event"] == "epoch"]
        for log in sorted(out.rglob("log.jsonl"))
    ]


def test_each_that_fails_is_named_and_the_others_finish(tmp_path: Path) -> None:
    experiment = Experiment.load(
        write_toml(tmp_path, epochs=1, more=FAILING), methods=["exploding", "killed", "broken", "finetuning"]
    )
    seen = Seen()
    with pytest.raises(Failed) as caught:
        run(experiment, tmp_path / "out", parallel=2, watch=seen)
    said = str(caught.value)
    assert said.startswith("3 of 4 runs failed, the others are finished:\n")
    assert "exploding" in said
    assert "loss became inf" in said
    assert "killed (SIGKILL), as a system does that runs out of memory. Start it again with a lower --parallel" in said
    assert "RuntimeError: a mistake in a method" in said  # with its traceback: this is no mistake of the user's
    assert "in after_step" in said
    assert sorted(label for event, label in seen.events if event == "failed") == ["broken", "exploding", "killed"]
    assert [r.method for r in load_runs([tmp_path / "out"])] == ["finetuning"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "exit code 1. If a script of yours started it, call run(..., parallel=N) under `if __name__ == "),
        (143, "was asked to end (SIGTERM)"),
        (-11, "died of SIGSEGV. If memory was short: start it again with a lower --parallel"),
    ],
)
def test_a_process_that_ends_without_a_word_is_explained(code: int, said: str) -> None:
    assert said in _cause(code)


def test_another_configuration_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=1)
    run(Experiment.load(path, methods=["pulled"]), tmp_path / "out")
    seen = Seen()
    with pytest.raises(OtherConfiguration, match=r"regime\.lr was 0\.1, now 0\.2"):
        run(Experiment.load(path, changes=["regime.lr=0.2"]), tmp_path / "out", parallel=2, watch=seen)
    assert not seen.events


def test_the_number_of_runs_at_a_time_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        run(Experiment.load(write_toml(tmp_path)), tmp_path, parallel=0)


class Stop(BaseException):
    """As abrupt as Ctrl-C."""


class StopAfter(Observer):
    """Raises once so many tasks are learned and somebody is learning another."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        self.tasks -= 1

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        if self.tasks <= 0:
            raise Stop


@pytest.mark.parametrize(
    "stopped", [pytest.param(True, id="stopped"), pytest.param(False, id="in one go", marks=pytest.mark.soak)]
)
def test_runs_side_by_side_find_the_same_bits_in_the_same_files(stopped: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    experiment = Experiment.load(write_toml(tmp_path, epochs=20))
    serial = run(experiment, tmp_path / "serial")
    if stopped:
        with pytest.raises(Stop):
            run(experiment, tmp_path / "parallel", parallel=2, watch=StopAfter(2))
        assert not multiprocessing.active_children()
        assert len(list((tmp_path / "parallel").rglob("results.json"))) < 2
    seen = Seen()
    parallel = run(experiment, tmp_path / "parallel", parallel=2, watch=seen)
    assert [r.comparable() for r in parallel] == [r.comparable() for r in serial]
    assert files(tmp_path / "parallel") == files(tmp_path / "serial")
    assert epochs(tmp_path / "parallel") == epochs(tmp_path / "serial")
    assert stopped or seen.most == 2
    assert not multiprocessing.active_children()
    again = Seen()
    assert run(experiment, tmp_path / "parallel", parallel=2, watch=again) == parallel
    assert [event for event, _ in again.events] == ["repeated"] * 2


def command(toml: Path, out: Path) -> subprocess.Popen[str]:
    """`zeroforget run --parallel 2` in a process group of its own, as a terminal starts it."""
    words = ["run", str(toml), "--out", str(out), "--parallel", "2"]
    program = "import sys; from zeroforget.cli import main; sys.argv[0] = 'zeroforget'; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
    )


def begun(process: subprocess.Popen[str], out: Path) -> list[int]:
    """Wait until both runs have finished an epoch; returns their processes."""
    for _ in range(1200):
        assert process.poll() is None, process.communicate()[0]
        if len(list(out.rglob("phase-000.safetensors"))) == 2:
            return [json.loads(lock.read_text())["pid"] for lock in out.rglob(".lock")]
        time.sleep(0.05)
    raise AssertionError("no run began")


def gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        for _ in range(200):
            os.kill(pid, 0)
            time.sleep(0.05)
        return False
    return True


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c"),
        pytest.param(signal.SIGKILL, -9, id="kill", marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, 143, id="term", marks=pytest.mark.soak),
    ],
)
def test_a_signal_ends_all_processes_and_leaves_everything_resumable(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    toml, out = write_toml(tmp_path, epochs=100000), tmp_path / "out"
    process = command(toml, out)
    children = begun(process, out)
    assert len(set(children)) == 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C in a terminal goes to all of them
    else:
        process.send_signal(number)
    said = process.communicate(timeout=30)[0]
    assert process.returncode == code
    assert "Traceback" not in said
    assert all(gone(child) for child in children)
    assert len(list(out.rglob("phase-000.safetensors"))) == 2
