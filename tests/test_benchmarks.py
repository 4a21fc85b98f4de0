"""The benchmarks run: at a size that says nothing of speed."""

from __future__ import annotations

import functools
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from benchmarks import __main__ as bench
from benchmarks import backbone, conversion, photos, replay, scaling_tables, search, step_tables, steps, tasks
from benchmarks.packed import CIFAR, PARTS, unseen
from benchmarks.timing import Step
from zeroforget import nets


def once(contest: dict[str, Step], **_: object) -> dict[str, float]:
    """Every step is made; all take the same time."""
    for step in contest.values():
        step()
    return dict.fromkeys(contest, 2.0)


def test_make_bench_measures_every_step_against_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", {"small": ("vgg16-tiny", (3, 32, 32), 0.05, 2)})
    monkeypatch.setattr(bench, "medians", once)
    rows = dict(bench.step_ratios("cpu"))
    sides = ["first task / finetuning", "floor / finetuning", "naive / finetuning", "tfm-nofn/8 / finetuning"]
    sides += [
        "tfm/8 / finetuning",
        "tfm/8, rank 16 / finetuning",
        "with normalization / without",
        "with rank 16 / without",
    ]
    assert rows == {f"small; {frozen} frozen: {side}": 1.0 for frozen in ("95%", "50%") for side in sides}


def test_steps_are_measured_by_command_and_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [
        "--shape",
        "3,32,32",
        "--width",
        "0.05",
        "--batch",
        "2",
        "--device",
        "cpu",
        "--frozen",
        "0.5",
        "--align",
        "8",
    ]
    words += ["--options", '{"norm": "batch"}', "--precision", "tf32", "--out", str(tmp_path / "steps.json")]
    monkeypatch.setattr(sys, "argv", ["steps.py", *words])
    monkeypatch.setattr(steps, "medians", once)
    monkeypatch.setattr(steps, "hurry", lambda: None)  # what it sets would stay for other tests
    steps.main()
    written = json.loads((tmp_path / "steps.json").read_text())
    assert [row["step"] for row in written["rows"]] == [
        "finetuning",
        "first task",
        "floor",
        "naive",
        "tfm-nofn/8",
        "tfm/8",
        "tfm/8, rank 16",
    ]
    assert json.loads(written["args"]["shape"]) == [3, 32, 32]


def test_searches_are_compared_with_whole_ones_as_far_as_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "search.json"
    words = ["--images", "60", "--tasks", "2", "--seeds", "0", "--whole", "1", "--device", "cpu"]
    words += ["--regime", '{"epochs": 2}', "--out", str(file)]
    monkeypatch.setattr(sys, "argv", ["search.py", *words])
    search.main()
    first, second, median, without = capsys.readouterr().out.splitlines()
    assert first.startswith("digits/5 seed 0 digits-1: ")
    assert first.endswith(" of one task, same choice and bits")
    assert second.endswith(" of one task")
    assert " / " not in second
    assert median.endswith("growth search / one task, median of 2")
    assert without.endswith("1 of 1 searches agree bit for bit")
    assert ["bits" in row for row in json.loads(file.read_text())["rows"]] == [True, False]
    assert len(replay.read(file)) == 1
    assert ["–" in line for line in step_tables.searches([file]).splitlines()[2:5]] == [False, True, True]


def test_the_backbone_is_trained_written_and_read_again(tmp_path: Path) -> None:
    """On two made-up data sets, packed as the real ones are; the twin never sees some of the classes."""
    for source, parts in PARTS.items():
        folder = tmp_path / source
        folder.mkdir()
        if source == "tiny-imagenet":
            words = [f"thing{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(200)]
            (folder / "index.json").write_text(json.dumps({"headers": [""], "words": words}))
        for part in [name for both in parts.values() for name in both]:
            drawn = np.random.RandomState(len(part)).randint(0, 256, (20, 8, 8, 3), dtype=np.uint8)
            files = []
            for image in drawn:
                Image.fromarray(image).save(stream := io.BytesIO(), "PNG")
                files.append(stream.getvalue())
            (folder / f"{part}.bin").write_bytes(b"".join(files))
            ends = np.cumsum([0, *map(len, files)])
            labels = np.arange(20) * (5 if source == "cifar-100" else 10)
            np.savez(folder / f"{part}.npz", offsets=ends, labels=labels, headers=np.zeros(20, np.int64))
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--without", "40", "--device", "cpu"]
    backbone.main([*words, "--batch", "32", "--lr", "0.01", "--epochs", "1"])
    facts = json.loads((tmp_path / "out" / "backbone-without-40.json").read_text())
    assert {source: len(own) for source, own in facts["without"].items()} == {"tiny-imagenet": 20, "cifar-100": 20}
    assert facts["pictures"] < 100
    values = load_file(tmp_path / "out" / "backbone-without-40.safetensors")
    assert {value.dtype for value in values.values()} == {torch.float16}
    assert facts["bytes"] < 5_000_000
    lacking = nets.build("compact", (3, 64, 64)).load_state_dict(values, strict=False)
    assert not lacking.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in lacking.missing_keys)


def test_held_out_classes_are_in_neither_data_set(tmp_path: Path) -> None:
    (tmp_path / "tiny-imagenet").mkdir()
    words = ["goldfish", "bee", "sulphur butterfly, sulfur butterfly", "school bus", "teapot", "iPod", "trilobite"]
    (tmp_path / "tiny-imagenet" / "index.json").write_text(json.dumps({"words": words}))
    found = unseen(tmp_path, 8, 0)
    assert found["tiny-imagenet"] == [0, 4, 5, 6]
    assert not {"bee", "butterfly", "bus"} & {CIFAR[label] for label in found["cifar-100"]}
    assert found == unseen(tmp_path, 8, 0)
    assert len(unseen(tmp_path, 160, 1)["cifar-100"]) == 80


def test_more_hosts_are_set_beside_one(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    facts = {"command": "python", "device": "CPU", "torch": "2", "commit": "abc", "date": "today"}
    took = {"args": {"runs": "6", "repeat": "3"}, "cores": 2, "load before": [0.5, 0, 0]}
    file.write_text(json.dumps(facts | took | {"median": {"serial": 80.0, "nodes 1": 90.0, "nodes 2": 50.0}}))
    lines = scaling_tables.hosts([file]).splitlines()
    assert lines[2:5] == [
        "| one process, runs one after another | 80 | 4.5 | 1.12 |",
        "| 1 of Ray's nodes | 90 | 4.0 | 1.00 |",
        "| 2 of Ray's nodes | 50 | 7.2 | 1.80 |",
    ]


def test_what_many_tasks_cost_is_a_column_each(tmp_path: Path) -> None:
    facts = {"command": "python", "device": "CPU", "torch": "2", "commit": "abc", "date": "today", "args": {}}
    took = {"learn": {"1": 0.5, "10": 5.0}, "step": {"1": 0.0015, "10": 0.0015}}
    ratio = {"verify, memory / (network + one dense)": {"200": 1.5}}
    (tmp_path / "a.json").write_text(json.dumps(facts | {"took": took, "exponents": {"learn": 1.0, "step": 0.0}}))
    (tmp_path / "b.json").write_text(json.dumps(facts | {"took": ratio, "network": {"network": "wide"}}))
    said = scaling_tables.tasks([tmp_path / "a.json", tmp_path / "b.json"])
    assert "| tasks in the model | 1 | 10 | grows as |" in said
    assert "| a training step, ms | 1.5 | 1.5 | T^0.0 |" in said
    assert "`verify` of 200 tasks of `wide` took 1.50 times the memory" in said


def test_costs_of_many_tasks_may_be_measured_in_pieces() -> None:
    before = {"network": {"width": 1}, "took": {"step": {"1": 1.0, "10": 2.0}, "learn": {"1": 5.0}}}
    joined = tasks.joined(before, {"width": 1}, {"step": {100: 4.0, 10: 3.0}})
    assert joined == {"step": {1: 1.0, 10: 3.0, 100: 4.0}, "learn": {1: 5.0}}
    with pytest.raises(SystemExit, match="another network"):
        tasks.joined(before, {"width": 2}, {})


def test_photos_are_told_set_by_set_and_rows_measured_again_by_their_own_commit(tmp_path: Path) -> None:
    rows = [
        {"what": what, "place": place, "set": name, "right": 30 + place, "pictures": 40, "seconds": 2.0, "bytes": 1000}
        for place, what in enumerate(("frozen", "rank 16"))
        for name in (*photos.MEASURED, *photos.TUNED[:2])
    ]
    rows[0]["commit"] = "bbb"
    found = {"tasks": rows, "command": "run", "commit": "aaa", "date": "today", "seed": 0, "torch": "2"}
    found |= {"uneven": [{"pictures": 9, "as they are": 3, "even": 6}], "guesses": []}
    (tmp_path / "photos.json").write_text(json.dumps(found))
    page = photos.page([tmp_path / "photos.json"])
    assert "| | food | animals | things | outdoors | all four (95 % interval) | s a task | kB a task |" in page
    assert "| rank 16 | 77.5 | 77.5 | 77.5 | 77.5 | 77.5 (70–83) | 2 | 1 |" in page
    assert "commit bbb and commit aaa" in page
    assert "| | fish | traffic | fish and traffic (95 % interval) |" in page


def test_a_conversion_is_measured_in_forward_passes_and_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(conversion.Vit, 64, 1)
    monkeypatch.setattr(conversion, "Vit", small)
    row = conversion.measure("vit_b_16")
    assert (row["network"], row["axes"]) == ("vit_b_16", 3)
    assert row["forwards"] > 0
    assert row["memory"] >= 0
