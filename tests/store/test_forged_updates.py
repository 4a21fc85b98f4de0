"""Updates whose own hashes are all right, and which are refused nevertheless: nothing untrue comes into a model."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.store.forgeries import taken_apart
from tests.store.helpers import tree
from zeroforget import nets
from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import sealed
from zeroforget.store import Damaged, Model, ModelError, open_model
from zeroforget.store.folder import BORN, PROBE, SPREAD
from zeroforget.store.states import chosen
from zeroforget.store.trust import read_trust
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
    refused(model, forged(update, own), "'middle': its network is not the one whose accuracy")


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


def rewritten(values: dict[str, Any], name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """task.json and a file of other tensors, each hash right: a forger's work."""
    content = save(dict(tensors))
    values["files"][name] = {"bytes": len(content), "sha256": sha256(content)}
    return {"task.json": sealed(values), name: content}


def as_they_are(probe: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    values["probe"] = sha256(probe["logits"].numpy().tobytes())


def other_answers(probe: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    probe["logits"] = probe["logits"] + 1
    as_they_are(probe, values)


def no_pictures(probe: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    probe["images"], probe["logits"] = probe["images"][:0].clone(), probe["logits"][:0].clone()
    as_they_are(probe, values)


@pytest.mark.parametrize("lie", [other_answers, no_pictures])
def test_a_probe_that_its_network_does_not_answer_so_is_refused(
    pair: tuple[Model, Path, dict[str, Any]], trained: Path, lie: Callable[[Any, Any], None]
) -> None:
    model, update, values = pair
    probe = load_file(trained / TASK / PROBE)
    lie(probe, values)
    refused(model, forged(update, rewritten(values, PROBE, probe)), "'middle': its (logits for the )?probe")


@pytest.mark.parametrize("change", [{"mean": [0.9]}, {"std": [9.0]}, {"mean": [1e29]}, {"std": [1e29]}])
def test_another_treatment_of_pictures_than_the_one_measured_is_refused(
    pair: tuple[Model, Path, dict[str, Any]], change: dict[str, Any]
) -> None:
    model, update, values = pair
    values["preprocessing"].update(change)
    refused(model, forged(update, {"task.json": sealed(values)}), r"its logits for the probe|must be a number from")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["head/weight", "born/0.weight:rows", None])
def test_weights_that_are_no_numbers_are_refused(
    pair: tuple[Model, Path, dict[str, Any]], trained: Path, name: str | None, value: float
) -> None:
    model, update, values = pair
    tensors = load_file(trained / TASK / BORN)
    tensors[name if name in tensors else next(iter(tensors))].flatten()[0] = value
    refused(model, forged(update, rewritten(values, BORN, tensors)), "holds NaN or infinite values")


@pytest.mark.parametrize("name", ["means", "directions", "variances", "rest"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_spread_that_is_none_is_refused(
    pair: tuple[Model, Path, dict[str, Any]], trained: Path, name: str, value: float
) -> None:
    if value == -1.0 and name in {"means", "directions"}:
        pytest.skip("these may be below zero")
    model, update, values = pair
    tensors = load_file(trained / TASK / SPREAD)
    tensors[name].flatten()[0] = value
    refused(model, forged(update, rewritten(values, SPREAD, tensors)), "not all finite numbers|not all above zero")


def test_a_spread_of_another_shape_is_refused(pair: tuple[Model, Path, dict[str, Any]], trained: Path) -> None:
    model, update, values = pair
    tensors = load_file(trained / TASK / SPREAD)
    tensors["means"] = tensors["means"][:, 1:].clone()
    refused(model, forged(update, rewritten(values, SPREAD, tensors)), "do not fit the task's network")


@pytest.mark.parametrize(
    "name",
    [
        "middle ",
        " middle",
        unicodedata.normalize("NFD", "mittlère"),
        "\U00020000" * 51,
        "mid\x1b[2J",
        "mid\u202edle",
        "m\n",
    ],
)
def test_a_name_that_no_task_can_have_is_refused(pair: tuple[Model, Path, dict[str, Any]], name: str) -> None:
    model, update, values = pair
    own = {"task.json": sealed(values | {"name": name})}
    listed = [{"name": name, "hash": sha256(own["task.json"])}]
    refused(model, forged(update, own, tasks=listed), "is none that a task can have")


@pytest.mark.parametrize("sign", ["\x1b]0;owned\x07", "\u202e", "\n", "\x00", "\x9b2J", "\u2066"])
def test_classes_whose_names_would_command_a_terminal_are_refused(
    pair: tuple[Model, Path, dict[str, Any]], sign: str
) -> None:
    model, update, values = pair
    values["classes"][0] += sign
    refused(model, forged(update, {"task.json": sealed(values)}), "a name with control signs")


def test_a_second_task_of_one_name_is_refused(pair: tuple[Model, Path, dict[str, Any]]) -> None:
    model, update, values = pair
    own = {"task.json": sealed(values | {"name": "low"})}
    refused(
        model, forged(update, own, tasks=[{"name": "low", "hash": sha256(own["task.json"])}]), "a second task 'low'"
    )


@pytest.mark.parametrize("backbone", [{"network": "resnet18", "options": {"width": 2.0}}, {"network": "resnet50"}])
def test_a_small_update_does_not_make_a_large_network(
    trained: Path, tmp_path: Path, backbone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are counted without storage; no tensor of it is ever made."""
    source = open_model(trained)
    source.ship(tmp_path / "all.zfu")
    content = (tmp_path / "all.zfu").read_bytes()
    start = len(MAGIC) + 8
    end = start + int.from_bytes(content[len(MAGIC) : start], "big")
    header = json.loads(content[start:end])
    parts = []
    for one in header["files"]:
        parts.append(content[end : end + one["bytes"]])
        end += one["bytes"]
    model, task = json.loads(parts[0]), json.loads(parts[1])
    model["backbone"] |= {"shape": [1, 8, 8]} | backbone
    for values in (header, model, task):
        values.pop("seal")
    parts[0] = sealed(model)
    parts[1] = sealed(task | {"before": sha256(parts[0])})
    parts, header["tasks"] = parts[:5], header["tasks"][:1]
    header["model"] = header["base"] = sha256(parts[0])
    header["tasks"][0]["hash"] = sha256(parts[1])
    header["files"] = [{"bytes": len(part), "sha256": sha256(part)} for part in parts]
    text = sealed(header)
    (tmp_path / "all.zfu").write_bytes(b"".join([MAGIC, len(text).to_bytes(8, "big"), text, *parts]))
    built: list[str] = []
    real = nets.build
    monkeypatch.setattr(nets, "build", lambda *a, **b: built.append(str(torch.get_default_device())) or real(*a, **b))
    with pytest.raises(ModelError, match=r"the network would have .* weights; .* are the most"):
        open_model(tmp_path / "phone").receive(tmp_path / "all.zfu")
    assert set(built) == {"meta"}
    assert not (tmp_path / "phone").exists()


@pytest.mark.parametrize("place", [0, 2])
def test_first_values_that_cannot_be_drawn_are_refused(trained: Path, tmp_path: Path, place: int) -> None:
    """A spread below zero, or less than no inputs."""
    open_model(trained).ship(tmp_path / "all.zfu")
    parts = taken_apart((tmp_path / "all.zfu").read_bytes())
    assert parts.model is not None
    for numbers in parts.model["fresh"].values():
        numbers[place] = -1.0
    (tmp_path / "all.zfu").write_bytes(parts.whole())
    with pytest.raises(ModelError, match="must be a spread of 0 or more"):
        open_model(tmp_path / "phone").receive(tmp_path / "all.zfu")
    assert not (tmp_path / "phone").exists()


def test_a_lock_that_is_a_link_is_not_written_through(pair: tuple[Model, Path, dict[str, Any]], tmp_path: Path) -> None:
    model, update, _ = pair
    (tmp_path / "mine").write_text("mine")
    (model.path / ".lock").unlink()
    (model.path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(ModelError, match=r"\.lock is a link"):
        model.receive(update)
    (model.path / ".lock").unlink()
    os.link(tmp_path / "mine", model.path / ".lock")
    model.receive(update)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["tasks", ".training", "model.json"])
def test_a_part_of_a_model_that_is_a_link_is_not_written_through(
    pair: tuple[Model, Path, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    model, update, _ = pair
    (model.path / name).is_dir() or (model.path / name).exists() or (model.path / name).mkdir()
    (model.path / name).rename(tmp_path / "elsewhere")
    (model.path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="is a link, and nothing is written through one"):
        model.receive(update)


@pytest.mark.parametrize("name", ["model.json", f"{TASK}/task.json", f"{TASK}/{BORN}", ".lock"])
def test_a_pipe_in_a_model_is_damage_and_nothing_waits_for_it(model: Model, name: str, data: Path) -> None:
    (model.path / name).unlink(missing_ok=True)
    os.mkfifo(model.path / name)
    report = model.verify()
    assert report.holds is (name == ".lock")
    with pytest.raises((ModelError, OSError)):
        open_model(model.path).undo() if name == ".lock" else open_model(model.path).network()


@pytest.mark.parametrize("name", [".aside-received-0", ".aside-left", ".training"])
@pytest.mark.parametrize("kind", ["link", "nowhere", "pipe"])
def test_what_lies_where_is_written_aside_is_removed_and_not_followed(
    pair: tuple[Model, Path, dict[str, Any]], tmp_path: Path, name: str, kind: str
) -> None:
    model, update, _ = pair
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    if kind == "pipe":
        os.mkfifo(model.path / name)
    else:
        (model.path / name).symlink_to(tmp_path / ("theirs" if kind == "link" else "nowhere"))
    if name == ".training" and kind != "pipe":
        with pytest.raises(ModelError, match="is a link"):
            model.receive(update)
    else:
        assert len(model.receive(update)) == 1
        assert name == ".training" or not (model.path / name).exists()
    assert (tmp_path / "theirs" / "file").read_text() == "theirs"


def test_undo_and_learn_wait_for_no_pipe_and_follow_no_link(model: Model, data: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (model.path / ".undone-002-middle").symlink_to(tmp_path / "theirs")
    assert model.undo() == "middle"
    os.mkfifo(model.path / ".training")
    model.learn(data / "high", "high", epochs=1)
    (model.path / ".training").mkdir()
    os.mkfifo(model.path / ".training" / "plan")
    (model.path / ".training-middle").symlink_to(tmp_path / "theirs")
    model.learn(data / "middle", "middle", epochs=1)
    assert model.verify()
    assert not list((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize("name", ["trust.json", "serving.json"])
def test_a_link_to_nothing_is_no_absence(model: Model, tmp_path: Path, name: str) -> None:
    """Else whoever puts one there would make a model trust everybody, or serve its newest state."""
    (model.path / name).symlink_to(tmp_path / "nothing")
    with pytest.raises(Damaged, match="it is missing"):
        read_trust(model.folder) if name == "trust.json" else chosen(model.folder)


@pytest.mark.parametrize("kind", ["pipe", "file", "nowhere"])
def test_a_model_whose_tasks_are_no_folder_is_damaged(model: Model, tmp_path: Path, kind: str) -> None:
    (model.path / "tasks").rename(tmp_path / "away")
    if kind == "pipe":
        os.mkfifo(model.path / "tasks")
    elif kind == "file":
        (model.path / "tasks").write_text("")
    else:
        (model.path / "tasks").symlink_to(tmp_path / "nothing")
    report = model.verify()
    assert not report
    assert "it is not a folder" in str(report.proofs)
