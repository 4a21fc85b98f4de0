"""A task learned again is a new version beside the first: both stay and verify, and the newest answers to the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.store.helpers import LATER, tree
from zeroforget.files.json_fields import sealed
from zeroforget.serving.catalog import Networks, take
from zeroforget.store import Model, ModelError, Watch, open_model
from zeroforget.store.errors import Damaged
from zeroforget.store.names import exact, is_task_name, means, next_version, version_of
from zeroforget.store.schema import TaskFacts, unsealed


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory, trained: Path, data: Path) -> Model:
    """The model of low and middle after `low` was learned again."""
    import shutil

    path = tmp_path_factory.mktemp("versions") / "garden"
    shutil.copytree(trained, path)
    model = open_model(path)
    model.learn(data / "low", "low", again=True, **LATER)
    return model


def test_both_stay_and_the_newest_answers_to_the_name(twice: Model, trained: Path, data: Path) -> None:
    before = open_model(trained)
    assert [task.name for task in twice.tasks] == ["low", "middle", "low@2"]
    assert tree(trained).items() <= tree(twice.path).items()
    assert twice.verify()
    assert (twice.task("low").number, twice.task("low@1").number, twice.task("low@2").number) == (3, 1, 3)
    pictures = sorted((data / "low" / "digit1").glob("*.png"))[:4]
    images = torch.stack([twice.prepare(one) for one in pictures])
    assert torch.equal(twice.logits(images, "low@1"), before.logits(images, "low"))
    assert torch.equal(twice.logits(images, "low"), twice.logits(images, 3))
    assert not torch.equal(twice.logits(images, "low"), twice.logits(images, "low@1"))
    assert [twice.predict(pictures[:1], name)[0].task for name in ("low", "low@1", "low@2", 1)] == [
        "low@2", "low", "low@2", "low",
    ]  # fmt: skip
    first = twice.predict(pictures, "low@1")
    assert [one.classes for one in first] == [one.classes for one in before.predict(pictures, "low")]
    report = twice.verify({"low": data / "low", "low@1": data / "low"})
    assert [one.task for one in report.measured] == ["low@2", "low"]
    assert report.holds


def test_guesses_and_the_server_know_the_newest_version(twice: Model, data: Path) -> None:
    images = torch.stack([twice.prepare(one) for one in sorted((data / "low" / "digit1").glob("*.png"))[:3]])
    assert set(twice.likely_tasks(images)) == {"middle", "low@2"}
    snapshot, networks = take(twice.folder), Networks(2**30)
    assert set(networks.likely(snapshot, images)) == {"middle", "low@2"}
    asked = networks.probabilities(snapshot, snapshot.chain.find("low"), images)
    assert torch.equal(asked, twice.probabilities(images, "low"))
    assert not torch.equal(asked, twice.probabilities(images, "low@1"))


def test_a_new_version_is_shipped_received_and_taken_back(
    twice: Model, copied: Callable[[], Model], tmp_path: Path
) -> None:
    other = copied()
    assert [task.name for task in twice.ship(tmp_path / "new.zfu", since="middle")] == ["low@2"]
    assert [task.name for task in other.receive(tmp_path / "new.zfu")] == ["low@2"]
    assert tree(other.path) == tree(twice.path)
    assert [task.name for task in twice.ship(tmp_path / "rest.zfu", since="low@1")] == ["middle", "low@2"]
    with pytest.raises(ModelError, match="nothing was learned since 'low'"):
        twice.ship(tmp_path / "none.zfu", since="low")
    with pytest.raises(ModelError, match="the newest task is 'low@2', not 'low@1'"):
        other.undo("low@1")
    assert other.undo("low") == "low@2"
    assert other.task("low").number == 1
    assert other.verify()


def test_the_same_name_is_refused_without_again_and_so_is_a_first_version_with_it(model: Model, data: Path) -> None:
    with pytest.raises(ModelError, match=r"learn it again as a new version, --again \(again=True\)"):
        model.learn(data / "low", "low", **LATER)
    with pytest.raises(ModelError, match="no task 'high' to learn again"):
        model.learn(data / "high", "high", again=True, **LATER)
    with pytest.raises(ModelError, match="'low@2' cannot name a task"):
        model.learn(data / "low", "low@2", **LATER)


def test_learning_again_goes_on_where_it_was_stopped(twice: Model, model: Model, data: Path) -> None:
    class Stop(Exception):
        pass

    def stop(progress: object) -> None:
        if getattr(progress, "epoch", 0) >= 2:
            raise Stop

    with pytest.raises(Stop):
        model.learn(data / "low", "low", again=True, progress=stop, **LATER)
    said: list[str] = []
    model.learn(data / "low", "low", again=True, watch=Watch(said.append), **LATER)
    assert "going on with the training that was interrupted" in said
    born = next((model.path / "tasks").glob("003-low@2/born.safetensors"))
    assert born.read_bytes() == (twice.path / "tasks" / "003-low@2" / "born.safetensors").read_bytes()


def test_an_older_format_has_no_versions(twice: Model) -> None:
    file = twice.path / "tasks" / "003-low@2" / "task.json"
    values = unsealed(file.read_bytes(), file)
    assert values["version"] == 3
    assert TaskFacts.from_json(dict(values), file, "").name == "low@2"
    with pytest.raises(Damaged, match="none that a task can have"):
        TaskFacts.from_json(unsealed(sealed(values | {"version": 2}), file), file, "")


def test_names_with_versions() -> None:
    assert version_of("dogs@2") == ("dogs", 2)
    assert version_of("dogs") == ("dogs", None)
    assert exact("dogs") == "dogs@1"
    assert means("dogs", "dogs@3")
    assert means("dogs@1", "dogs")
    assert not means("dogs@2", "dogs")
    assert not means("dog", "dogs")
    assert next_version("dogs", ["dogs", "cats", "dogs@2"]) == "dogs@3"
    for name, fits in (("dogs@2", True), ("dogs@1", False), ("dogs@02", False), ("dogs@x", False), ("@2", False)):
        assert is_task_name(name) is fits
    assert not is_task_name("d" * 63 + "@2")
    with pytest.raises(ModelError, match="learn it under another name"):
        next_version("d" * 63, ["d" * 63])
