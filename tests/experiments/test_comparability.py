"""What may share a row, a table and a comparison."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.helpers import results, write_toml
from zeroforget.data.values import DataError
from zeroforget.experiments import comparability as alike
from zeroforget.experiments import formats
from zeroforget.experiments.costs import cost_tables, costs
from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.folder import OtherConfiguration
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.report import grouping as gather
from zeroforget.experiments.report.page import page
from zeroforget.experiments.results import Results, load_runs
from zeroforget.experiments.runner import run
from zeroforget.experiments.tables import averages, tables

SETUP: dict[str, Any] = {"method": "ewc", "scenario": {"name": "digits/5"}, "search": {"enabled": False}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("method", "freezing"),
        ("scenario", {"name": "digits/5", "pad": 2}),
        ("search", {"enabled": True}),
    ],
)
def test_seeds_of_a_row_differ_in_nothing_but_the_seed(name: str, value: Any) -> None:
    one = replace(results("ewc"), setup=SETUP)
    other = replace(results("ewc", 1), setup=SETUP | {name: value})
    with pytest.raises(ValueError, match=f"with seeds 0 and 1 differ in their {name}: .* and .*; they cannot share"):
        tables([one, other])
    # In a report each has a row of its own, and its name says why.
    (group,) = gather.groups([one, other])
    assert len(group.entries) == 2
    assert all(f"{name}" in entry.label for entry in group.entries)


def test_what_an_older_version_did_not_write_down_is_no_difference() -> None:
    new, old = replace(results("ewc"), setup=SETUP), results("ewc", 1)
    later = replace(results("ewc", 2), setup=SETUP | {"search": {"enabled": False, "divide": 2.0}})
    (table,) = tables([new, old, later])
    assert table.rows[0].seeds == 3
    (group,) = gather.groups([new, old, replace(old, seed=3, regime={"mix_until": 1.0})])
    assert [entry.label for entry in group.entries] == ["EWC"]


def trained(method: str, seed: int = 0, **regime: Any) -> Results:
    return replace(results(method, seed), regime={"epochs": 1, "lr": 0.1} | regime)


def test_a_note_names_what_was_trained_otherwise_than_most() -> None:
    made = [trained("finetuning"), trained("freezing"), trained("ewc", epochs=8, lr=0.2)]
    (table,) = tables(made)
    how = "regime.lr 0.2 instead of 0.1, regime.epochs 8 instead of 1"
    said = f"Not trained as the others, so not to be compared with them: EWC ({how})."
    assert table.notes == (said,)
    assert said in page(made)
    assert tables([*made[:2], trained("ewc", device="cuda", capture=False)])[0].notes == ()
    padded = [
        replace(each, setup=SETUP | {"scenario": {"name": "digits/5", "pad": n}}) for n, each in enumerate(made[:2])
    ]
    assert "Freezing (scenario.pad 1 instead of 0)" in tables(padded)[0].notes[0]


def test_transfer_is_told_beside_what_was_trained_alike() -> None:
    made = [trained("alone"), trained("tfm"), trained("tfm", 1), trained("ewc", epochs=8)]
    rows = {row.method: row.transfer for row in costs(made).rows}
    assert rows == {"alone": None, "tfm": 0.0, "ewc": None}
    note = "Transfer is of fewer seeds than the rest, those that 'alone' has: TFM."
    for style in ("terminal", "markdown", "latex"):
        assert note in formats.costs_text(cost_tables(made), style)


def test_experiments_on_the_same_tasks_are_told_apart() -> None:
    one, other = (replace(results("tfm"), experiment=name) for name in ("first", "second"))
    names = ["first: digits/5 · small", "second: digits/5 · small"]
    assert list(averages([one, other]).columns) == names
    assert [table.title for table in tables([one, other])] == names
    assert [table.title for table in cost_tables([one, other])] == names
    assert [group.title for group in gather.groups([one, other])] == names
    assert "<p>second: digits/5 · small</p>" in page([one, other])
    assert [table.title for table in tables([one])] == ["digits/5 · small"]


def test_a_report_counts_the_commands_that_it_leaves_out() -> None:
    made = [replace(results("tfm", seed), environment={"command": f"run --seeds {seed}"}) for seed in range(10)]
    told = page(made)
    assert "run --seeds 7" in told
    assert "run --seeds 8" not in told
    assert "<dt>And by</dt><dd><span>2 more commands</span></dd>" in told
    assert "And by" not in page(made[:8])


def test_another_configuration_is_met_before_anything_is_trained(tmp_path: Path) -> None:
    file = write_toml(tmp_path, tasks=2, epochs=1)
    run(Experiment.load(file, methods=["freezing"]), tmp_path)
    both = Experiment.load(file, methods=["finetuning", "freezing"], changes=["freezing.method=ewc"])
    with pytest.raises(OtherConfiguration):
        run(both, tmp_path)
    assert [each.method for each in load_runs([tmp_path])] == ["freezing"]
    assert not list(tmp_path.rglob("finetuning"))


@pytest.mark.parametrize("parallel", [1, 2])
def test_data_that_are_not_there_are_met_before_anything_is_trained(tmp_path: Path, parallel: int) -> None:
    file = write_toml(tmp_path, tasks=2, epochs=1)
    text = file.read_text().replace("scenario = ", 'scenario = ["digits/5", "cifar100/10"] #')
    assert "cifar100" in text
    file.write_text(text)
    with pytest.raises(DataError, match="data set 'cifar100' is not on this disk"):
        run(Experiment.load(file), tmp_path / "out", data_root=tmp_path, parallel=parallel)
    assert not (tmp_path / "out").exists()


class Notices(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def notice(self, text: str) -> None:
        self.said.append(text)


MINE = "from zeroforget.methods.baselines import Finetuning\nclass Near(Finetuning):\n    name = 'near'\n"


def test_code_that_was_changed_since_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nearby.py").write_text(MINE)
    file = write_toml(tmp_path, tasks=2, epochs=1, more='\n[methods.near]\nmethod = "nearby:Near"\n')
    seen = Notices()
    run(Experiment.load(file, methods=["near"], seeds=[0]), tmp_path / "out", watch=seen)
    run(Experiment.load(file, methods=["near"], seeds=[0]), tmp_path / "out", watch=seen)
    assert seen.said == []
    (tmp_path / "nearby.py").write_text(f"{MINE}    # another\n")
    monkeypatch.delitem(sys.modules, "nearby")
    made = run(Experiment.load(file, methods=["near"], seeds=[0, 1]), tmp_path / "out", watch=seen)
    assert len(seen.said) == 1
    assert "was made with other code of 'nearby:Near'" in seen.said[0]
    assert tables(made)[0].notes == ("The seeds are not all of the same code: near.",)
    assert not alike.other_code(made[:1])
