"""A run that goes on must find the data it was begun with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.data import helpers
from tests.experiments.helpers import three_digits
from tests.experiments.test_runner import Interrupted, StopAt
from zeroforget.data import Scenario, Split
from zeroforget.experiments.comparability import data_changes, describe_data
from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.folder import OtherConfiguration, OtherData
from zeroforget.experiments.runner import run


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZEROFORGET_CACHE", str(tmp_path / "cache"))
    for label in range(4):
        for place in range(6):
            helpers.picture(tmp_path / "photos" / f"class{label}" / f"{place}.jpg", 10 * label + place)
    return tmp_path / "photos"


def begun(photos: Path, out: Path, method: str = "finetuning") -> Experiment:
    """An experiment that was stopped in its first task."""
    experiment = Experiment.from_dict(
        {
            "name": "short",
            "scenario": {"name": "photos", "data": f"folder:{photos}", "tasks": 2, "size": 8, "shuffle": False},
            "network": {"name": "tests.experiments.helpers:tiny_net"},
            "methods": [method],
            "regime": {"epochs": 2, "batch_size": 8},
        }
    )
    with pytest.raises(Interrupted):
        run(experiment, out, watch=StopAt(3))
    return experiment


def test_it_goes_on_with_the_same_data_elsewhere(photos: Path, tmp_path: Path) -> None:
    experiment = begun(photos, tmp_path / "out")
    shutil.rmtree(tmp_path / "cache")
    for file in photos.rglob("*.jpg"):
        file.touch()  # as a copy does
    assert len(run(experiment, tmp_path / "out")[0].tasks) == 2


def test_a_new_class_is_refused(photos: Path, tmp_path: Path) -> None:
    experiment = begun(photos, tmp_path / "out")
    shutil.copytree(photos / "class3", photos / "class11")
    said = r"begun with other data \(task 'photos-1' had the classes class0, class1, now class0, class1, class11; "
    with pytest.raises(OtherData, match=said):
        run(experiment, tmp_path / "out")
    shutil.rmtree(photos / "class11")
    assert run(experiment, tmp_path / "out")


def test_more_images_and_other_images_are_refused(photos: Path, tmp_path: Path) -> None:
    experiment = begun(photos, tmp_path / "out")
    for place in range(6):
        helpers.picture(photos / "class2" / f"{place}.jpg", 60 + place)
    with pytest.raises(OtherData, match="the training images of task 'photos-2' differ"):
        run(experiment, tmp_path / "out")
    helpers.picture(photos / "class0" / "6.jpg", 3)
    with pytest.raises(OtherData, match="task 'photos-1' had 8 training images, now 9"):
        run(experiment, tmp_path / "out")


def test_a_run_of_an_earlier_version_goes_on(photos: Path, tmp_path: Path) -> None:
    experiment = begun(photos, tmp_path / "out")
    facts = tmp_path / "out" / experiment.runs()[0].folder / "data.json"
    facts.unlink()
    assert run(experiment, tmp_path / "out")
    assert facts.exists()


def test_what_another_revision_of_a_method_began_does_not_go_on(photos: Path, tmp_path: Path) -> None:
    """It would mix two ways to learn."""
    experiment = begun(photos, tmp_path / "out", "ewc")
    told = tmp_path / "out" / experiment.runs()[0].folder / "environment.json"
    assert json.loads(told.read_text())["revision"] == 1
    told.write_text(
        json.dumps({key: value for key, value in json.loads(told.read_text()).items() if key != "revision"})
    )
    with pytest.raises(OtherConfiguration, match="'ewc' learns otherwise; delete that folder and start it"):
        run(experiment, tmp_path / "out")
    shutil.rmtree(told.parent)
    assert run(experiment, tmp_path / "out")


@pytest.mark.parametrize("text", ["", "[]", '{"shape": [3, 8, 8]}', '{"shape": [3, 8, 8], "tasks": [1]}'])
def test_damaged_facts_are_named(text: str, photos: Path, tmp_path: Path) -> None:
    experiment = begun(photos, tmp_path / "out")
    facts = tmp_path / "out" / experiment.runs()[0].folder / "data.json"
    facts.write_text(text)
    with pytest.raises(ValueError, match=r"data\.json is damaged: .*; delete the run's folder"):
        run(experiment, tmp_path / "out")


def test_facts_see_labels_shape_and_number_of_tasks_but_no_rounding() -> None:
    scenario = three_digits()
    facts = describe_data(scenario)
    assert data_changes(json.loads(json.dumps(facts)), facts) == []
    first = scenario.tasks[0]
    nearly = Split(first.train.images + 1e-4, first.train.labels)
    turned = Split(first.train.images, first.train.labels.flip(0))
    for split, expected in ((nearly, []), (turned, ["the training labels of task 'digits-0' differ"])):
        task = type(first)(first.name, first.classes, split, first.val, first.test)
        assert data_changes(facts, describe_data(Scenario("three", (1, 8, 8), (task, *scenario.tasks[1:])))) == expected
    assert data_changes(facts, describe_data(three_digits(tasks=2))) == ["3 tasks, now 2"]
    assert data_changes(facts, facts | {"shape": [3, 8, 8]}) == ["images were 1×8×8, now 3×8×8"]


def test_facts_of_bytes_are_shares() -> None:
    task = three_digits().tasks[0]
    images = torch.full((60, 1, 8, 8), 51, dtype=torch.uint8)
    split = Split(images, task.train.labels)
    made = Scenario("bytes", (1, 8, 8), (type(task)("a", task.classes, split, split, split),))
    assert describe_data(made)["tasks"][0]["test"]["means"] == [0.2] * 8
