"""Runs of several experiments for a limited time."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from benchmarks import pool
from benchmarks.pool import Job
from zeroforget.experiments import archive
from zeroforget.experiments.experiment import Experiment

ROOT = Path(__file__).parents[2]

TOML = """
about = "small"
scenario = "digits/5"
network = {{ name = "small", width = 0.25 }}
seeds = [0]

[regime]
epochs = {epochs}
patience = 100000

[methods]
finetuning = {{}}
freezing = {{}}
packnet = {{ retrain_epochs = 1 }}
"""


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "experiments").mkdir()
    for name, epochs in (("short", 1), ("long", 100_000)):
        (tmp_path / "experiments" / f"{name}.toml").write_text(TOML.format(epochs=epochs))
    return argparse.Namespace(
        minutes=10.0,
        parallel=2,
        set=["regime.batch_size=40"],
        device=None,
        data_root=None,
        out=tmp_path / "runs",
        results=tmp_path / "finished",
    )


def test_what_ends_is_written_down(args: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    """A change of a method's option is that method's alone."""
    args.set.append("packnet.retrain_epochs=2")
    assert pool.run(Job.parse("short:finetuning,packnet"), args) == []
    found = {run.method: run for run in archive.load(args.results / "short.json")}
    assert found.keys() == {"finetuning", "packnet"}
    assert {run.regime["batch_size"] for run in found.values()} == {40}
    assert found["packnet"].options["retrain_epochs"] == 2
    said = capsys.readouterr().out
    assert said.index("finetuning begins") < said.index("packnet begins")
    assert said.count("is finished") == 2

    # What is among the results is not run again, though its folder is gone, and others join it.
    shutil.rmtree(args.out)
    args.set.pop()
    assert pool.run(Job.parse("short:finetuning,freezing:0"), args) == []
    assert "finetuning seed 0 is there already" in capsys.readouterr().out
    assert not list(args.out.rglob("finetuning"))
    assert [run.method for run in archive.load(args.results / "short.json")] == ["finetuning", "freezing", "packnet"]


def test_what_does_not_end_in_time_is_stopped_and_told(args: argparse.Namespace) -> None:
    args.minutes, args.parallel = 0.03, 1
    jobs = [*Job.parse("long:finetuning"), *Job.parse("short:finetuning")]
    assert pool.run(jobs, args) == jobs
    assert not args.results.exists()


def test_what_would_come_too_late_is_not_begun(args: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    args.parallel = 1
    jobs = [*Job.parse("short:finetuning@5"), *Job.parse("short:freezing@0.001")]
    assert pool.run(jobs, args) == jobs[1:]
    assert not (args.out / "short-freezing.log").exists()
    assert "freezing is not begun" in capsys.readouterr().out


def test_a_run_that_fails_is_not_finished(args: argparse.Namespace) -> None:
    job = Job("short", "nonsense")
    assert pool.run([job], args) == [job]
    assert "nonsense" in (args.out / "short-nonsense.log").read_text()


@pytest.mark.parametrize("text", ["short", "short:", "missing:tfm"])
def test_jobs_are_checked_before_anything_begins(text: str, args: argparse.Namespace) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME:METHOD"):
        Job.parse(text)
    for odd in ("short:freezing@soon", "short:freezing:one", "short:freezing:0,"):
        with pytest.raises(argparse.ArgumentTypeError, match="SEEDS or @MINUTES"):
            Job.parse(odd)


def test_a_list_of_jobs_is_read_seed_by_seed(args: argparse.Namespace, tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# what decides most\nshort:freezing,finetuning:1,0 # two seeds\n\n")
    jobs = [job for part in pool.listed(str(tmp_path / "list")) for job in part]
    assert [(job.method, job.seed) for job in jobs] == [
        ("freezing", 1),
        ("finetuning", 1),
        ("freezing", 0),
        ("finetuning", 0),
    ]
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be read"):
        pool.listed(str(tmp_path / "nothing"))


def test_the_list_of_what_is_still_to_be_run_names_methods_and_seeds_of_its_files() -> None:
    jobs = [job for part in pool.listed(str(ROOT / "benchmarks" / "to_run.txt")) for job in part]
    assert len(jobs) > 50
    assert len(set(jobs)) == len(jobs)
    for job in jobs:
        experiment = Experiment.load(ROOT / "experiments" / f"{job.experiment}.toml")
        assert job.method in {choice.label for choice in experiment.methods}, job.title
        assert job.seed in experiment.seeds, job.title
