"""Who looks on: several watchers as one, plain lines at their pace, and bars that come, move and go with their runs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.experiments.helpers import results, write_toml
from zeroforget.experiments import observers
from zeroforget.experiments.experiment import Experiment, RunConfig
from zeroforget.experiments.observers import ExperimentDisplay, Observer, Observers, TensorBoardObserver
from zeroforget.progress import Epoch
from zeroforget.training import Progress

TITLE = "pulled on tests.experiments.helpers:three_digits, seed"


def runs(folder: Path, seeds: int = 1) -> list[RunConfig]:
    return Experiment.load(write_toml(folder), methods=["pulled"], seeds=list(range(seeds))).runs()


def at(epoch: int, step: int, *, index: int = 0, phase: int = 0, last: Epoch | None = None) -> Progress:
    """Of four epochs with four steps each."""
    return Progress("a", index, phase, epoch, 4, step, 4, 0.1, last)


def done(epoch: int) -> Epoch:
    return Epoch(epoch, 0.1, 0.5, 0.6, 0.75, 10.0)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(observers, "time", made)
    return made


class Heard(Observer):
    """Writes down every word."""

    def __init__(self, every: float) -> None:
        self.every = every
        self.words: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in {"notice", "loading", "run_begins", "progress", "task_done", "run_done", "run_failed"}:
            return lambda *said: self.words.append((name, *said))
        return super().__getattribute__(name)


def test_several_watchers_hear_every_word_as_often_as_the_most_curious_wants(tmp_path: Path) -> None:
    heard = [Heard(0.5), Heard(0.2), Heard(0.3)]
    both = Observers(*heard)
    assert both.every == 0.2
    (config,), error = runs(tmp_path), ValueError("no")
    words = [
        ("notice", "a word"),
        ("loading", "pictures", 3, 10),
        ("run_begins", config, ["a", "b"], 1),
        ("progress", config, at(1, 2), "lr-0.1"),
        ("task_done", config, {"index": 0}),
        ("run_done", config, results(), True),
        ("run_failed", config, error),
    ]
    for what, *said in words:
        getattr(both, what)(*said)
    assert [each.words for each in heard] == [words] * 3


def test_each_epoch_is_a_line_and_reading_tells_every_ten_seconds(clock: Clock, tmp_path: Path) -> None:
    screen = io.StringIO()
    (config,) = runs(tmp_path)
    watch = ExperimentDisplay(Console(file=screen, width=40), 1)
    for after in (9.0, 1.0, 9.0, 1.0):
        clock.now += after
        watch.loading("pictures", int(clock.now), 3000 if clock.now < 1015 else 0)
    watch.run_begins(config, ["a", "b"], 0)
    watch.progress(config, at(0, 2), None)
    watch.progress(config, at(0, 4, last=done(0)), None)
    watch.progress(config, at(1, 2, last=done(0)), None)
    watch.progress(config, at(1, 4, last=replace(done(1), loss=0.25)), "lr-0.1")
    watch.run_failed(config, ValueError("[bold]no[/bold] such thing as a line that is too long for it"))
    assert screen.getvalue().splitlines() == [
        "    pictures: 1010 of 3000",
        "    pictures: 1020",
        f"[1/1] {TITLE} 0",
        "    task 1/2, epoch 1/4: loss 0.500, accuracy 75.0 %; at most 30 s left",
        "    task 1/2 lr-0.1, epoch 2/4: loss 0.250, accuracy 75.0 %; at most 20 s left",
        f"[1/1] {TITLE} 0 failed: [bold]no[/bold] such thing as a line that is too long for it",
    ]


def test_runs_that_were_finished_before_are_counted(tmp_path: Path) -> None:
    screen = io.StringIO()
    first, second = runs(tmp_path, 2)
    watch = ExperimentDisplay(Console(file=screen, width=120), 2)
    watch.run_done(first, results(), True)
    watch.run_begins(second, ["a", "b"], 0)
    assert [line.partition(",")[0] for line in screen.getvalue().splitlines()] == [
        f"[{k}/2] {TITLE.partition(',')[0]}" for k in (1, 2)
    ]


def bars(watch: ExperimentDisplay) -> list[tuple[str, float, str]]:
    """Those that are seen: what they say before them, how far they are, what they say behind."""
    assert watch.bars is not None
    return [(str(b.description), b.completed, str(b.fields["figures"])) for b in watch.bars.tasks if b.visible]


def test_bars_come_move_and_go_with_their_runs(clock: Clock, tmp_path: Path) -> None:
    one, two = runs(tmp_path, 2)
    record = {"index": 0, "name": "a", "accuracy": [0.5], "unchanged": [True], "seconds": 1.0, "log": {"notes": {}}}
    watch = ExperimentDisplay(Console(file=io.StringIO(), force_terminal=True, width=120), 2)
    with watch:
        assert bars(watch) == [("experiment", 0, "run 1/2")]
        watch.loading("[b]pictures", 3, 10)
        assert bars(watch)[1] == (r"\[b]pictures", 3, "3/10")
        watch.loading("pictures", 7, 0)
        assert bars(watch)[1] == ("pictures", 7, "7")
        watch.run_begins(one, ["a", "b"], 1)
        watch.running[one.folder].told = clock.now
        assert bars(watch) == [("experiment", 0.5, "run 1/2"), ("pulled", 0, "")]
        watch.progress(one, at(1, 2, index=1), "lr-0.1")
        assert bars(watch)[1] == ("pulled", 0, "")  # it has only just begun
        clock.now += 0.2
        watch.progress(one, at(1, 2, index=1), "lr-0.1")
        assert bars(watch) == [
            ("experiment", (1 + 1.5 / 4) / 2, "run 1/2"),
            ("pulled · task 2/2 a · lr-0.1", 1.5, "epoch 2/4"),
        ]
        clock.now += 0.05
        watch.progress(one, at(1, 3, index=1), None)
        assert bars(watch)[1][1] == 1.5  # too soon
        watch.task_done(one, record)
        assert bars(watch) == [("experiment", 0.5, "run 1/2"), ("pulled · task 2/2 a · lr-0.1", 0, "")]
        watch.run_done(one, results(), False)
        assert bars(watch) == [("experiment", 1, "run 2/2")]
        watch.run_begins(two, ["a", "b"], 0)
        watch.run_failed(two, ValueError("no"))
        assert bars(watch) == [("experiment", 2, "run 2/2")]
        assert watch.bars is not None
        assert watch.bars.live.is_started
    assert not watch.bars.live.is_started


def test_tensorboard_tells_phases_and_trials_apart_and_closes_what_failed(tmp_path: Path) -> None:
    class Writer:
        closed = False

        def __init__(self, place: str) -> None:
            self.names: list[str] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.names.append(name)

        def close(self) -> None:
            self.closed = True

    (config,) = runs(tmp_path)
    watch = TensorBoardObserver(tmp_path)
    writer = Writer("")
    watch._make = lambda place: writer  # type: ignore[assignment, return-value]
    watch.run_begins(config, ["a", "b"], 0)
    for phase, trial in ((0, "lr-0.1"), (0, "lr-0.2"), (1, "lr-0.2"), (1, None)):
        watch.progress(config, at(1, 1, phase=phase, last=done(0)), trial)
    assert [name.removesuffix("/loss") for name in writer.names if name.endswith("/loss")] == [
        "task-1/lr-0.1/phase-0",
        "task-1/lr-0.2/phase-0",
        "task-1/lr-0.2/phase-1",
        "task-1/phase-1",
    ]
    said = len(writer.names)
    for phase in (0, 1):  # side by side, they are within their next epochs by turns
        watch.progress(config, at(1, 2, phase=phase, last=done(0)), "lr-0.2")
    assert len(writer.names) == said
    watch.run_failed(config, ValueError("no"))
    assert writer.closed


def candidate(phase: int, epoch: int, step: int, accuracy: float | None) -> Progress:
    """One of three that learn the second task side by side."""
    last = None if accuracy is None else replace(done(epoch), val_accuracy=accuracy)
    return replace(at(epoch, step, index=1, phase=phase, last=last), abreast=3)


def test_candidates_of_a_search_share_a_bar(clock: Clock, tmp_path: Path) -> None:
    (config,) = runs(tmp_path)
    watch = ExperimentDisplay(Console(file=io.StringIO(), force_terminal=True, width=120), 1)
    seen = []
    with watch:
        watch.run_begins(config, ["a", "b"], 1)
        watch.running[config.folder].told = clock.now
        for progress in (
            candidate(4, 0, 2, None),
            candidate(5, 1, 2, 0.5),
            candidate(4, 0, 4, 0.75),  # it is behind, and the bar does not go back
            candidate(6, 1, 4, 0.751),
            at(0, 1, index=0, phase=9, last=done(0)),  # another task: one alone
        ):
            clock.now += 0.2
            watch.progress(config, progress, None)
            seen.append(bars(watch)[1][1:])
    assert seen == [
        (0.5, "epoch 1/4, 3 candidates"),
        (1.5, "epoch 2/4, 3 candidates 50.0 %"),
        (1.5, "epoch 2/4, 3 candidates 50.0–75.0 %"),
        (2.0, "epoch 2/4, 3 candidates 50.0–75.1 %"),
        (0.25, "epoch 1/4, loss 0.500, accuracy 75.0 %"),
    ]


def test_lines_tell_candidates_apart(tmp_path: Path) -> None:
    (config,) = runs(tmp_path)
    screen = io.StringIO()
    watch = ExperimentDisplay(Console(file=screen, width=120), 1)
    watch.run_begins(config, ["a", "b"], 1)
    watch.progress(config, candidate(4, 1, 4, 0.5), None)
    watch.progress(config, candidate(5, 0, 4, 0.9), None)
    assert screen.getvalue().splitlines()[1:] == [
        "    task 2/2, candidate 5, epoch 2/4: loss 0.500, accuracy 50.0 %; at most 60 s left",
        "    task 2/2, candidate 6, epoch 1/4: loss 0.500, accuracy 90.0 %; at most 90 s left",
    ]
