"""The model from Python: predictions, guesses of the task, several readers and one writer."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.store import apart
from tests.store.helpers import LATER, QUICK, learn_more, tree
from zeroforget.store import Locked, Model, ModelError, Unreadable, Watch, open_model
from zeroforget.store import model as model_module
from zeroforget.store.writing import locked


def test_predictions_are_the_dense_networks(trained: Path, data: Path) -> None:
    model = open_model(trained)
    files = sorted((data / "middle").rglob("*.png"))[:10]
    found = model.predict(files, "middle", top=2)
    images = torch.stack([model.prepare(path) for path in files])
    facts = model.task("middle")
    mean, std = facts.preprocessing.mean[0], facts.preprocessing.std[0]
    scores = model.dense("middle")((images.float() / 255 - mean) / std)
    wanted = (scores.double() / facts.calibration.temperature).softmax(1)
    for row, one in enumerate(found):
        assert one.source == str(files[row])
        assert one.label == facts.classes[int(scores[row].argmax())]
        assert [p for _, p in one.classes] == pytest.approx(wanted[row].topk(2).values.tolist(), abs=1e-6)
        assert one.tasks == ()
    assert torch.allclose(model.probabilities(images, 2), wanted, atol=1e-6)


def test_a_network_taken_out_is_the_users_own(trained: Path, data: Path) -> None:
    model = open_model(trained)
    images = torch.stack([model.prepare(path) for path in sorted((data / "low").rglob("*.png"))[:5]])
    before = model.logits(images, "low")
    mine = model.dense("low").double().train()
    for parameter in mine.parameters():
        torch.nn.init.zeros_(parameter)
    assert torch.equal(model.logits(images, "low"), before)
    assert not torch.equal(model.dense("low").get_parameter("head.weight"), mine.get_parameter("head.weight").float())


def test_what_is_no_prepared_picture_is_refused(trained: Path, data: Path) -> None:
    model = open_model(trained)
    image = model.prepare(next((data / "low").rglob("*.png")))
    for wrong in (image, image[None].float(), image[None, :, :5], image[None].numpy(), image[None].repeat(1, 3, 1, 1)):
        for ask in (model.logits, model.probabilities, lambda images, _: model.likely_tasks(images)):
            with pytest.raises(ModelError, match=r"tensor of bytes, \(batch, 1, 8, 8\), as `prepare`"):
                ask(wrong, "low")  # type: ignore[arg-type]
    for top in (0, -1, 1.5):
        with pytest.raises(ModelError, match="how many classes to name, at least 1"):
            model.predict(Image.new("L", (8, 8)), "low", top=top)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="a folder for each task"):
        model.verify(str(data / "low"))  # type: ignore[arg-type]


def test_what_is_no_picture_is_told_with_what_to_pass(trained: Path, data: Path) -> None:
    model, file = open_model(trained), next((data / "low").rglob("*.png"))
    tensor, array = torch.zeros(1, 8, 8), np.zeros((8, 8))
    uses: tuple[Callable[[Any], Any], ...] = (model.predict, lambda given: model.normalized(given, "low"))
    for wrong in (tensor, [tensor], [file, array], array, array[0], np.array(1.0), [None], 5, bytearray(b"ab")):
        for use in uses:
            with pytest.raises(ModelError, match="a picture is a path, the bytes of a file or a PIL image, not "):
                use(wrong)
    with pytest.raises(ModelError, match="not Tensor: PIL"):
        model.prepare(tensor)  # type: ignore[arg-type]
    found = model.predict(str(data / "low"), "low")[0]
    assert found.error == "is a folder; pass the pictures in it, such as sorted(Path(folder).rglob('*.png'))"
    assert model.predict(np.array([str(file)]), "low")[0].error is None  # type: ignore[arg-type]


def test_an_open_file_is_not_taken_for_several_pictures(trained: Path, data: Path) -> None:
    model, path = open_model(trained), next((data / "low").rglob("*.png"))
    with path.open("rb") as file, tempfile.NamedTemporaryFile() as other:
        for wrong, kind in ((file, "BufferedReader"), ([file], "BufferedReader"), (other, "_TemporaryFileWrapper")):
            with pytest.raises(ModelError, match=rf"not {kind}: .*read\(\) gives the bytes of an open file"):
                model.predict(wrong, "low")  # type: ignore[arg-type]
            with pytest.raises(ModelError, match=f"not {kind}: "):
                model.normalized(wrong, "low")  # type: ignore[arg-type]
        assert model.predict(file.read(), "low")[0].classes == model.predict(path, "low")[0].classes


@pytest.mark.parametrize("task", ["low", "middle", 2])
def test_a_network_taken_out_answers_as_the_model_does(trained: Path, data: Path, task: str | int) -> None:
    model, files = open_model(trained), sorted((data / "middle").rglob("*.png"))[:20]
    images = torch.stack([model.prepare(path) for path in files])
    with torch.no_grad():
        assert torch.equal(model.dense(task)(model.normalized(files, task)), model.logits(images, task))
        assert torch.equal(model.dense(task)(model.normalized(files[0], task)), model.logits(images[:1], task))
    assert model.normalized([], task).shape == (0, 1, 8, 8)
    with pytest.raises(Unreadable, match=r"^gone\.png is missing$"):
        model.normalized([files[0], "gone.png"], task)


def test_a_copy_of_a_model_opens_its_folder(trained: Path) -> None:
    model = open_model(trained)
    model.dense("low")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (other.path, other.head, other is model) == (model.path, model.head, False)


def test_a_model_tells_where_it_is_and_what_it_knows(trained: Path, tmp_path: Path) -> None:
    assert repr(open_model(trained)) == f"Model('{trained}'; tasks: 'low', 'middle')"
    assert repr(open_model(tmp_path / "new")) == f"Model('{tmp_path / 'new'}'; tasks: none yet)"


def test_a_model_and_its_tasks_print_as_tables(trained: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    title, head, low, middle = str(model).splitlines()
    assert title == f"{trained}: 2 tasks"
    assert head.split() == ["task", "classes", "accuracy", "features", "new", "bytes", "learned"]
    assert low.split()[0] == "low"
    assert middle.split()[0] == "middle"
    assert str(model.tasks).splitlines() == ["2 tasks", head, low, middle]
    assert model.tasks._repr_html_().count("<tr>") == model._repr_html_().count("<tr>") == 3
    assert str(open_model(tmp_path / "new")) == f"{tmp_path / 'new'}: no task yet"
    assert model.tasks == tuple(model.tasks)


def test_numbers_are_no_pictures_and_names_of_tasks_are_words(trained: Path, data: Path) -> None:
    model = open_model(trained)
    files = sorted((data / "low").rglob("*.png"))[:2]
    pixels = np.asarray(Image.open(files[0]))
    for given in (pixels, torch.from_numpy(pixels.copy())):
        with pytest.raises(ModelError, match=rf"not {type(given).__name__}: PIL\.Image\.fromarray"):
            model.predict(given, "low")  # type: ignore[arg-type]
    assert model.predict(Image.fromarray(pixels), "low")[0].label == model.predict(files[0], "low")[0].label
    assert len(model.predict(np.array([str(file) for file in files]), "low")) == 2
    for name in (None, 3):
        with pytest.raises(ModelError, match="a task needs a name"):
            model.learn(data / "high", name)  # type: ignore[arg-type]


def test_anything_that_is_a_picture_can_be_asked(trained: Path, data: Path) -> None:
    model = open_model(trained)
    path = data / "low" / "digit0" / "003.png"
    answers = [model.predict(source, "low")[0].classes for source in (path, str(path), path.read_bytes())]
    with Image.open(path) as picture:
        answers.append(model.predict(picture, "low")[0].classes)
    assert all(answer == answers[0] for answer in answers)


def test_what_cannot_be_read_is_told_beside_the_others(trained: Path, data: Path) -> None:
    found = open_model(trained).predict([b"nonsense", data / "low" / "digit0" / "000.png", "gone.png"], "low")
    assert [one.error is None for one in found] == [False, True, False]
    assert found[0].source == "picture 1"
    assert "missing" in str(found[2].error)
    assert open_model(trained).predict([b"nonsense"])[0].label == ""


def test_without_a_task_the_likeliest_is_guessed_and_said_how_sure(trained: Path, data: Path) -> None:
    model = open_model(trained)
    right = total = 0
    for name in ("low", "middle"):
        for one in model.predict(sorted((data / name).rglob("*.png"))):
            assert sum(p for _, p in one.tasks) == pytest.approx(1)
            assert one.tasks[0][1] >= one.tasks[1][1]
            assert one.task == one.tasks[0][0]
            right, total = right + (one.task == name), total + 1
    assert right / total > 0.7


def test_unknown_tasks_and_empty_folders(trained: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    with pytest.raises(ModelError, match="no task 'birds' in this model; its tasks are: low, middle"):
        model.predict(b"", "birds")
    for use in (lambda: model.dense("x"), lambda: model.task(3), lambda: model.logits(torch.zeros(1), "x")):
        with pytest.raises(ModelError):
            use()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="holds no model"):
        open_model(tmp_path / "empty").verify()


USES: dict[str, Callable[[Model], Any]] = {
    "open": lambda model: open_model(""),
    "learn": lambda model: model.learn("", "x"),
    "weights": lambda model: model.learn("pictures", "x", weights=""),
    "export": lambda model: model.export("", "low"),
    "ship": lambda model: model.ship(""),
    "receive": lambda model: model.receive(""),
    "verify": lambda model: model.verify({"low": ""}),
}


@pytest.mark.parametrize("use", USES)
def test_an_empty_path_is_not_the_current_folder(trained: Path, use: str) -> None:
    with pytest.raises(ModelError, match=r"^a path is empty; name a file or a folder, or \. for the current folder$"):
        USES[use](open_model(trained))


def test_a_dot_is_the_current_folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    assert open_model(".").head == open_model(trained).head


def test_weights_may_be_named_by_a_word(trained: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"w\.pt is no file; name one of weights"):
        open_model(tmp_path / "new").learn(data / "low", "low", weights=str(tmp_path / "w.pt"), **QUICK)


def test_probabilities_are_not_surer_than_they_are_right(trained: Path) -> None:
    for task in open_model(trained).tasks:
        assert 0.05 <= task.calibration.temperature <= 20
        assert list(task.calibration.quantiles) == sorted(task.calibration.quantiles)


def test_undo_leaves_the_ones_before_bit_for_bit(model: Model, data: Path) -> None:
    before, network = tree(model.path), model.dense("middle")
    learn_more(model, data, "high")
    assert model.undo() == "high"
    assert tree(model.path) == before
    for mine, theirs in zip(model.dense("middle").parameters(), network.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [model.undo(), model.undo()] == ["middle", "low"]
    with pytest.raises(ModelError, match="no task to take back"):
        model.undo()
    assert model.tasks == ()
    model.learn(data / "low", "low", **LATER)  # the network is still the one it was made with
    assert model.verify()
    assert model.shape == (1, 8, 8)


def test_readers_see_a_new_task_after_refresh_and_keep_what_they_have(model: Model, data: Path) -> None:
    reader = open_model(model.path)
    assert not reader.refresh()
    held = reader.dense("low")
    learn_more(model, data, "high")
    assert [task.name for task in reader.tasks] == ["low", "middle"]
    assert reader.refresh()
    assert [task.name for task in reader.tasks] == ["low", "middle", "high"]
    assert torch.equal(held(torch.ones(1, 1, 8, 8)), reader.dense("low")(torch.ones(1, 1, 8, 8)))
    assert "high" in {one.task for one in reader.predict(sorted((data / "high").rglob("*.png")))}


def test_readers_never_fail_while_tasks_come_and_go(model: Model, tmp_path: Path) -> None:
    model.ship(tmp_path / "u.zfu", since="low")
    stop, failures = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                reader = open_model(model.path)
                assert 1 <= len(reader.tasks) <= 2
                reader.dense("low")
                assert reader.verify()
            except Exception as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    writer = open_model(model.path)
    for _ in range(6):
        writer.undo()
        writer.receive(tmp_path / "u.zfu")
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_second_writer_waits_or_says_who_holds_it(model: Model, data: Path) -> None:
    said: list[str] = []
    with locked(model.path, "a test", wait=None, say=said.append):
        with pytest.raises(Locked, match=rf"process {os.getpid()} on .* \('a test'"):
            learn_more(model, data, "high", watch=Watch(wait=0.0))
        with pytest.raises(Locked):
            model.undo(watch=Watch(wait=0.3, say=said.append))
        assert "waiting" in said[0]
        assert model.predict(data / "low" / "digit0" / "000.png", "low")  # readers do not wait
        assert model.verify()
    assert model.undo(watch=Watch(wait=0.0)) == "middle"


def test_undo_takes_back_only_what_was_newest_when_it_was_asked(model: Model, data: Path) -> None:
    behind = open_model(model.path)

    def meanwhile(_: str) -> None:  # called once, when there is somebody to wait for
        (model.path / "tasks" / "002-middle").rename(model.path / "tasks" / "003-high")
        lock.close()

    lock = contextlib.ExitStack()
    lock.enter_context(locked(model.path, "a test", wait=None, say=print))
    with pytest.raises(ModelError, match="changed by others and ends with 'middle' now: nothing is taken back"):
        behind.undo(watch=Watch(say=meanwhile))
    assert (model.path / "tasks" / "003-high").is_dir()


def exchange(model: Model, data: Path) -> None:
    """The newest task is another one of the same name now."""
    model.undo()
    model.learn(data / "high", "middle", **(LATER | {"epochs": 1}))


CHANGES: dict[str, tuple[Callable[[Model, Path], Any], str]] = {
    "added": (lambda model, data: learn_more(model, data, "high", epochs=1), "ends with 'high' now"),
    "taken": (lambda model, data: model.undo(), "ends with 'low' now"),
    "all taken": (lambda model, data: (model.undo(), model.undo()), "has no task now"),
    "exchanged": (exchange, "ends with another 'middle' now"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("named", [False, True])
def test_undo_takes_back_nothing_that_this_model_has_not_seen(
    model: Model, data: Path, change: str, named: bool
) -> None:
    behind, (others, now) = open_model(model.path), CHANGES[change]
    others(model, data)
    newest = model.tasks[-1].name if model.tasks else None
    before = tree(model.path)
    for _ in range(2):  # to ask again does not help
        with pytest.raises(ModelError, match=f"changed by others and {now}: nothing is taken back") as error:
            behind.undo(newest if named else None)
    assert ("in Python refresh()" in str(error.value)) == (newest is not None)
    assert tree(model.path) == before
    assert [task.name for task in behind.tasks] == ["low", "middle"]  # as it was, and of use
    if newest is not None:
        assert behind.predict(data / "low" / "digit0" / "000.png", "low")[0].error is None
    behind.refresh()
    assert behind.tasks == model.tasks == open_model(model.path).tasks
    if newest is not None:
        assert behind.undo() == newest


def test_undo_where_there_was_no_model_takes_back_nothing(model: Model, tmp_path: Path) -> None:
    early = open_model(tmp_path / "later")
    shutil.copytree(model.path, early.path)
    with pytest.raises(ModelError, match="ends with 'middle' now: nothing is taken back"):
        early.undo()
    assert early.refresh()
    assert [early.undo(), early.undo()] == ["middle", "low"]
    shutil.copytree(model.path / "tasks", early.path / "tasks", dirs_exist_ok=True)
    with pytest.raises(ModelError, match="ends with 'middle' now: nothing is taken back"):
        early.undo()


def test_several_damaged_tasks_are_taken_back_one_by_one(model: Model) -> None:
    for name in ("001-low", "002-middle"):
        (model.path / "tasks" / name / "task.json").write_text("{")
    assert model.undo() == "middle"
    assert [task.name for task in model.tasks] == ["low"]
    assert model.undo() == "low"
    assert open_model(model.path).tasks == model.tasks == ()


def test_undo_of_a_named_task_takes_back_no_other(model: Model) -> None:
    with pytest.raises(ModelError, match="the newest task is 'middle', not 'low', and tasks are taken back newest"):
        model.undo("low")
    assert [task.name for task in model.tasks] == ["low", "middle"]
    assert model.undo(" middle ") == "middle"
    assert model.undo("low") == "low"


def test_a_writer_that_waits_gets_its_turn(model: Model) -> None:
    said: list[str] = []
    with apart.start("hold", model.path) as other:
        assert other.stdout

        def say(text: str) -> None:  # called once, when there is somebody to wait for
            said.append(text)
            print(file=other.stdin, flush=True)

        assert other.stdout.readline() == "held\n"
        assert model.undo(watch=Watch(say=say)) == "middle"
    assert other.returncode == 0
    assert f"process {other.pid}" in said[0]


def test_whoever_waits_for_a_lock_that_is_removed_takes_the_next(tmp_path: Path) -> None:
    """A first task that fails removes its folder, the lock in it too; another may be waiting for that lock."""
    folder, waits = tmp_path / "m", threading.Event()
    held: list[bool] = []

    def second() -> None:
        with locked(folder, "second", wait=None, say=lambda text: waits.set()):
            with pytest.raises(Locked), locked(folder, "third", wait=0.0, say=print):
                pass
            held.append((folder / ".lock").exists())

    thread = threading.Thread(target=second)
    with locked(folder, "first", wait=None, say=print):
        thread.start()
        assert waits.wait(20)
        shutil.rmtree(folder)
    thread.join(20)
    assert held == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not write")
def test_a_folder_that_may_not_be_written_can_be_read(trained: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        Path(folder).chmod(0o755)
        model = shutil.copytree(trained, Path(folder) / "model")
        for path in [model, *model.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        with apart.start("read", model) as other:
            other.communicate()
        assert other.returncode == 0


def test_a_task_is_found_however_its_letters_are_composed(tmp_path: Path, data: Path) -> None:
    model = open_model(tmp_path / "m")
    model.learn(data / "low", "caf\u00e9 noir", **QUICK)
    assert model.task("cafe\u0301 noir").name == "caf\u00e9 noir"
    assert model.predict(data / "low" / "digit0" / "000.png", " cafe\u0301 noir ")[0].task == "caf\u00e9 noir"
    assert model.undo() == "caf\u00e9 noir"  # its folder is named with an underscore


def test_a_damaged_task_is_taken_back_by_the_name_of_its_folder(tmp_path: Path, data: Path) -> None:
    model = open_model(tmp_path / "m")
    model.learn(data / "low", "two words", **QUICK)
    (tmp_path / "m" / "tasks" / "001-two_words" / "task.json").write_text("{}")
    assert model.undo() == "two_words"


def test_a_full_disk_does_not_keep_anybody_from_taking_back(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)  # the lock's note of who holds it
    assert model.undo() == "middle"
    assert model.verify()


def test_an_answer_comes_from_one_model(model: Model, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a picture's task and its classes, another process exchanges the task for one with other classes."""
    picture, likely = data / "middle" / "digit3" / "005.png", model_module._likely

    def exchanged(state: Any, images: torch.Tensor) -> Any:
        ranks = likely(state, images)
        other = open_model(model.path)
        other.undo()
        other.learn(data / "high", "middle", **LATER)
        model.refresh()
        return {name: torch.full_like(p, float(name == "middle")) for name, p in ranks.items()}

    expected = model.predict(picture, "middle")[0].classes
    monkeypatch.setattr(model_module, "_likely", exchanged)
    assert model.predict(picture)[0].classes == expected


def test_its_size_and_an_update_are_of_what_is_there_now(copied: Callable[[], Model], tmp_path: Path) -> None:
    first, second = copied(), copied()
    for model in (first, second):
        whole = model.bytes
        open_model(model.path).undo()  # by another process
        if model is first:
            assert 0 < model.bytes < whole
        else:
            assert [task.name for task in model.ship(tmp_path / "all.zfu")] == ["low"]


def test_a_folder_whose_name_was_decomposed_on_its_way_is_whole(tmp_path: Path, data: Path) -> None:
    """Some file systems keep an accent apart from its letter, and archives made there do, too."""
    model = open_model(tmp_path / "m")
    model.learn(data / "low", "caf\u00e9", **QUICK)
    (model.path / "tasks" / "001-caf\u00e9").rename(model.path / "tasks" / "001-cafe\u0301")
    again = open_model(model.path)
    assert again.verify()
    assert again.bytes == sum(path.stat().st_size for path in model.path.rglob("[!.]*") if path.is_file())
    assert learn_more(again, data, "high").number == 2
    assert again.undo() == "high"
    assert again.undo() == "caf\u00e9"
