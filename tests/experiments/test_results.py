"""Metrics, against the paper's own tables and values worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.experiments.helpers import results
from zeroforget.experiments import paper
from zeroforget.experiments.disk import write_json
from zeroforget.experiments.results import Results, deviation, load_runs, mean

# Where the printed average is not that of the printed row:
# "Freezing" of the larger-first-task table averages all ten tasks (69.92), every other row tasks 2 to 10 (71.96).
OFF = {("tiny-imagenet/large-first", "freezing"): 71.956}


def from_paper(table: paper.PaperTable, row: paper.PaperRow) -> Results:
    """A run whose final row and forgetting are the paper's; what lies between is not printed, so it is constant."""
    count = len(row.accuracy)
    learned = [(a - f) / 100 for a, f in zip(row.accuracy, row.forgetting, strict=True)]
    accuracy = [[learned[k] for k in range(t + 1)] for t in range(count - 1)]
    return results(row.method, accuracy=[*accuracy, [a / 100 for a in row.accuracy]], scenario=table.scenario)


ROWS = [pytest.param(t, r, id=f"{t.scenario}-{r.method}") for t in paper.tables() for r in t.rows]


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_the_papers_rows_reproduce_their_averages_to_rounding(table: paper.PaperTable, row: paper.PaperRow) -> None:
    ours = from_paper(table, row)
    average = 100 * mean(ours.final[table.average_from - 1 :])
    if (table.scenario, row.method) in OFF:
        assert average == pytest.approx(OFF[table.scenario, row.method], abs=1e-3)
        assert 100 * ours.average == pytest.approx(row.average, abs=0.05)
    else:
        # Each printed figure is within 0.05 of the true one, and so is the printed average.
        assert average == pytest.approx(row.average, abs=0.1 + 1e-9)
    # The last task's forgetting is 0 by definition; the others come back as printed.
    assert [100 * f for f in ours.forgetting[:-1]] == pytest.approx(row.forgetting[:-1])
    assert ours.forgetting[-1] == 0.0


def test_most_averages_agree_to_the_printed_digit() -> None:
    off = [
        (table.scenario, row.method)
        for table in paper.tables()
        for row in table.rows
        if abs(mean(row.accuracy[table.average_from - 1 :]) - row.average) > 0.05 + 1e-9
    ]
    assert off == [
        ("actions/4", "tfm"),  # 37.925 printed as 38.0
        ("tiny-imagenet/large-first", "freezing"),
        ("tiny-imagenet/large-first", "lfl"),  # 60.067 printed as 60.0
    ]


def test_the_summary_of_tiny_imagenet_repeats_the_three_tables() -> None:
    summary = paper.summary()
    for method, averages in summary.rows.items():
        for scenario, average in zip(summary.scenarios, averages, strict=True):
            table = paper.table_of(scenario)
            assert table is not None
            row = table.row(method)
            assert row is not None
            assert row.average == average


def test_every_table_of_accuracies_is_there_whole() -> None:
    sizes = {(t.label, t.scenario): (len(t.rows), len(t.tasks)) for t in paper.tables()}
    assert sizes == {
        ("tab:fine_grained", "flowers/4"): (8, 4),
        ("tab:fine_grained", "birds/4"): (8, 4),
        ("tab:fine_grained", "actions/4"): (8, 4),
        ("tab:tiny_imagenet_random", "tiny-imagenet/random"): (11, 10),
        ("tab:tiny_imagenet_groups", "tiny-imagenet/semantic"): (11, 10),
        ("tab:tiny_large_task", "tiny-imagenet/large-first"): (10, 10),
        ("tab:exp_imagenet", "imagenet/10"): (7, 10),
    }
    assert all(len(r.accuracy) == len(r.forgetting) == len(t.tasks) for t in paper.tables() for r in t.rows)
    assert paper.table_of("digits/5") is None


def test_the_matrix_by_hand() -> None:
    ours = results(accuracy=[[0.9], [0.6, 0.8], [0.3, 0.8, 0.7]])
    assert ours.final == [0.3, 0.8, 0.7]
    assert ours.learned == [0.9, 0.8, 0.7]
    assert ours.forgetting == pytest.approx([-0.6, 0.0, 0.0])
    assert ours.forgetting[1] == 0.0
    assert ours.average == pytest.approx(0.6)
    assert ours.averages == pytest.approx([0.9, 0.7, 0.6])
    assert ours.forward_transfer([0.5, 0.7, 0.75]) == pytest.approx((0.1 - 0.05) / 2)
    assert ours.epochs == [0, 0, 0]
    with pytest.raises(ValueError, match="needs 3 accuracies"):
        ours.forward_transfer([0.5])


def test_mean_and_sample_deviation() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert math.isnan(mean([]))
    assert deviation([1.0, 2.0, 6.0]) == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert deviation([3.0]) == 0.0


def test_json_both_ways(tmp_path: Path) -> None:
    ours = results(accuracy=[[1 / 3], [0.1, 2 / 7]])
    ours.save(tmp_path)
    assert Results.load(tmp_path) == ours
    assert Results.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours


def test_damaged_missing_or_foreign_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not finished"):
        Results.load(tmp_path)
    with pytest.raises(ValueError, match="no finished run"):
        load_runs([tmp_path])
    with pytest.raises(ValueError, match="no such folder"):
        load_runs([tmp_path / "none"])
    (tmp_path / "results.json").write_text('{"scenario": ')
    with pytest.raises(ValueError, match="is damaged"):
        load_runs([tmp_path])
    values = results().to_dict()
    with pytest.raises(ValueError, match="no field 'acuracy'; did you mean 'accuracy'"):
        Results.from_dict(values | {"acuracy": 1})
    with pytest.raises(ValueError, match="no results of a run"):
        Results.from_dict({"seed": 1})
    with pytest.raises(ValueError, match=r"accuracy row of 1, 2, \.\.\. 2"):
        Results.from_dict(values | {"accuracy": [[1.0]]})
    with pytest.raises(ValueError, match="in 'seconds'"):
        Results.from_dict(values | {"seconds": [1.0]})


@pytest.mark.parametrize("text", ["import torch\n", "[]", "{}", ""])
def test_nobody_is_told_to_delete_a_file_that_is_no_results(text: str, tmp_path: Path) -> None:
    """A script or a TOML file, named by mistake."""
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=r"mine\.py holds no results of runs; give runs' folders") as caught:
        load_runs([tmp_path / "mine.py"])
    assert "delete it" not in str(caught.value)


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; give the name of a file"):
        write_json(tmp_path, {})
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_comparable_leaves_out_times_and_environment_only() -> None:
    ours = results()
    later = Results.from_dict(ours.to_dict() | {"seconds": [9.0, 9.0], "environment": {"date": "later"}})
    assert later.comparable() == ours.comparable()
    other = Results.from_dict(ours.to_dict() | {"parameters": [10, 11]})
    assert other.comparable() != ours.comparable()
