"""What reaches the disk and when: synced before it is renamed, whole or not at all; and who a folder belongs to."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tests.experiments.helpers import Pulled, three_digits, tiny_net, write_toml
from zeroforget.experiments import disk, folder
from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.folder import OtherConfiguration, environment
from zeroforget.experiments.one_run import save_task
from zeroforget.experiments.runner import run
from zeroforget.methods import TaskSpec
from zeroforget.training import checkpoint
from zeroforget.training.checkpoint import Checkpoint


def test_a_task_is_on_the_disk_before_it_has_its_name_and_then_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, tuple[bool, int]] = {}
    fsync, place = os.fsync, tmp_path / "000"

    def noting(handle: int) -> None:
        facts = os.fstat(handle)
        synced[facts.st_ino] = place.exists(), facts.st_size
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    method = Pulled(tiny_net((1, 8, 8)), three_digits().example())
    method.add_task(TaskSpec("a", 2))
    save_task(place, method, {"name": "a"})
    for file in (place / "state.safetensors", place / "task.json"):
        assert synced[file.stat().st_ino] == (False, file.stat().st_size)  # every byte of it
    assert synced[place.stat().st_ino][0] is False
    assert synced[tmp_path.stat().st_ino][0] is True
    assert [path.name for path in tmp_path.iterdir()] == ["000"]


def test_a_checkpoint_that_the_disk_refuses_says_so_with_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that packs tensors says it in words alone."""

    def refuse(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = Checkpoint(tmp_path / "phase.safetensors")
    kept.save({"a": torch.ones(3)}, {"epoch": 1})
    monkeypatch.setattr(checkpoint, "save_file", refuse)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError) as error:
        kept.save({"a": torch.zeros(3)}, {"epoch": 2})
    assert error.value.errno == errno.ENOSPC
    assert (kept.load() or ({}, {}))[1] == {"epoch": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["phase.safetensors"]


def test_a_checkpoint_that_is_cut_short_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Checkpoint(tmp_path / "phase.safetensors")
    kept.save({"a": torch.ones(3)}, {"epoch": 1})

    def cut(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", cut)
    with pytest.raises(KeyboardInterrupt):
        kept.save({"a": torch.zeros(3)}, {"epoch": 2})
    loaded = kept.load()
    assert loaded is not None
    assert (loaded[0]["a"].tolist(), loaded[1]) == ([1.0, 1.0, 1.0], {"epoch": 1})


def test_text_is_utf_8_wherever_it_is_written(tmp_path: Path) -> None:
    disk.write_text(tmp_path / "a", "98.0 ± 1.4 · ─")
    assert (tmp_path / "a").read_bytes().decode("utf-8") == "98.0 ± 1.4 · ─"


# Whose folder it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("network.width=9", r"network\.width was 8, now 9"),
        ("scenario.images=40", r"scenario\.images was 60, now 40"),
        ("search.halvings=3", r"search\.halvings was 10, now 3"),
        ("pulled.method=finetuning", r"method was \"tests\.experiments\.helpers:Pulled\", now \"finetuning\""),
    ],
)
def test_nothing_that_decides_results_may_change_in_a_folder(change: str, said: str, tmp_path: Path) -> None:
    path = write_toml(tmp_path, tasks=2, epochs=1)
    path.write_text(path.read_text().replace("strength = 0.1\n", ""))
    run(Experiment.load(path, methods=["pulled"]), tmp_path)
    with pytest.raises(OtherConfiguration, match=said):
        run(Experiment.load(path, methods=["pulled"], changes=[change]), tmp_path)


@pytest.mark.parametrize("lost", [("log.jsonl", "tasks"), ("log.jsonl", "results.json"), ("tasks", "results.json")])
def test_whatever_a_run_has_left_holds_its_folder(lost: tuple[str, str], tmp_path: Path) -> None:
    path = write_toml(tmp_path, tasks=2, epochs=1)
    experiment = Experiment.load(path, methods=["finetuning"])
    run(experiment, tmp_path)
    for name in lost:
        place = tmp_path / experiment.runs()[0].folder / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    with pytest.raises(OtherConfiguration, match=r"regime\.lr was 0\.1, now 0\.2"):
        run(Experiment.load(path, methods=["finetuning"], changes=["regime.lr=0.2"]), tmp_path)


def test_a_run_that_never_began_does_not_hold_its_folder_for_other_data(tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path, tasks=2, epochs=1), methods=["finetuning"])
    place = tmp_path / experiment.runs()[0].folder
    place.mkdir(parents=True)
    for name in ("config.json", "data.json", "environment.json"):
        (place / name).write_text("{}")
    run(experiment, tmp_path)
    assert len(json.loads((place / "data.json").read_text())["tasks"]) == 2


# Where it was made -------------------------------------------------------------------------------------------------


def git(place: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=place, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_source_and_marked_where_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZEROFORGET_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    source = tmp_path / "folder.py"
    source.write_text("one")
    monkeypatch.setattr(folder, "__file__", str(source))
    assert folder._commit.__wrapped__() is None  # no checkout
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert folder._commit.__wrapped__() == commit
    source.write_text("two")
    assert folder._commit.__wrapped__() == f"{commit}+"
    monkeypatch.setenv("ZEROFORGET_COMMIT", "told")
    assert folder._commit.__wrapped__() == "told"


@pytest.mark.parametrize("program", ["lib/zeroforget/__main__.py", "bin/zeroforget"])
def test_the_environment_has_the_commit_and_the_command_as_it_was_typed(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_commit", lambda: "abc")
    monkeypatch.setattr(sys, "argv", [program, "run", "a file.toml"])
    made = environment()
    assert (made["commit"], made["command"]) == ("abc", "zeroforget run 'a file.toml'")
    assert (made["torch"], made["threads"]) == (torch.__version__, torch.get_num_threads())


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 250 + ".md")  # fits, but not with the ending that it has while it is written
    with pytest.raises(OSError, match="File name too long") as caught:
        disk.write_text(long, "text")
    assert caught.value.filename == str(long)
    assert list(tmp_path.iterdir()) == []
