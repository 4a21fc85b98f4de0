"""Archives: small files that give back the same tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.experiments.helpers import results as made
from zeroforget.cli import app
from zeroforget.experiments import archive, formats, tables
from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.results import Results
from zeroforget.experiments.runner import run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Results]]:
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "name": "short",
        "scenario": "digits/5",
        "network": {"name": "small", "width": 0.25},
        "seeds": [0, 1],
        "regime": {"epochs": 1},
        "methods": {"finetuning": {}, "tfm": {}},
    }
    return folder, run(Experiment.from_dict(settings), folder)


def test_an_archive_gives_back_what_tables_need(runs: tuple[Path, list[Results]], tmp_path: Path) -> None:
    _, results = runs
    file = tmp_path / "short.json"
    archive.save(results, file)
    back = archive.load(file)
    for style in ("markdown", "csv"):
        assert formats.text(tables.tables(back), style) == formats.text(tables.tables(results), style)
    key = lambda r: (r.method, r.seed)  # noqa: E731
    for a, b in zip(sorted(back, key=key), sorted(results, key=key), strict=True):
        assert (a.accuracy, a.unchanged, a.overhead, a.growth) == (b.accuracy, b.unchanged, b.overhead, b.growth)
        assert a.epochs == b.epochs
        assert [log["best"] for log in a.logs] == [log["best"] for log in b.logs]
        assert a.environment == b.environment
    assert file.stat().st_size < 40_000


def test_an_archive_keeps_what_validation_said_of_the_kept_weights_and_of_the_last(
    runs: tuple[Path, list[Results]], tmp_path: Path
) -> None:
    _, results = runs
    first, again, older = tmp_path / "first.json", tmp_path / "again.json", tmp_path / "older.json"
    archive.save(results, first)
    archive.save(archive.load(first), again)  # an archive of an archive loses nothing
    assert again.read_text() == first.read_text()
    rows = json.loads(first.read_text())["runs"]
    assert len(rows) == len(results) == 4
    for row, each in zip(rows, sorted(results, key=lambda r: (r.method, r.seed)), strict=True):
        for log, full in zip(row["logs"], each.logs, strict=True):
            kept, last = full["epochs"][full["best"]]["val_accuracy"], full["epochs"][-1]["val_accuracy"]
            assert log["validation"] == {"kept": round(kept, 4), "last": round(last, 4)}
    values = json.loads(first.read_text())
    for row in values["runs"]:
        for log in row["logs"]:
            del log["validation"]
    older.write_text(json.dumps(values))  # as earlier versions wrote it
    merged, twice = archive.distinct([*archive.load(older), *results])
    assert (len(merged), twice) == (4, 4)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ({"epochs": [{"val_accuracy": 0.5}, {"val_accuracy": 0.25}], "best": 0}, {"kept": 0.5, "last": 0.25}),
        ({"epochs": [{"val_accuracy": 0.0}], "best": -1}, {"kept": None, "last": 0.0}),
        ({"epochs": [{"val_accuracy": 0.5}], "best": 14}, {"kept": None, "last": 0.5}),
        ({"epochs": [{"val_accuracy": 0.5}, {"loss": 1.0}], "best": 1}, {"kept": None, "last": None}),
        ({"epochs": [{}, {}], "best": 1}, None),
        ({"epochs": [], "best": -1}, None),
    ],
    ids=["plain", "nothing kept", "beyond the end", "not written", "an old archive", "not trained"],
)
def test_two_points_of_any_curve(log: dict[str, Any], expected: dict[str, Any] | None) -> None:
    results = made("ewc", accuracy=[[0.5]])
    results.logs[0] = {"stopped": "", "notes": {}} | log
    assert archive.pack([results])["shared"]["logs"][0].get("validation") == expected


def test_the_commands_write_and_read_archives(runs: tuple[Path, list[Results]], tmp_path: Path) -> None:
    folder, _ = runs
    file = tmp_path / "kept" / "short.json"
    done = CliRunner().invoke(app, ["archive", str(folder), "-o", str(file)])
    assert done.exit_code == 0, done.output
    assert "wrote 4 runs" in done.output
    from_runs = CliRunner().invoke(app, ["table", str(folder), "-f", "markdown"]).output
    from_file = CliRunner().invoke(app, ["table", str(file), "-f", "markdown"]).output
    assert from_file == from_runs
    assert "TFM" in from_file


def test_a_damaged_archive_says_so(runs: tuple[Path, list[Results]], tmp_path: Path) -> None:
    _, results = runs
    file = tmp_path / "short.json"
    archive.save(results, file)
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"short\.json is damaged"):
        archive.load(file)
    values = json.loads(text)
    del values["runs"][0]["accuracy"]
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="no results of a run"):
        archive.load(file)


@pytest.mark.parametrize("words", [["table"], ["table", "--averages"], ["archive", "-o", "e.json"], ["report"]])
def test_an_archive_without_runs_is_refused(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    archive.save([], tmp_path / "none.json")
    told = CliRunner().invoke(app, [words[0], "none.json", *words[1:]])
    assert (told.exit_code, told.stdout) == (1, "")
    assert str(told.exception) == "none.json holds no runs; get it again, or make it anew from the runs"
    assert [path.name for path in tmp_path.iterdir()] == ["none.json"]


def test_runs_say_the_command_without_the_paths_of_a_machine(runs: tuple[Path, list[Results]]) -> None:
    _, results = runs
    for each in results:
        assert "/" not in each.environment["command"].split()[0]
        assert each.environment["platform"].count(" ") == 1


def test_runs_lie_in_one_order_whatever_order_they_were_given_in(tmp_path: Path) -> None:
    given = [made(method, seed) for method, seed in (("tfm", 1), ("ewc", 1), ("tfm", 0), ("ewc", 0))]
    archive.save(given, tmp_path / "a.json")
    assert [(r.method, r.seed) for r in archive.load(tmp_path / "a.json")] == [
        ("ewc", 0),
        ("ewc", 1),
        ("tfm", 0),
        ("tfm", 1),
    ]


def test_experiments_and_scenarios_lie_together(tmp_path: Path) -> None:
    given = [
        replace(made(method, scenario=scenario), experiment=experiment)
        for method in ("ewc", "tfm")
        for scenario in ("digits/5", "birds/4")
        for experiment in ("two", "one")
    ]
    archive.save(given, tmp_path / "a.json")
    assert [(r.experiment, r.scenario, r.method) for r in archive.load(tmp_path / "a.json")] == [
        (experiment, scenario, method)
        for experiment in ("one", "two")
        for scenario in ("birds/4", "digits/5")
        for method in ("ewc", "tfm")
    ]


def test_what_was_searched_and_what_waited_is_kept(tmp_path: Path) -> None:
    """Tables need both: the one tells what was tuned, the other which tasks have nothing to forget."""
    one = made("joint")
    one.logs[0]["stopped"] = "waits for task 2"
    one.logs[1]["notes"]["hyperparameters"] = {"lr": 0.1, "trials": [{"name": "lr-0.1"}]}
    archive.save([one, made("tfm")], tmp_path / "a.json")
    joint, tfm = archive.load(tmp_path / "a.json")
    assert (joint.trained, tfm.trained) == ([False, True], [True, True])
    assert [log["notes"] for log in joint.logs] == [log["notes"] for log in one.logs]
