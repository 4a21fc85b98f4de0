"""The benchmarks run: at a size that says nothing of speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import replay, search, step_tables, steps
from benchmarks.timing import Step


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
    sides += ["tfm/8 / finetuning", "with normalization / without"]
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
