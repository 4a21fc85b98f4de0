"""Curves of growth searches that were measured, replayed: what a search takes to be possible was never exceeded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import replay
from benchmarks.replay import MARGINS, Candidates, Course

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("search-*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_stopping_early_decides_as_training_to_the_end(file: Path) -> None:
    searches = replay.read(file)
    assert searches
    for each in searches:
        assert each.most_used() < 0.9, each.about
        assert all(each.replay(margin)[0] for margin in MARGINS), each.about
    full = sum(len(course.rates) for each in searches for course in each.courses)
    assert sum(each.replay(0.015)[1] for each in searches) < full


def candidates(late: int) -> Candidates:
    """The smaller one rises by so many of 100 images at its very end; the larger one has 80 from early on."""
    rates = [0.1] * 12 + [0.1 / 81] * 12
    small = Course(rates, [60] * 23 + [60 + late], [*range(24)])
    return Candidates("made up", 100, [small, Course(rates, [80] * 24, [0])])


def test_a_rise_beyond_what_was_taken_to_be_possible_is_found() -> None:
    assert candidates(1).most_used() < 1
    assert candidates(20).most_used() > 1
    assert candidates(1).replay(0.015)[0]
    assert not candidates(20).replay(0.015)[0]
    assert candidates(20).replay(0.5)[0]  # all are within such a margin, whatever they come to


def test_both_kinds_of_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Curves as `benchmarks.search` writes them and as the small file holds them: the same searches, the same lines."""
    curve = [(0.1, 2.0, 0.25), (0.1, 1.0, 0.5), (0.05, 1.5, 0.75)]
    row = {"seed": 3, "task": "a", "images": 4, "curves": [curve, curve[:2]]}
    facts = {"command": "python -m benchmarks.search", "commit": "abc", "date": "today", "args": {"regime": "{}"}}
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(facts | {"rows": [row]}))
    expected = Candidates(
        "python -m benchmarks.search at abc, today: seed 3, a",
        4,
        [Course([0.1, 0.1, 0.05], [1, 2, 3], [0, 1]), Course([0.1, 0.1], [1, 2], [0, 1])],
    )
    assert replay.read(first) == [expected]
    courses = [
        {"rates": [(0.1, 2), (0.05, 1)], "right": [1, 2, 3], "kept": [0, 1]},
        {"rates": [(0.1, 2)], "right": [1, 2], "kept": [0, 1]},
    ]
    second.write_text(json.dumps({"searches": [{"about": expected.about, "images": 4, "courses": courses}]}))
    for file in (first, second):
        monkeypatch.setattr(sys, "argv", ["replay", str(file)])
        replay.main()
    assert replay.read(second) == [expected]
    said = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said[0] == said[1]
    assert said[0].startswith("1 searches; with margins of 0.1, 1.5, 3 points 1, 1, 1 are decided alike")
    last = facts | {"args": {"regime": "{'keep': 'last'}"}, "rows": [row]}
    first.write_text(json.dumps(last))
    assert replay.read(first)[0].courses[0] == replace(expected.courses[0], kept=[0, 1, 2])


@pytest.mark.parametrize("text", [None, "{", "[1]", '{"a": 1}', '{"args": {"regime": "{}"}, "rows": [{"seed": 0}]}'])
def test_a_file_without_curves_is_told_in_a_line(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["replay", str(file)])
    with pytest.raises(SystemExit):
        replay.main()
    why = "No such file or directory" if text is None else "it is not a file that benchmarks.search wrote"
    if text is not None and "seed" in text:
        why = "in none was every candidate trained to its end"
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"no curves of growth searches in {file}: {why}")


def test_one_that_never_answered_with_numbers_is_not_chosen() -> None:
    rates = [0.1] * 3
    never, sound = Course(rates, [10] * 3, []), Course(rates, [50, 60, 70], [0, 1, 2])
    for courses in ([never, sound], [sound, never]):
        assert Candidates("made up", 100, courses).replay(0.015)[0]
