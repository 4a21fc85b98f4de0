"""A model and a run that an earlier version wrote (commit 067ea33) open, prove themselves and go on.

`earlier/model.zfu` is the whole of a model: `learn garden low --task low --size 8 --gray --width 0.25 --epochs 3
--batch-size 16`, the same of `middle` without what makes a model, and `ship garden --all -o model.zfu`. Its pictures
are those of `tests/store/helpers.py`. `earlier/runs` is `run earlier.toml`, killed after its second task.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.store.helpers import LATER, pictures, tree
from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.runner import run
from zeroforget.store import Model, open_model

EARLIER = Path(__file__).parent / "earlier"
HEAD = "1726b00de99f1e5151a206e0eea0c8f0435739bfb61f0f6fd182fd056daf1cfb"
"""As the earlier version told it."""


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """The earlier model, received."""
    found = open_model(tmp_path / "garden")
    found.receive(EARLIER / "model.zfu")
    return found


def test_an_earlier_model_opens_verifies_and_measures_what_it_measured(model: Model, tmp_path: Path) -> None:
    data = pictures(tmp_path / "pictures")
    assert model.head == HEAD
    assert [task.name for task in model.tasks] == ["low", "middle"]
    report = model.verify({"low": data / "low", "middle": data / "middle"})
    assert report.holds
    assert [one.held_out for one in report.measured] == [one.recorded for one in report.measured] == [1.0, 0.8]


def test_an_earlier_model_learns_on_and_keeps_every_bit(model: Model, tmp_path: Path) -> None:
    data, before = pictures(tmp_path / "pictures"), tree(model.path)
    images = torch.stack([model.prepare(one) for one in sorted((data / "low" / "digit1").glob("*.png"))[:4]])
    answers = [model.logits(images, name) for name in ("low", "middle")]
    model.learn(data / "high", "high", **LATER)
    assert before.items() <= tree(model.path).items()
    assert all(torch.equal(model.logits(images, n), old) for n, old in zip(("low", "middle"), answers, strict=True))
    assert open_model(model.path).verify()


def test_an_earlier_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    shutil.copytree(EARLIER / "runs", tmp_path / "runs")
    tasks = tmp_path / "runs" / "earlier" / "digits-5" / "tfm" / "seed-0" / "tasks"
    told = [json.loads((tasks / f"{number:03d}" / "task.json").read_text()) for number in range(2)]
    (results,) = run(Experiment.load(EARLIER / "earlier.toml"), tmp_path / "runs")
    assert len(results.tasks) == len(results.accuracy) == 5
    assert results.accuracy[:2] == [one["accuracy"] for one in told]
    assert [log["seconds"] for log in results.logs[:2]] == [one["log"]["seconds"] for one in told], "it began anew"
    assert all(results.unchanged)
