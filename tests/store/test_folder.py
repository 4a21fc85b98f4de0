"""The folder itself: what lies there that no model wrote is named; what others change meanwhile is no damage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.helpers import learn_more, tree
from zeroforget.files.json_fields import sealed
from zeroforget.store import Damaged, Model, ModelError, open_model
from zeroforget.store.folder import Folder
from zeroforget.store.verify import verify


def resealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file as one who knows the format would: with its seal made anew."""
    values = json.loads(path.read_bytes())
    values.pop("seal")
    change(values)
    path.write_bytes(sealed(values))


def test_a_folder_out_of_its_place_is_told_by_what_is_wrong_with_it(copied: Callable[[], Model]) -> None:
    def renamed(tasks: Path) -> None:
        (tasks / "002-middle").rename(tasks / "002-other")

    def doubled(tasks: Path) -> None:
        shutil.copytree(tasks / "002-middle", tasks / "002-again")
        (tasks / "002-again").rename(tasks / "002-zebra")

    def first_gone(tasks: Path) -> None:
        shutil.rmtree(tasks / "001-low")

    for way, why in (
        (renamed, "it belongs to the folder 002-middle"),
        (doubled, "there are two of its number"),
        (first_gone, "task 1 is missing before it"),
    ):
        path = copied().path
        way(path / "tasks")
        with pytest.raises(Damaged, match=why):
            open_model(path)


def test_a_folder_of_other_things_is_not_made_a_model(data: Path, model: Model, tmp_path: Path) -> None:
    whole = tmp_path / "all.zfu"
    model.ship(whole)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    taken = open_model(tmp_path / "mine")
    for use in (lambda: taken.learn(data / "low", "low"), lambda: taken.receive(whole), lambda: taken.predict([])):
        with pytest.raises(ModelError, match=r"mine is no model and holds other things, such as 'notes\.txt'; name a"):
            use()
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "mine" / "notes.txt").rename(tmp_path / "mine" / ".notes.txt")
    assert [task.name for task in taken.receive(whole)] == ["low", "middle"]


def test_a_model_that_is_made_meanwhile_is_no_other_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.json").touch()
    answers = iter([False, True])  # it appears between two looks
    monkeypatch.setattr(Folder, "exists", lambda self: next(answers))
    Folder(tmp_path).check_place()
    assert next(answers, None) is None


def test_two_tasks_of_one_name_are_refused(model: Model) -> None:
    tasks = model.path / "tasks"
    resealed(tasks / "002-middle" / "task.json", lambda values: values.update(name="low"))
    (tasks / "002-middle").rename(tasks / "002-low")
    with pytest.raises(Damaged, match="two tasks have one name"):
        open_model(model.path)


@pytest.mark.parametrize(
    ("file", "group", "name"),
    [
        ("model.json", None, "more"),
        ("model.json", "backbone", "backbone.more"),
        ("tasks/002-middle/task.json", None, "more"),
        ("tasks/002-middle/task.json", "preprocessing", "preprocessing.more"),
        ("tasks/002-middle/task.json", "data", "data.more"),
    ],
)
def test_a_field_that_this_version_does_not_know_is_not_passed_over(
    model: Model, file: str, group: str | None, name: str
) -> None:
    resealed(model.path / file, lambda values: (values[group] if group else values).update(more=1))
    with pytest.raises(Damaged, match=f"field '{name}' is not one that this version knows"):
        open_model(model.path)


def test_a_task_taken_back_while_the_chain_is_read_is_no_damage(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Folder.read_task

    def late(folder: Path, before: str, shape: tuple[int, int, int]) -> Any:
        if folder.name == "002-middle":
            shutil.rmtree(folder)
        return read(folder, before, shape)

    monkeypatch.setattr(Folder, "read_task", staticmethod(late))
    assert [task.name for task in Folder(model.path).read().tasks] == ["low"]


def test_a_task_taken_back_while_it_is_verified_is_no_damage(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Folder.tensors

    def late(folder: Path, facts: Any, name: str) -> Any:
        if folder.name == "002-middle":
            shutil.rmtree(folder)
        return tensors(folder, facts, name)

    monkeypatch.setattr(Folder, "tensors", staticmethod(late))
    report = verify(Folder(model.path))
    assert report
    assert report.proofs[0].found.endswith("; 1 link of the chain")
    assert "1 of 1 tasks bit for bit" in report.proofs[1].found
    assert "numbers in 1 network is" in report.proofs[2].found


def test_after_the_thousandth_task_comes_another(tmp_path: Path) -> None:
    for name in ("1000-b", "999-a", "1001-c", "12-short", "notes"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
    assert Folder(tmp_path).entries() == [(999, "999-a"), (1000, "1000-b"), (1001, "1001-c")]


def test_true_is_no_number_of_a_task(trained: Path) -> None:
    assert open_model(trained).task(1).name == "low"
    for odd in (True, False, 0, 3, -1):
        with pytest.raises(ModelError, match="no task"):
            open_model(trained).task(odd)


def test_another_task_in_the_place_of_the_newest_is_seen(model: Model, data: Path) -> None:
    other = open_model(model.path)
    assert other.undo() == "middle"
    learn_more(other, data, "high", epochs=1)
    assert model.refresh()
    assert [task.name for task in model.tasks] == ["low", "high"]
    assert not model.refresh()


def test_nothing_is_taken_back_and_no_folder_made_where_no_model_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        open_model(tmp_path / "m").undo()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["model.json", ".lock", "tasks/u.zfu", "tasks/001-low/task.json", ".training/u.zfu"])
@pytest.mark.parametrize("way", ["straight", "linked"])
def test_an_update_is_not_written_over_the_model(model: Model, tmp_path: Path, name: str, way: str) -> None:
    (model.path / ".training").mkdir()
    (tmp_path / "link").symlink_to(model.path)
    before = tree(model.path)
    with pytest.raises(ModelError, match="belongs to the model itself"):
        model.ship((model.path if way == "straight" else tmp_path / "link") / name)
    assert tree(model.path) == before
    assert not list((model.path / ".training").iterdir())
    model.ship(model.path / "u.zfu")  # beside them there is room


def test_listing_tasks_loads_no_torch(trained: Path) -> None:
    """It would take most of the time that the command does."""
    code = f"""if True:
        import sys
        from pathlib import Path
        from zeroforget.store.folder import Folder
        from zeroforget.store.schema import Tasks, accuracy_of
        tasks = Folder(Path({str(trained)!r})).read().tasks
        print(Tasks(tasks), *map(accuracy_of, tasks))
        sys.exit("torch" in sys.modules or "numpy" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "reading a chain loads torch"
    assert "middle" in done.stdout
