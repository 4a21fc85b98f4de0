"""Recipes compared on the first tasks, and their table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import recipes
from benchmarks.recipes import MIXED, Recipe
from tests.data.helpers import tiny_imagenet
from zeroforget.data import Task
from zeroforget.methods.tfm import Tfm
from zeroforget.training import Fit, FitLog


def test_a_recipe_is_trained_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROFORGET_CACHE", str(tmp_path / "cache"))
    tiny_imagenet(tmp_path / "tiny-imagenet-200", tuple(f"n{i:08}" for i in range(200)), train=2, val=1)
    small = Recipe("short", 3, dropout=0.5, growth={"start": 0.1, "growth": 0.1, "unit": "weights"}, **MIXED)
    monkeypatch.setitem(recipes.RECIPES, "small", small)
    args = argparse.Namespace(data_root=tmp_path, seed=0, tasks=2, device="cpu", small=True, images=None, longest=None)
    row = recipes.here("small", args)
    assert len(row["accuracies"]) == 2
    assert all(0 <= value <= 1 for value in row["accuracies"])
    assert (row["name"], row["about"], row["epochs"], row["batch"]) == ("small", "short", 3, 64)
    assert "small: validation" in capsys.readouterr().out
    args.tasks, args.images, args.longest = 1, 8, 2
    learned: list[tuple[int, int]] = []
    monkeypatch.setattr(Tfm, "learn", counting(learned))
    assert recipes.here("small", args)["epochs"] == 2
    assert learned == [(8, 4)]


def counting(learned: list[tuple[int, int]]) -> Callable[[Tfm, Task, Fit], FitLog]:
    """`Tfm.learn`, and how many images it had to learn from and to choose by."""
    learn = Tfm.learn

    def counted(self: Tfm, task: Task, fit: Fit) -> FitLog:
        learned.append((len(task.train), len(task.val)))
        return learn(self, task, fit)

    return counted


def test_rows_of_several_files_stand_in_one_table(tmp_path: Path) -> None:
    files = []
    for name, value in (("good", 0.7), ("poor", 0.5)):
        row = {"about": name, "epochs": 3, "batch": 64, "accuracies": [value, value + 0.1]}
        facts = {"command": f"make {name}", "device": "CPU", "torch": "2", "commit": "abc", "date": "2026-11-15"}
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(facts | {"rows": [row]}))
    lines = recipes.table(files).splitlines()
    assert lines[2:4] == ["| poor | 3 | 64 | 50.0 | 60.0 | 55.0 |", "| good | 3 | 64 | 70.0 | 80.0 | 75.0 |"]
    assert [line for line in lines if "`make" in line] == [
        f"`make {name}`: CPU, torch 2, commit abc, 2026-11-15." for name in ("good", "poor")
    ]


def test_runs_of_one_recipe_with_other_seeds_are_averaged(tmp_path: Path) -> None:
    files = []
    for seed, value in ((0, 0.5), (1, 0.6)):
        rows = [{"about": "good", "epochs": 3, "batch": 64, "accuracies": [value, 0.7]}]
        facts = {"command": f"make {seed}", "device": "CPU", "torch": "2", "commit": "abc", "date": "2026-11-15"}
        files.append(tmp_path / f"{seed}.json")
        files[-1].write_text(json.dumps(facts | {"rows": rows}))
    lines = recipes.table(files).splitlines()
    assert lines[2] == "| good | 3 | 64 | 55.0 | 70.0 | 62.5 |"
    assert "Means of 2 runs." in lines
    assert "Means of" not in recipes.table(files[:1])
