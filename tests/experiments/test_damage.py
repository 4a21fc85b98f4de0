"""Files that are damaged, and disks that are full: the error names the file and says what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.experiments.helpers import results, write_toml
from tests.experiments.test_runner import Interrupted, StopAt
from zeroforget.experiments import archive, disk
from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.folder import Log, read_log
from zeroforget.experiments.report import write_report
from zeroforget.experiments.results import Results, load_runs
from zeroforget.experiments.runner import run
from zeroforget.training.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    """A run that was stopped in its second task."""
    folder = tmp_path_factory.mktemp("stopped")
    experiment = Experiment.load(write_toml(folder, tasks=2, epochs=2), methods=["finetuning"])
    with pytest.raises(Interrupted):
        run(experiment, folder / "out", watch=StopAt(16))
    return experiment, folder / "out"


def copied(stopped: tuple[Experiment, Path], tmp_path: Path) -> tuple[Experiment, Path, Path]:
    """The experiment, a copy of what it left, and the run's folder in it."""
    experiment, left = stopped
    out = Path(shutil.copytree(left, tmp_path / "out"))
    return experiment, out, out / experiment.runs()[0].folder


@pytest.mark.parametrize("content", [b"", b"[]", b'"x"', b"{", b'{"a": "\xff"}'])
@pytest.mark.parametrize("name", ["config.json", "environment.json", "data.json", "tasks/000/task.json"])
def test_a_damaged_file_of_a_run_is_named(
    name: str, content: bytes, stopped: tuple[Experiment, Path], tmp_path: Path
) -> None:
    experiment, out, folder = copied(stopped, tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{folder / name} is damaged: .*; delete (it|the run's folder)"):
        run(experiment, out)


def test_a_record_without_its_figures_is_damaged(stopped: tuple[Experiment, Path], tmp_path: Path) -> None:
    experiment, out, folder = copied(stopped, tmp_path)
    for text, said in (
        ("{}", "it lacks 'structure'"),
        ('{"structure": []}', "it lacks 'name'"),
        ('{"structure": [], "name": 3}', "'name' must be str, not 3"),
    ):
        (folder / "tasks" / "000" / "task.json").write_text(text)
        with pytest.raises(ValueError, match=rf"task\.json is damaged: {said}; delete the run's folder"):
            run(experiment, out)


def test_a_configuration_with_odd_parts_is_another_one(stopped: tuple[Experiment, Path], tmp_path: Path) -> None:
    experiment, out, folder = copied(stopped, tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"regime": 3}))
    with pytest.raises(ValueError, match="regime was 3, now"):
        run(experiment, out)


@pytest.mark.parametrize("place", ["tasks/000/state.safetensors", "learning/001/fit/*.safetensors"])
def test_truncated_tensors_are_named(place: str, stopped: tuple[Experiment, Path], tmp_path: Path) -> None:
    experiment, out, folder = copied(stopped, tmp_path)
    (file,) = folder.glob(place)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{folder / place.split('/')[0]}.* is damaged: .*; delete .* start it again"):
        run(experiment, out)


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match=r"log\.jsonl is no regular file"):
        Log(tmp_path / "log.jsonl")


def test_lines_of_a_log_that_are_no_events_are_left_out(stopped: tuple[Experiment, Path], tmp_path: Path) -> None:
    experiment, out, folder = copied(stopped, tmp_path)
    with (folder / "log.jsonl").open("ab") as file:
        file.write(b'[1]\n"x"\n\xff\xfe\n{"event": "epoch", "task": []}\n')
    Log(folder / "log.jsonl")
    assert all(isinstance(event, dict) for event in read_log(folder / "log.jsonl"))
    assert run(experiment, out)


WRONG: list[tuple[Any, str]] = [
    ([], "holds a list"),
    ("x", "holds a str"),
    ({"accuracy": 3}, "field 'accuracy' must be"),
    ({"accuracy": [["x"], [0.5, 0.75]]}, "field 'accuracy' must be"),
    ({"seconds": [None, 1.0]}, "field 'seconds' must be"),
    ({"options": []}, "field 'options' must be"),
    ({"method": 3}, "field 'method' must be str"),
    ({"seed": "0"}, "field 'seed' must be int"),
    ({"growth": {"a": [1]}}, "1 entries in 'growth' of a"),
    ({"growth": {"a": 1}}, "field 'growth' must be"),
    ({"tasks": [], "accuracy": []}, "without a task"),
    ({"tasks": [{}, {}]}, "'name' of entry 1 of field 'tasks' is missing"),
    ({"overhead": [{}, {}]}, "'training' of entry 1 of field 'overhead' is missing"),
    ({"logs": [{"epochs": 3}, {}]}, "'epochs' of entry 1 of field 'logs' must be"),
    ({"logs": [{}, {}]}, "'epochs' of entry 1 of field 'logs' is missing"),
    ({"unchanged": ["x"]}, "field 'unchanged' must be"),
    ({"what": 1}, "results have no field 'what'"),
]


@pytest.mark.parametrize(("values", "said"), WRONG, ids=[said for _, said in WRONG])
def test_damaged_results_are_named(values: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results().to_dict() | values if isinstance(values, dict) else values))
    for load in (lambda: Results.load(tmp_path), lambda: load_runs([tmp_path]), lambda: archive.load_all([file])):
        with pytest.raises(ValueError) as caught:
            load()
        assert str(caught.value).startswith(f"{file} is damaged: ")
        assert said in str(caught.value)
        assert "delete it and run the experiment again" in str(caught.value)


@pytest.mark.parametrize("runs", [3, [3], [{"logs": [{"epochs": "x"}]}], [{}], None])
def test_a_damaged_archive_is_named(runs: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    archive.save([results()], file)
    file.write_text(json.dumps({"format": archive.FORMAT, "shared": {}, "runs": runs}))
    with pytest.raises(ValueError, match=r"a\.json is damaged: .*; get it again"):
        archive.load(file)
    file.write_bytes(b"\xff" + file.read_bytes())
    with pytest.raises(ValueError, match=r"a\.json is damaged: .*; get it again"):
        archive.load_all([file])


# A full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.usefixtures("full")
def test_a_full_disk_leaves_the_old_file_and_is_told(tmp_path: Path) -> None:
    for path, write in (
        (tmp_path / "a.json", lambda path: disk.write_json(path, {})),
        (tmp_path / "r.html", lambda path: write_report([results()], path)),
    ):
        path.write_text("old")
        with pytest.raises(OSError, match=rf"cannot write {path}: No space left on device; make room and try again"):
            write(path)
        assert path.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "r.html"]


@pytest.mark.usefixtures("full")
def test_a_run_on_a_full_disk_says_how_to_go_on(tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path, tasks=2, epochs=1), methods=["finetuning"])
    with pytest.raises(OSError, match=r"cannot write .*config\.json: No space left on device; make room"):
        run(experiment, tmp_path / "out")


def test_a_checkpoint_on_a_full_disk_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: Checkpoint, tensors: object, facts: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpoint, "save", save)
    experiment = Experiment.load(write_toml(tmp_path, tasks=2, epochs=1), methods=["finetuning"])
    folder = tmp_path / "out" / experiment.runs()[0].folder
    with pytest.raises(OSError, match=rf"cannot write {folder}: No space left .* it goes on where it stopped"):
        run(experiment, tmp_path / "out")


@pytest.mark.parametrize("name", ["tasks/000/state.safetensors", "tasks/000/task.json", "learning"])
def test_a_flipped_byte_anywhere_is_named_and_the_network_not_used(
    name: str, stopped: tuple[Experiment, Path], tmp_path: Path
) -> None:
    experiment, out, folder = copied(stopped, tmp_path)
    file = next(folder.glob("learning/**/*.safetensors")) if name == "learning" else folder / name
    whole = file.read_bytes()
    for place in (0.05, 0.3, 0.6, 0.9, 0.999):
        content = bytearray(whole)
        content[int(place * len(content))] ^= 1
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{file} is damaged: .*; delete"):
            run(experiment, out)


def test_a_changed_figure_of_finished_results_is_noticed_and_older_ones_still_open(tmp_path: Path) -> None:
    made = results()
    made.save(tmp_path)
    values = json.loads((tmp_path / "results.json").read_bytes())
    values["accuracy"][0][0] += 0.001
    (tmp_path / "results.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"results.json is damaged: it is not as it was written"):
        Results.load(tmp_path)
    del values["sha256"]
    (tmp_path / "results.json").write_text(json.dumps(values))
    assert Results.load(tmp_path).accuracy == values["accuracy"]


def test_a_checkpoint_of_an_earlier_version_opens(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "old.safetensors", metadata={"facts": "{}"})
    found = Checkpoint(tmp_path / "old.safetensors").load()
    assert found is not None
    assert torch.equal(found[0]["a"], torch.ones(2))
