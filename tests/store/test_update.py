"""Updates: what was born since a task, for the exact ancestor and no other."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.helpers import QUICK, learn_more, tree
from zeroforget.files import atomic
from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import sealed
from zeroforget.proving.grow import grow
from zeroforget.store import Model, ModelError, open_model, update
from zeroforget.store.backbone import Backbone
from zeroforget.store.network import example, plain_network
from zeroforget.store.tensors import expected
from zeroforget.store.update import MAGIC, read_update


@pytest.fixture
def pair(copied: Callable[[], Model]) -> tuple[Model, Model]:
    """A model, and one deployed that is a task behind."""
    ahead, behind = copied(), copied()
    behind.undo()
    return ahead, behind


def test_an_update_makes_the_models_equal_file_by_file(pair: tuple[Model, Model], tmp_path: Path) -> None:
    ahead, behind = pair
    old = tree(behind.path)
    tasks = ahead.ship(tmp_path / "u.zfu", since="low")
    assert [task.name for task in tasks] == ["middle"]
    new = behind.receive(tmp_path / "u.zfu")
    assert [task.name for task in new] == ["middle"]
    assert tree(behind.path) == tree(ahead.path)
    assert {name: content for name, content in tree(behind.path).items() if name in old} == old
    assert behind.verify()
    assert behind.receive(tmp_path / "u.zfu") == ()  # again: nothing new
    size = (tmp_path / "u.zfu").stat().st_size
    assert size < tasks[0].bytes + (ahead.path / "tasks/002-middle/task.json").stat().st_size + 2000


def test_the_whole_model_makes_a_new_one(trained: Path, tmp_path: Path) -> None:
    open_model(trained).ship(tmp_path / "all.zfu")
    received = open_model(tmp_path / "phone")
    received.receive(tmp_path / "all.zfu")
    assert tree(received.path) == tree(trained)
    assert received.verify()


def test_a_width_given_as_a_whole_number_is_shipped(data: Path, tmp_path: Path) -> None:
    sent = open_model(tmp_path / "sent")
    sent.learn(data / "low", "low", **(QUICK | {"epochs": 1, "width": 1}))
    assert sent.backbone.options == {"width": 1.0}
    assert b'"width": 1.0' in (sent.path / "model.json").read_bytes()


def test_the_received_bytes_are_written_as_they_came(trained: Path, tmp_path: Path) -> None:
    """A model.json with a whole number where we would write 1.0, as Python callers could once make one."""
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    shutil.rmtree(other / "tasks" / "002-middle")
    text = _resealed(other / "model.json", lambda values: values["backbone"]["options"].update(width=1))
    _resealed(other / "tasks" / "001-low" / "task.json", lambda values: values.update(before=sha256(text)))
    open_model(other).ship(tmp_path / "all.zfu")
    received = open_model(tmp_path / "phone")
    received.receive(tmp_path / "all.zfu")
    assert tree(received.path) == tree(other)
    assert received.verify()


def test_pictures_of_another_shape_are_refused_and_no_folder_is_left(
    copied: Callable[[], Model], tmp_path: Path
) -> None:
    forged = copied()
    forged.undo()
    task = forged.path / "tasks" / "001-low" / "task.json"
    forged.ship(tmp_path / "all.zfu")
    content = (tmp_path / "all.zfu").read_bytes()
    old, new = task.read_bytes(), _resealed(task, lambda values: values["preprocessing"].update(size=[16, 16]))
    start = len(MAGIC) + 8
    end = start + int.from_bytes(content[len(MAGIC) : start], "big")
    header = json.loads(content[start:end])
    header.pop("seal")
    header["tasks"][0]["hash"] = sha256(new)
    header["files"][1] = {"bytes": len(new), "sha256": sha256(new)}
    text = sealed(header)
    (tmp_path / "bad.zfu").write_bytes(MAGIC + len(text).to_bytes(8, "big") + text + content[end:].replace(old, new))
    with pytest.raises(ModelError, match="another shape than the model's"):
        open_model(tmp_path / "phone").receive(tmp_path / "bad.zfu")
    assert not (tmp_path / "phone").exists()


def _resealed(path: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A sealed file with other values: a forger's work."""
    values = json.loads(path.read_bytes())
    values.pop("seal")
    change(values)
    path.write_bytes(sealed(values))
    return path.read_bytes()


def test_an_update_that_was_half_received_goes_on(trained: Path, tmp_path: Path) -> None:
    open_model(trained).ship(tmp_path / "all.zfu")
    half = open_model(tmp_path / "half")
    half.receive(tmp_path / "all.zfu")
    half.undo()
    assert [task.name for task in half.receive(tmp_path / "all.zfu")] == ["middle"]
    assert tree(half.path) == tree(trained)


def test_a_whole_model_that_has_parted_from_this_one_says_where(
    pair: tuple[Model, Model], data: Path, tmp_path: Path
) -> None:
    ahead, behind = pair
    ahead.ship(tmp_path / "all.zfu")
    learn_more(behind, data, "high", epochs=1)
    whole = "it holds a whole model, which"
    said = rf"all\.zfu brings 'middle' where .* learned 'high': {whole} is the same as this one up to 'low' only\. Take"
    with pytest.raises(ModelError, match=said):
        behind.receive(tmp_path / "all.zfu")
    behind.undo()
    behind.undo()
    learn_more(behind, data, "low", epochs=1, seed=5)
    said = f"brings another 'low' where .* learned 'low': {whole} differs from this one from the first task on"
    with pytest.raises(ModelError, match=said):
        behind.receive(tmp_path / "all.zfu")
    behind.undo()  # as the message says
    assert [task.name for task in behind.receive(tmp_path / "all.zfu")] == ["low", "middle"]
    assert tree(behind.path) == tree(ahead.path)


def test_another_ancestor_is_refused_and_the_right_one_named(
    pair: tuple[Model, Model], data: Path, tmp_path: Path
) -> None:
    ahead, behind = pair
    learn_more(ahead, data, "high")
    ahead.ship(tmp_path / "late.zfu", since="middle")
    ahead.ship(tmp_path / "both.zfu", since="low")
    before = tree(behind.path)
    with pytest.raises(ModelError, match=r"follows task 'middle' .* ends with 'low'.* ship --since low"):
        behind.receive(tmp_path / "late.zfu")
    with pytest.raises(ModelError, match="there is no model"):
        open_model(tmp_path / "nothing").receive(tmp_path / "late.zfu")
    assert not (tmp_path / "nothing").exists()
    assert tree(behind.path) == before
    learn_more(behind, data, "high")
    with pytest.raises(ModelError, match=r"brings 'middle' where this model has learned 'high'.*undo"):
        behind.receive(tmp_path / "both.zfu")
    behind.undo()
    learn_more(behind, data, "middle", seed=5)
    with pytest.raises(ModelError, match=r"brings another 'middle' where this model has learned 'middle'"):
        behind.receive(tmp_path / "both.zfu")
    other = open_model(tmp_path / "other")
    other.learn(data / "low", "low", **(QUICK | {"seed": 5}))
    with pytest.raises(ModelError, match="another model"):
        other.receive(tmp_path / "both.zfu")
    with pytest.raises(ModelError, match="nothing was learned since 'high'"):
        ahead.ship(tmp_path / "none.zfu", since="high")


def test_damaged_updates_change_nothing(pair: tuple[Model, Model], tmp_path: Path) -> None:
    ahead, behind = pair
    ahead.ship(tmp_path / "u.zfu", since="low")
    content = (tmp_path / "u.zfu").read_bytes()
    before = tree(behind.path)
    places = [0, 5, len(MAGIC) + 2, len(MAGIC) + 7, 60, 300, len(content) // 2, len(content) - 1]
    flipped = [content[:n] + bytes([content[n] ^ 4]) + content[n + 1 :] for n in places]
    for number, damaged in enumerate([b"", content[:10], content[:-1], content + b"x", *flipped]):
        (tmp_path / "bad.zfu").write_bytes(damaged)
        with pytest.raises(ModelError):
            behind.receive(tmp_path / "bad.zfu")
        assert tree(behind.path) == before, number
    with pytest.raises(ModelError, match="cannot be read"):
        behind.receive(tmp_path / "missing.zfu")
    assert behind.verify()


def test_a_full_disk_is_told_and_leaves_no_file(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = MAGIC + b"an older one"
    (tmp_path / "u.zfu").write_bytes(older)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(ModelError, match=r"u\.zfu could not be written: the disk is full; make room"):
            open_model(trained).ship(tmp_path / "u.zfu")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"u.zfu": older}


def test_a_place_where_nothing_may_be_written_is_told(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: object, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    model = open_model(trained)
    monkeypatch.setattr(atomic, "write_new", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(
        ModelError, match=r"u\.zfu could not be written: that is a read-only file system; write it else"
    ):
        model.ship(tmp_path / "u.zfu")


def test_a_device_or_pipe_is_not_replaced(trained: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="is no regular file"):
        open_model(trained).ship(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("content", [b"# Notes\n", b"zeroforget updates are small\n", b"\n" + MAGIC])
def test_what_was_not_shipped_is_not_overwritten(trained: Path, tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "u.zfu"
    out.write_bytes(content)
    said = r"u\.zfu is there and is no update of zeroforget's; name another file, or remove it first"
    with pytest.raises(ModelError, match=said):
        open_model(trained).ship(out)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"u.zfu": content}


def test_an_earlier_update_is_overwritten(trained: Path, tmp_path: Path) -> None:
    model, out = open_model(trained), tmp_path / "u.zfu"
    out.touch()  # an empty file has nothing to lose
    model.ship(out)
    model.ship(out, since="low")
    assert [name for name, _ in read_update(out).tasks] == ["middle"]
    out.write_bytes(out.read_bytes()[:-9])  # half a one is one too
    model.ship(out)
    assert read_update(out).whole


def test_a_file_that_may_not_be_read_is_left_alone(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "u.zfu"
    out.write_bytes(MAGIC)

    def denied(path: object) -> bool:
        raise OSError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(update, "is_update", denied)
    with pytest.raises(ModelError, match=r"u\.zfu is there and cannot be read \(Permission denied\); name another"):
        open_model(trained).ship(out)
    assert out.read_bytes() == MAGIC


def test_an_update_through_a_pipe_is_not_waited_for(trained: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="pipe is no regular file; save the update to one first"):
        open_model(tmp_path / "new").receive(tmp_path / "pipe")


def test_an_update_says_what_it_is(trained: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    model.ship(tmp_path / "u.zfu", since=1)
    update = read_update(tmp_path / "u.zfu")
    assert update.base == model.tasks[0].hash
    assert update.head == model.head
    assert not update.whole


def test_five_percent_of_alexnet_against_the_whole(tmp_path: Path) -> None:
    """At a sixteenth of the width, where it is quick: shares of features are the same at any width."""
    backbone = Backbone("alexnet", {"width": 1 / 16}, (3, 64, 64))
    net = grow(plain_network(backbone, 0), example(backbone))
    sizes = []
    for task, growth in enumerate((None, 0.05)):
        net.add_task(f"task {task}", 10, growth)
        sizes.append(sum(dtype.itemsize * _numel(shape) for dtype, shape in expected(net, task).values()))
    assert sizes[1] < 0.13 * (sizes[0] + sizes[1])


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def test_without_a_model_a_part_of_one_asks_for_the_whole(pair: tuple[Model, Model], tmp_path: Path) -> None:
    ahead, behind = pair
    ahead.ship(tmp_path / "late.zfu", since="low")
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "empty"):
        with pytest.raises(ModelError, match=r"follows task 'low'.*zeroforget ship --all") as error:
            open_model(tmp_path / name).receive(tmp_path / "late.zfu")
        assert "learn" not in str(error.value)
    behind.undo()
    with pytest.raises(ModelError, match=r"ends with no task.*zeroforget ship --all"):
        behind.receive(tmp_path / "late.zfu")
    ahead.ship(tmp_path / "all.zfu")
    assert [task.name for task in behind.receive(tmp_path / "all.zfu")] == ["low", "middle"]
