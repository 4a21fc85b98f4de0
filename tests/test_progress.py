"""Progress as people see it: bars where they can move, a line for each epoch elsewhere, or a function that is told."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.store.helpers import QUICK, write_digits
from zeroforget.experiments import demo
from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.runner import run
from zeroforget.progress import Epoch, Progress, TrainingDisplay, has_bars, showing
from zeroforget.store import Watch, open_model


def at(epoch: int, step: int, last: Epoch | None, phase: int = 0) -> Progress:
    return Progress("b", 1, phase, epoch, 4, step, 4, 0.1, last)


EPOCH = Epoch(0, 0.1, 0.5, 0.6, 0.75, 10.0)


def test_on_a_pipe_an_epoch_is_a_line_with_its_own_figures() -> None:
    screen = io.StringIO()
    with TrainingDisplay(Console(file=screen)) as display:
        for progress in (
            at(0, 2, None),
            at(0, 4, EPOCH),
            at(1, 1, EPOCH),
            at(1, 4, replace(EPOCH, epoch=1, loss=0.25)),
        ):
            display.training(progress)
        display.reading(3, 10)
    assert screen.getvalue().splitlines() == [
        "  epoch 1/4: loss 0.500, accuracy 75.0 %; at most 30 s left",
        "  epoch 2/4: loss 0.250, accuracy 75.0 %; at most 20 s left",
    ]


def test_in_a_terminal_every_phase_has_a_bar_that_moves() -> None:
    display = TrainingDisplay(Console(file=io.StringIO(), force_terminal=True))
    assert display.bars is not None
    for epoch in (0, 1):
        display.drawn.clear()  # as if time had passed
        for phase in range(3):
            for step in (2, 3):  # the second comes too soon to be drawn
                display.training(at(epoch, step, None, phase))
    rows = [display.bars.tasks[display.rows[name]] for name in ("training", "training 2", "training 3")]
    assert [row.completed for row in rows] == [1.5, 1.5, 1.5]


def test_a_notebook_has_bars_if_it_has_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Console(file=io.StringIO(), force_jupyter=True)
    for found in (None, object()):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        assert has_bars(notebook) is (found is not None)


@pytest.mark.parametrize("show", [None, False])
def test_who_does_not_look_is_told_nothing(show: bool | None) -> None:
    with showing(show) as told:
        assert told is None


def test_learning_in_python_tells_what_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures, heard = write_digits(tmp_path / "low", (0, 1)), list[Progress]()
    for number, show in enumerate((True, False, heard.append)):
        open_model(tmp_path / f"model-{number}").learn(pictures, "low", **QUICK, progress=show)
        lines = [line for line in capsys.readouterr().err.splitlines() if ": loss " in line]
        assert bool(lines) == (show is True)
    assert heard[-1].task == "low"
    with pytest.raises(ValueError, match="progress or watch"):
        open_model(tmp_path / "model").learn(pictures, "low", **QUICK, progress=True, watch=Watch())


def test_a_run_in_python_tells_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = demo.SETTINGS | {"methods": {"finetuning": {}}, "regime": {"epochs": 1}}
    heard: list[Progress] = []
    for number, show in enumerate((None, True, heard.append)):
        run(Experiment.from_dict(values), tmp_path / str(number), progress=show)
        lines = capsys.readouterr().err.splitlines()
        assert len([line for line in lines if ", epoch 1/1: loss" in line]) == (5 if show is True else 0)
    assert [progress.index for progress in heard if progress.ended] == [0, 1, 2, 3, 4]
