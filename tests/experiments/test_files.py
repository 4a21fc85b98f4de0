"""The experiments that come with the project: every file is valid, and every table and figure of the paper has one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from zeroforget.experiments import paper
from zeroforget.experiments.blank import imagenet
from zeroforget.experiments.experiment import Experiment

OURS = ("-best", "-ablations", "-rewind")
"""What the paper has no table of."""
VARIANTS = {"joint-scratch", "tfm-search", "tfm-nofn-search", "tfm-weights", "packnet-short"}
"""Rows of our own, beside the paper's."""
FILES = sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))
load = cache(Experiment.load)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_can_be_run(path: Path) -> None:
    experiment = load(path)
    assert experiment.name == path.stem
    assert experiment.about
    assert len({config.folder for config in experiment.runs()}) == len(experiment.runs())
    for config in experiment.runs():
        config.to_dict()


@pytest.mark.parametrize("table", paper.tables(), ids=lambda table: table.scenario)
def test_every_table_has_a_file_with_all_its_methods(table: paper.PaperTable) -> None:
    found = [
        e for e in map(load, FILES) if table.scenario in [s.name for s in e.scenarios] and not e.name.endswith(OURS)
    ]
    assert len(found) == 1
    labels = {choice.label for choice in found[0].methods}
    assert {row.method for row in table.rows} <= labels
    assert labels - {row.method for row in table.rows} <= VARIANTS
    regime = found[0].regime
    assert (regime.lr, regime.batch_size, regime.epochs, regime.patience, regime.decay) == (0.05, 64, 200, 5, 3.0)
    assert (regime.schedule, regime.label_smoothing, regime.options) == ("patience", 0.0, {})


def test_an_ablation_changes_one_thing_at_a_time() -> None:
    path = next(path for path in FILES if path.stem.endswith("ablations"))
    default, *others = load(path).methods
    plain = default.all_options()
    assert (plain["start"], plain["growth"]) == (0.55, 0.05)
    for choice in others:
        changed = {name for name, value in choice.all_options().items() if value != plain[name]}
        growth = {"start", "growth", "early", "unit", "search", "search_start", "margin"}
        assert len(changed) == 1 or changed <= growth, choice.label


def test_noise_in_imagenets_shape() -> None:
    scenario = imagenet(tasks=3, classes=5, images=7, pixels=8)
    assert scenario.shape == (3, 8, 8)
    assert len(scenario.tasks) == 3
    for task in scenario.tasks:
        task.check()
        assert len(task.classes) == 5
