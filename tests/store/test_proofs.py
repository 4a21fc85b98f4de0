"""Each of verify's proofs by itself: a forger who makes every hash anew is found by what the networks answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tests.store.helpers import learn_more, tree
from zeroforget.files import atomic
from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import sealed
from zeroforget.store import Damaged, Model, ModelError
from zeroforget.store.folder import BORN, PROBE, Folder
from zeroforget.store.network import TOLERANCE, probe_logits
from zeroforget.store.verify import Report, verify

ELSEWHERE = {"processor": "another"}


def forged(model: Model, file: str, change: Callable[[dict[str, Tensor]], object], **elsewhere: str) -> Report:
    """What verify says of a newest task whose tensors are others, with the hash of the file and the seal made anew."""
    place = model.path / "tasks" / "002-middle"
    tensors = load_file(place / file)
    change(tensors)
    content = save(tensors)
    (place / file).write_bytes(content)
    values = json.loads((place / "task.json").read_bytes())
    values.pop("seal")
    values["files"][file] = {"bytes": len(content), "sha256": sha256(content)}
    values["environment"].update(elsewhere)
    (place / "task.json").write_bytes(sealed(values))
    return verify(Folder(model.path))


def shifted(model: Model, share: float) -> Callable[[dict[str, Tensor]], object]:
    """The first class's logits moved by a share of the largest in the probe."""
    largest = float(load_file(model.path / "tasks" / "002-middle" / PROBE)["logits"].abs().max())

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["head/bias"][0] += share * largest

    return change


def test_elsewhere_logits_within_the_tolerance_do_not_hide_another_network(model: Model) -> None:
    report = forged(model, BORN, shifted(model, TOLERANCE / 4), **ELSEWHERE)
    assert [proof.holds for proof in report.proofs] == [True, True, False]
    assert "'middle': its network is not the one" in report.proofs[2].moved[0]
    assert not report


def test_elsewhere_one_class_beyond_the_tolerance_is_told(model: Model) -> None:
    report = forged(model, BORN, shifted(model, TOLERANCE * 4), **ELSEWHERE)
    assert [proof.holds for proof in report.proofs] == [True, False, False]
    assert "off by more than 0.0001 of the largest" in report.proofs[1].moved[0]


def test_other_pictures_in_the_probe_are_answered_otherwise(model: Model) -> None:
    report = forged(model, PROBE, lambda tensors: tensors["images"].add_(1))
    assert [proof.holds for proof in report.proofs] == [True, False, True]
    assert not report


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors["logits"].add_(1),
        lambda tensors: tensors.update(logits=tensors["logits"].double()),
        lambda tensors: tensors.update(images=tensors["images"].float()),
        lambda tensors: tensors.pop("images"),
        lambda tensors: tensors.pop("logits"),
    ],
)
@pytest.mark.parametrize("elsewhere", [{}, ELSEWHERE])
def test_a_probe_that_is_another_is_told(
    model: Model, change: Callable[[dict[str, Tensor]], object], elsewhere: dict[str, str]
) -> None:
    report = forged(model, PROBE, change, **elsewhere)
    assert not report
    assert report.proofs[1].moved == ("task 'middle': its probe is not the one that was written down",)
    assert "1 of 2 tasks bit for bit" in report.proofs[1].found


def test_a_probe_has_four_pictures_none_twice(trained: Path, model: Model) -> None:
    for facts in model.tasks:
        images = load_file(trained / "tasks" / facts.folder / PROBE)["images"]
        assert len(images) == min(4, facts.data.held_out)
        assert len(torch.unique(images.flatten(1), dim=0)) == len(images)


def test_a_held_out_part_is_found_again_by_its_own_seed_and_share(model: Model, data: Path) -> None:
    facts = learn_more(model, data, "high", epochs=1, seed=3, held_out=0.4)
    (one,) = model.verify({"high": data / "high"}).measured
    assert one.held_out == facts.accuracy == one.recorded
    assert facts.data.held_out in {18, 19, 20}


def test_other_pictures_are_measured_and_not_taken_for_the_held_out_ones(
    trained: Path, model: Model, data: Path, tmp_path: Path
) -> None:
    """Every picture lies with the other class, and there is one file that is none."""
    low = tmp_path / "low"
    for here, there in (("digit0", "digit1"), ("digit1", "digit0")):
        shutil.copytree(data / "low" / here, low / there)
    (low / "digit0" / "notes.txt").write_text("mine")
    report = model.verify({"low": low})
    (one,) = report.measured
    straight = model.verify({"low": data / "low"}).measured[0].accuracy
    assert one.accuracy == pytest.approx(1 - straight)
    assert (one.pictures, one.skipped, one.held_out) == (48, 1, None)
    assert report  # nothing was written down about these


def test_hash_and_facts_that_come_back_are_those_on_disk(model: Model, data: Path) -> None:
    facts = learn_more(model, data, "high", epochs=1)
    task = model.path / "tasks" / "003-high" / "task.json"
    assert facts.hash == sha256(task.read_bytes()) == model.head == model.tasks[-1].hash
    before = json.loads(task.read_bytes())["before"]
    assert before == model.tasks[1].hash


def test_nothing_is_learned_onto_a_task_that_is_not_what_it_was(model: Model, data: Path) -> None:
    """The older task's file says of its network what is not so; its hashes are right."""
    place = model.path / "tasks" / "002-middle" / "task.json"
    values = json.loads(place.read_bytes()) | {"network": "0" * 64}
    values.pop("seal")
    place.write_bytes(sealed(values))
    before = tree(model.path)
    with pytest.raises(ModelError, match="task 'middle' would not be the network it was; nothing was changed"):
        learn_more(model, data, "high", epochs=1)
    assert tree(model.path) == before


def test_what_the_disk_does_not_give_back_is_no_task(model: Model, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, before = atomic.write_new, tree(model.path)

    def spoiled(path: Path, content: bytes) -> None:
        write(path, content[:-1] + bytes([content[-1] ^ 1]) if path.name == BORN else content)

    monkeypatch.setattr(atomic, "write_new", spoiled)
    with pytest.raises(Damaged, match="sha256 differs"):
        learn_more(model, data, "high", epochs=1)
    assert tree(model.path) == before


def test_births_that_do_not_follow_from_the_growth_are_told(model: Model) -> None:
    place = model.path / "tasks" / "002-middle" / "task.json"
    values = json.loads(place.read_bytes())
    values.pop("seal")
    axis = next(iter(values["born"]))
    values["born"][axis] += 1
    place.write_bytes(sealed(values))
    report = verify(Folder(model.path))
    assert [proof.holds for proof in report.proofs] == [True, False, False]
    assert "field 'born' does not follow from its growth" in report.proofs[1].moved[0]


def test_probes_are_answered_on_one_thread(model: Model) -> None:
    seen = []

    class Counting(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return x

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        probe_logits(Counting(), torch.zeros(1, 1, 8, 8, dtype=torch.uint8), model.tasks[0].preprocessing)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
