"""Figures of training in TensorBoard and in whatever has wandb's three calls; and the model's card."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.experiments.helpers import write_toml
from tests.store.helpers import write_digits
from zeroforget.cli import app
from zeroforget.store import open_model
from zeroforget.store.report import card
from zeroforget.tracking import tracker


class Calls(ModuleType):
    """A module with the three calls, which writes them down."""

    def __init__(self) -> None:
        super().__init__("tests_tracker")
        self.called: list[tuple[str, dict[str, Any]]] = []

    def init(self, **about: Any) -> None:
        self.called.append(("init", about))

    def log(self, data: dict[str, Any]) -> None:
        self.called.append(("log", data))

    def finish(self) -> None:
        self.called.append(("finish", {}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    module = Calls()
    monkeypatch.setitem(sys.modules, "tests_tracker", module)
    return module


def said(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


def test_learn_tells_tensorboard_and_a_tracker_of_each_epoch_once(tmp_path: Path, calls: Calls) -> None:
    model, logs = tmp_path / "garden", tmp_path / "logs"
    words = ("--size", 8, "--gray", "--epochs", 3, "--log", "tests_tracker", "--tensorboard", logs)
    said("learn", model, write_digits(tmp_path / "photos", (0, 1)), "--task", "letters", *words)
    assert [name for name, _ in calls.called] == ["init", "log", "log", "log", "finish"]
    assert calls.called[0][1]["name"] == "garden-letters"
    assert [data["epoch"] for name, data in calls.called if name == "log"] == [0, 1, 2]
    assert set(calls.called[1][1]) == {"epoch", "loss", "val_loss", "val_accuracy", "lr"}
    (events,) = logs.rglob("events.out.tfevents.*")
    assert events.parent.name == "garden-letters"
    assert events.read_bytes().count(b"val_accuracy") == 3

    text = said("card", model, "-o", tmp_path / "README.md", "--license", "mit")
    assert "wrote" in text
    written = (tmp_path / "README.md").read_text()
    front = dict(line.split(": ", 1) for line in written.split("---")[1].strip().splitlines())
    assert json.loads(front["license"]) == "mit"
    (result,) = json.loads(front["model-index"])[0]["results"]
    (facts,) = open_model(model).tasks
    assert result["metrics"][0]["value"] == facts.accuracy
    assert f"verify . --is {open_model(model).head}" in written
    assert facts.data.pixels in written
    said("card", model, "-o", tmp_path / "README.md")
    (tmp_path / "mine.md").write_text("# mine")
    assert "no card" in str(CliRunner().invoke(app, ["card", str(model), "-o", str(tmp_path / "mine.md")]).exception)
    (model / "README.md").write_text(card(open_model(model)))
    assert open_model(model).verify().holds


def test_run_tells_a_tracker_of_each_run(tmp_path: Path, calls: Calls) -> None:
    file = write_toml(tmp_path, epochs=1, tasks=2)
    words = ("run", file, "--out", tmp_path / "out", "--methods", "finetuning", "--log", "tests_tracker")
    said(*words)
    names = [name for name, _ in calls.called]
    assert (names[0], names[-1], names.count("init"), names.count("finish")) == ("init", "finish", 1, 1)
    assert any("accuracy/task-2" in data for _, data in calls.called)
    said(*words)
    assert [name for name, _ in calls.called].count("init") == 1, "a finished run began again"


def test_a_module_without_the_three_calls_is_refused(tmp_path: Path) -> None:
    for module, why in (("json", "has no init and no log and no finish"), ("gone_x", "Install it")):
        words = ["learn", str(tmp_path / "m"), str(tmp_path), "--task", "a", "--log", module]
        assert why in str(CliRunner().invoke(app, words).exception)


def test_a_module_with_the_three_calls_may_lie_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = "def init(**about): ...\n\n\ndef log(data): ...\n\n\ndef finish(): ...\n"
    (tmp_path / "own_tracker_here.py").write_text(calls)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert tracker("own_tracker_here").__name__ == "own_tracker_here"  # type: ignore[attr-defined]


def test_names_are_text_in_a_card(tmp_path: Path) -> None:
    model = tmp_path / "garden"
    folder = write_digits(tmp_path / "photos", (0, 1))
    (folder / "digit0").rename(folder / "<img src=x>")
    (folder / "digit1").rename(folder / "[b](javascript:c) | d: e")
    said("learn", model, folder, "--task", "letters", "--size", 8, "--gray", "--epochs", 1)
    text = card(open_model(model))
    assert "<img" not in text
    assert "](javascript" not in text.replace("\\]\\(", "")
    assert "\\| d" in text
