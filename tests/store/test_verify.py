"""Every file of a model, damaged in every way: `verify` says so, and nothing crashes."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from tests.store.helpers import learn_more, tree
from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import sealed
from zeroforget.store import Damaged, Model, ModelError, Newer, open_model
from zeroforget.store.folder import Folder
from zeroforget.store.verify import verify

FILES = [
    "model.json",
    *(
        f"tasks/{task}/{name}"
        for task in ("001-low", "002-middle")
        for name in ("task.json", "born.safetensors", "probe.safetensors", "spread.safetensors")
    ),
]


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def cut(path: Path, place: float) -> None:
    path.write_bytes(path.read_bytes()[: int(place * path.stat().st_size)])


def longer(path: Path, _: float) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def remove(path: Path, _: float) -> None:
    path.unlink()


def replaced_by_folder(path: Path, _: float) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    **{f"flip {p}": (flip, p) for p in (0.0, 0.37, 1.0)},
    **{f"cut {p}": (cut, p) for p in (0.0, 0.5, 0.99)},
    **{way.__name__: (way, 0.0) for way in (longer, remove, replaced_by_folder)},
}


def look(path: Path) -> None:
    """All that a reader does; only ModelError may come of it."""
    try:
        model = open_model(path)
        model.dense(model.tasks[-1].name)
        model.predict(torch_picture(model))
    except ModelError:
        pass


def torch_picture(model: Model) -> bytes:
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("L", (8, 8), 100).save(out, format="PNG")
    return out.getvalue()


@pytest.mark.parametrize("file", FILES)
def test_damage_is_caught_named_and_survived(copied: Callable[[], Model], file: str) -> None:
    path = copied().path
    whole = (path / file).read_bytes()
    for name, (way, place) in DAMAGES.items():
        way(path / file, place)
        report = verify(Folder(path))
        assert not report, (file, name)
        assert not report.proofs[0].holds, (file, name)
        said = " ".join(report.proofs[0].moved)
        assert Path(file).name in said or Path(file).parts[1] in said, (file, name, said)
        assert "Put back" in said
        look(path)
        if (path / file).is_dir():
            (path / file).rmdir()
        (path / file).write_bytes(whole)
    assert verify(Folder(path))


def test_swapped_files_are_caught(copied: Callable[[], Model]) -> None:
    path = copied().path
    pairs = [(a, b) for a, b in itertools.combinations(FILES, 2) if Path(a).suffix == Path(b).suffix]
    assert len(pairs) == 18
    for a, b in pairs:
        first, second = (path / a).read_bytes(), (path / b).read_bytes()
        (path / a).write_bytes(second)
        (path / b).write_bytes(first)
        assert not verify(Folder(path)), (a, b)
        look(path)
        (path / a).write_bytes(first)
        (path / b).write_bytes(second)
    assert verify(Folder(path))


def test_folders_renamed_removed_doubled_and_swapped(copied: Callable[[], Model]) -> None:
    def first_gone(tasks: Path) -> None:
        shutil.rmtree(tasks / "001-low")

    def doubled(tasks: Path) -> None:
        shutil.copytree(tasks / "002-middle", tasks / "002-again")

    def renamed(tasks: Path) -> None:
        (tasks / "002-middle").rename(tasks / "002-other")

    def swapped(tasks: Path) -> None:
        (tasks / "001-low").rename(tasks / "x")
        (tasks / "002-middle").rename(tasks / "001-low")
        (tasks / "x").rename(tasks / "002-middle")

    def a_file(tasks: Path) -> None:
        shutil.rmtree(tasks / "002-middle")
        (tasks / "002-middle").write_text("")

    for way in (first_gone, doubled, renamed, swapped, a_file):
        path = copied().path
        way(path / "tasks")
        assert not verify(Folder(path)), way.__name__
        look(path)


def test_what_is_not_ours_is_left_alone(model: Model) -> None:
    (model.path / "tasks" / "notes.txt").write_text("mine")
    (model.path / "tasks" / ".DS_Store").write_bytes(b"")
    (model.path / "tasks" / "001-low" / "more.txt").write_text("mine too")
    assert model.verify()


def edited(path: Path, **changes: object) -> None:
    """Change a JSON file as one who knows the format would: with its seal made anew."""
    values = json.loads(path.read_text())
    values.pop("seal")
    path.write_bytes(sealed(values | changes))


def test_a_sealed_lie_about_the_accuracy_breaks_the_chain_or_the_hash(model: Model) -> None:
    head = model.head
    edited(model.path / "tasks/001-low/task.json", accuracy=0.123)
    with pytest.raises(Damaged, match="does not follow"):
        open_model(model.path)
    shutil.rmtree(model.path / "tasks/002-middle")
    assert open_model(model.path).head != head  # what `verify --is` compares


def test_tensors_changed_with_all_hashes_made_anew_do_not_answer_as_before(model: Model) -> None:
    place = model.path / "tasks/002-middle"
    tensors = load_file(place / "born.safetensors")
    tensors["head/bias"] = tensors["head/bias"] + 1e-3
    content = save(tensors)
    (place / "born.safetensors").write_bytes(content)
    files = json.loads((place / "task.json").read_text())["files"]
    files["born.safetensors"] = {"bytes": len(content), "sha256": sha256(content)}
    edited(place / "task.json", files=files)
    report = verify(Folder(model.path))
    assert [proof.holds for proof in report.proofs] == [True, False, False]
    assert "'middle': its logits" in report.proofs[1].moved[0]
    assert "'middle'" in report.proofs[2].moved[0]


def test_elsewhere_a_stated_tolerance_holds(model: Model) -> None:
    place = model.path / "tasks/002-middle"
    environment = json.loads((place / "task.json").read_text())["environment"]
    edited(place / "task.json", environment=environment | {"processor": "another"})
    report = verify(Folder(model.path))
    assert report
    assert "1 of 2 tasks bit for bit, 1 learned on another platform within 0.0001" in report.proofs[1].found


def test_a_newer_format_is_refused_politely(model: Model, data: Path) -> None:
    edited(model.path / "model.json", version=5)
    before = tree(model.path)
    for use in (open_model, lambda path: verify(Folder(path))):
        with pytest.raises(Newer, match=r"format version 5; this program knows versions up to 4\. Install a newer"):
            use(model.path)
    with pytest.raises(Newer):
        model.learn(data / "high", "high")
    assert tree(model.path) == before


def test_data_is_measured_again(model: Model, data: Path) -> None:
    report = model.verify({"low": data / "low", "middle": data / "middle"})
    assert report
    for one in report.measured:
        assert one.held_out == one.recorded == model.task(one.task).accuracy
    assert report.measured[0].pictures == 48
    edited(model.path / "tasks/002-middle/task.json", accuracy=0.123)
    report = verify(Folder(model.path), {"middle": data / "middle"})
    assert all(proof.holds for proof in report.proofs)
    assert not report
    with pytest.raises(ModelError, match="no class of this task"):
        model.verify({"low": data / "high"})


def test_undo_is_the_way_out_of_damage_in_the_newest_task(model: Model, data: Path) -> None:
    (model.path / "tasks/002-middle/task.json").write_text("{")
    damaged = model.path
    with pytest.raises(Damaged, match="zeroforget undo"):
        open_model(damaged)
    assert model.undo() == "middle"
    assert verify(Folder(damaged))
    learn_more(open_model(damaged), data, "high")
    assert verify(Folder(damaged))


def test_probes_do_not_depend_on_the_number_of_threads(model: Model) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert model.verify()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
