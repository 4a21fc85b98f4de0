"""Updates whose own hashes are all right, and which are refused nevertheless: nothing untrue comes into a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save

from tests.store.helpers import tree
from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import sealed
from zeroforget.store import Damaged, Model, ModelError, open_model
from zeroforget.store.folder import BORN, PROBE, SPREAD
from zeroforget.store.update import _FILES, MAGIC

TASK = "tasks/002-middle"


def forged(update: Path, own: Mapping[str, bytes], **header: Any) -> Path:
    """The update of one task with other files in the place of its own, and a header that fits them."""
    content = update.read_bytes()
    start = len(MAGIC) + 8
    end = start + int.from_bytes(content[len(MAGIC) : start], "big")
    values, parts = json.loads(content[start:end]), []
    for name, listed in zip(_FILES, values["files"], strict=True):
        parts.append(own.get(name, content[end : end + listed["bytes"]]))
        end += listed["bytes"]
    values.pop("seal")
    values["tasks"][0]["hash"] = sha256(parts[0])
    values["files"] = [{"bytes": len(part), "sha256": sha256(part)} for part in parts]
    text = sealed(values | header)
    update.write_bytes(b"".join([MAGIC, len(text).to_bytes(8, "big"), text, *parts]))
    return update


@pytest.fixture
def pair(copied: Callable[[], Model], tmp_path: Path) -> tuple[Model, Path, dict[str, Any]]:
    """A model that has learned `low`, the update that brings `middle`, and what its task.json says."""
    ahead, behind = copied(), copied()
    ahead.ship(tmp_path / "u.zfu", since="low")
    behind.undo()
    values = json.loads((ahead.path / TASK / "task.json").read_bytes())
    values.pop("seal")
    return behind, tmp_path / "u.zfu", values


def refused(model: Model, update: Path, why: str) -> None:
    """The update is refused for this reason, and the model is as it was."""
    before = tree(model.path)
    with pytest.raises(ModelError, match=why):
        model.receive(update)
    assert tree(model.path) == before
    assert sorted(entry.name for entry in model.path.iterdir()) == [".lock", "model.json", "tasks"]


def test_one_that_is_only_written_again_is_received(pair: tuple[Model, Path, dict[str, Any]]) -> None:
    model, update, values = pair
    assert [task.name for task in model.receive(forged(update, {"task.json": sealed(values)}))] == ["middle"]
    assert model.verify()


@pytest.mark.parametrize("file", [BORN, PROBE, SPREAD])
def test_a_file_that_is_not_the_tasks_is_refused(
    pair: tuple[Model, Path, dict[str, Any]], trained: Path, file: str
) -> None:
    model, update, _ = pair
    content = bytearray((trained / TASK / file).read_bytes())
    content[-1] ^= 1
    refused(model, forged(update, {file: bytes(content)}), "sha256 differs")


def test_another_network_than_the_one_that_was_measured_is_refused(
    pair: tuple[Model, Path, dict[str, Any]], trained: Path
) -> None:
    model, update, values = pair
    tensors = load_file(trained / TASK / BORN)
    tensors["head/bias"] = tensors["head/bias"] + 1e-3
    content = save(tensors)
    values["files"][BORN] = {"bytes": len(content), "sha256": sha256(content)}
    own = {"task.json": sealed(values), BORN: content}
    refused(model, forged(update, own), "'middle' would not be the network it was")


@pytest.mark.parametrize("change", [{"number": 5}, {"name": "other"}])
def test_a_task_that_is_not_where_the_header_says_is_refused(
    pair: tuple[Model, Path, dict[str, Any]], change: dict[str, Any]
) -> None:
    model, update, values = pair
    refused(model, forged(update, {"task.json": sealed(values | change)}), "is not where its header says")


def test_a_task_that_is_not_known_by_the_hash_in_the_header_is_refused(
    pair: tuple[Model, Path, dict[str, Any]],
) -> None:
    model, update, _ = pair
    listed = [{"name": "middle", "hash": "0" * 64}]
    refused(model, forged(update, {}, tasks=listed), "is not where its header says")


def test_a_part_that_was_damaged_on_its_way_is_counted(pair: tuple[Model, Path, dict[str, Any]]) -> None:
    model, update, _ = pair
    content = update.read_bytes()
    update.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(model, update, r"is damaged \(sha256 of part 4 differs\); fetch it again")


def test_a_whole_model_that_is_not_the_one_it_names_is_refused(trained: Path, tmp_path: Path) -> None:
    open_model(trained).ship(tmp_path / "all.zfu")
    content = (tmp_path / "all.zfu").read_bytes()
    start = len(MAGIC) + 8
    end = start + int.from_bytes(content[len(MAGIC) : start], "big")
    values = json.loads(content[start:end]) | {"model": "0" * 64}
    values.pop("seal")
    text = sealed(values)
    (tmp_path / "all.zfu").write_bytes(MAGIC + len(text).to_bytes(8, "big") + text + content[end:])
    with pytest.raises(ModelError, match="does not hold the model that it names"):
        open_model(tmp_path / "m").receive(tmp_path / "all.zfu")
    assert not (tmp_path / "m").exists()


def test_tasks_without_their_model_receive_nothing(model: Model, tmp_path: Path) -> None:
    model.ship(tmp_path / "all.zfu")
    (model.path / "model.json").unlink()
    before = tree(model.path)
    with pytest.raises(Damaged, match=r"model\.json.*it is missing"):
        model.receive(tmp_path / "all.zfu")
    assert tree(model.path) == before


@pytest.mark.parametrize("file", [BORN, PROBE, SPREAD])
def test_a_damaged_file_is_not_shipped(model: Model, tmp_path: Path, file: str) -> None:
    content = bytearray((model.path / TASK / file).read_bytes())
    content[-1] ^= 1
    (model.path / TASK / file).write_bytes(content)
    with pytest.raises(Damaged, match="sha256 differs"):
        model.ship(tmp_path / "u.zfu")
    assert not (tmp_path / "u.zfu").exists()


@pytest.mark.parametrize("since", [0, 3, "", "lower"])
def test_what_is_no_task_is_nothing_to_ship_since(trained: Path, tmp_path: Path, since: str | int) -> None:
    with pytest.raises(ModelError, match="no task"):
        open_model(trained).ship(tmp_path / "u.zfu", since=since)
    assert not (tmp_path / "u.zfu").exists()
