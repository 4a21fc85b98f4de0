"""Runs that fail or are stopped: what is there is shown, and what to do is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.experiments.helpers import results, write_toml
from zeroforget.cli import app
from zeroforget.experiments import archive, runner


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    told = CliRunner().invoke(app, ["run", str(write_toml(tmp_path))])
    assert told.exit_code == 130
    assert told.stderr.endswith("stopped. The same command goes on where it stopped\n")


@pytest.mark.parametrize("finished", [["finetuning"], []])
def test_the_table_of_those_that_finished_comes_before_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: list[str]
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise runner.Failed("1 of 2 runs failed", [results(name, 0, [[0.9], [0.5, 0.8]]) for name in finished])

    monkeypatch.setattr(runner, "run", failing)
    told = CliRunner().invoke(app, ["run", str(write_toml(tmp_path))])
    assert isinstance(told.exception, runner.Failed)
    assert ("50.0 (-40.0)" in told.stdout) == bool(finished)
    assert "runs are in" not in told.stdout


@pytest.mark.parametrize(
    ("name", "begins"),
    [("t.tex", "% \\usepackage{booktabs}"), ("t.MD", "**"), ("t.csv", "table,method"), ("t.txt", "digits/5")],
)
def test_a_tables_ending_says_its_format(tmp_path: Path, name: str, begins: str) -> None:
    archive.save([results("tfm", 0, [[0.9], [0.9, 0.8]], "digits/5")], tmp_path / "a.json")
    words = ["table", str(tmp_path / "a.json"), "-o", str(tmp_path / name)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert (tmp_path / name).read_text().startswith(begins)
    CliRunner().invoke(app, [*words, "-f", "csv"], catch_exceptions=False)
    assert (tmp_path / name).read_text().startswith("table,method")


def test_what_was_written_is_named_whatever_it_is_called(tmp_path: Path) -> None:
    archive.save([results("tfm", 0, [[0.9], [0.9, 0.8]], "digits/5")], tmp_path / "a.json")
    for command in ("table", "archive"):
        out = tmp_path / f"{command}[/x].md"
        told = CliRunner().invoke(app, [command, str(tmp_path / "a.json"), "-o", str(out)], catch_exceptions=False)
        assert told.stdout.endswith(f"{out}\n")
