"""`zeroforget run` and `zeroforget table`, as one types them."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.experiments.helpers import results, write_toml
from tests.experiments.report_runs import study
from zeroforget.cli import app
from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.observers import ExperimentDisplay, TensorBoardObserver
from zeroforget.experiments.runner import run
from zeroforget.progress import Epoch
from zeroforget.training import Progress


def zeroforget(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_run_prints_progress_and_the_table_and_does_not_repeat(tmp_path: Path) -> None:
    file = write_toml(tmp_path, epochs=1)
    words = ("run", file, "--out", tmp_path / "out", "--methods", "pulled,finetuning", "--set", "pulled.strength=0.5")
    first = zeroforget(*words)
    assert "[1/2] pulled on tests.experiments.helpers:three_digits, seed 0" in first
    assert "task 3/3 digits-4:" in first
    assert "Finetuning" in first
    again = zeroforget(*words)
    assert "[2/2] finetuning on tests.experiments.helpers:three_digits, seed 0: finished before" in again
    assert "task 3/3" not in again
    assert again.splitlines()[-5:] == first.splitlines()[-5:]


def test_seeds_device_and_tensorboard(tmp_path: Path) -> None:
    file = write_toml(tmp_path, epochs=1, tasks=2)
    out = tmp_path / "out"
    words = ["--seeds", "3,4", "--device", "cpu", "--tensorboard", "--methods", "finetuning", "--data-root", tmp_path]
    text = zeroforget("run", file, "--out", out, *words)
    assert "±" in text
    assert sorted(p.parent.name for p in out.rglob("config.json")) == ["seed-3", "seed-4"]
    events = list(out.rglob("events.out.tfevents.*"))
    assert len(events) == 2
    assert b"task-2/phase-0/val_accuracy" in events[0].read_bytes()
    assert b"accuracy/average" in events[0].read_bytes()


def test_runs_that_are_not_finished_are_named_beside_the_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(Experiment.load(write_toml(tmp_path, epochs=1, tasks=2), methods=["pulled", "finetuning"]), out)
    whole = CliRunner().invoke(app, ["table", str(out), "-f", "csv"])
    assert whole.stderr == ""
    (stopped,) = out.rglob("finetuning/seed-0")
    (stopped / "results.json").unlink()
    (stopped / "tasks" / "001").rename(stopped / "tasks" / ".001.tmp")  # as a kill before it had its name leaves it
    for words in (["table"], ["archive", "-o", tmp_path / "a.json"], ["report", "-o", tmp_path / "page.html"]):
        told = CliRunner().invoke(app, [words[0], str(out), *map(str, words[1:])])
        assert told.exit_code == 0
        assert told.stderr == "not finished, so left out: finetuning/seed-0 (tasks done: 1)\n"
    assert "Finetuning" not in CliRunner().invoke(app, ["table", str(out)]).stdout
    again = CliRunner().invoke(app, ["table", str(out), str(out)]).stderr
    assert again.count("finetuning/seed-0") == 1


def test_table_in_every_format(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(Experiment.load(write_toml(tmp_path, epochs=1, tasks=2)), out)
    assert "Avg." in zeroforget("table", out)
    assert zeroforget("table", out, "-f", "markdown").startswith("**tests.experiments.helpers:three_digits")
    assert "\\toprule" in zeroforget("table", out, "--format", "latex")
    assert zeroforget("table", out, "-f", "csv").startswith(
        "table,method,source,seeds,column,accuracy,forgetting,std\n"
    )
    assert "The paper has no table" in zeroforget("table", out, "--beside", "paper")
    assert "The paper has no table" in zeroforget("table", out, "--beside", "paper", "--averages")
    assert "Average accuracy" in zeroforget("table", out, "--averages")
    assert "bits kept" in zeroforget("table", out, "--costs")
    file = tmp_path / "table.tex"
    assert f"wrote {file}" in zeroforget("table", out, "-f", "latex", "-o", file)
    assert "\\bottomrule" in file.read_text()


def test_costs_are_written_in_the_style_and_place_of_the_tables(tmp_path: Path) -> None:
    results().save(tmp_path / "runs")
    words = ("table", tmp_path / "runs", "--costs", "-f")
    shown = zeroforget(*words, "csv")
    first, second = (list(csv.reader(part.splitlines())) for part in shown.split("\n\n"))
    assert {len(line) for line in first} == {8}
    assert second[0][:4] == ["table", "method", "parameters", "training"]
    assert second[1][:10] == ["digits/5 · small", "finetuning", "10", "0", "0", "0", "2", "2", "2", ""]
    assert second[0][10:] == ["average", "network", "everything", "packed", "learning", "answer"]
    assert second[1][10:] == ["62.5", "320", "320", "", "", ""]
    costs = "| Finetuning | 10 | 0 B | 0 B | 0 | 2.0 | 2 of 2 tasks | – | 62.5 | 40 B | 40 B | – | – | – |"
    assert f"\n{costs}\n" in zeroforget(*words, "markdown")
    assert zeroforget(*words, "latex").count("\\end{tabular}") == 2
    for style in ("csv", "terminal"):
        file = tmp_path / f"costs.{style}"
        assert zeroforget(*words, style, "-o", file) == f"wrote {file}\n"
        assert file.read_text().split("\n\n")[-1].count("\n") >= 2
    assert (tmp_path / "costs.csv").read_text() == shown


def test_the_ending_of_a_table_says_its_format(tmp_path: Path) -> None:
    results().save(tmp_path / "runs")
    words = ("table", tmp_path / "runs")
    made = {}
    for ending in (".md", ".tex", ".CSV", ".txt", ""):
        zeroforget(*words, "-o", tmp_path / f"made{ending}")
        made[ending] = (tmp_path / f"made{ending}").read_text()
    for ending, style in ((".md", "markdown"), (".tex", "latex"), (".CSV", "csv")):
        assert made[ending] == zeroforget(*words, "-f", style)
    assert made[""] == made[".txt"] != made[".md"]
    with pytest.raises(ValueError, match=r"ref\.png: tables are written as \.md, \.tex, \.csv or \.txt; give such"):
        zeroforget(*words, "-o", tmp_path / "ref.png")
    assert not (tmp_path / "ref.png").exists()
    zeroforget(*words, "-o", tmp_path / "made.rst", "-f", "csv")
    assert (tmp_path / "made.rst").read_text() == made[".CSV"]


def test_report_reads_archives_and_leaves_out_their_curves(tmp_path: Path) -> None:
    study()[0].save(tmp_path / "runs" / "a")
    zeroforget("archive", tmp_path / "runs", "-o", tmp_path / "a.json")
    for source, curves in (("runs", True), ("a.json", False)):
        page = tmp_path / ("a long name " * 9) / f"{source}.html"
        assert zeroforget("report", tmp_path / source, "-o", page).startswith(f"wrote {page} (1 runs, ")
        assert ("over the epochs of task 1" in page.read_text()) == curves
    figures = tmp_path / "figures"
    told = zeroforget("report", tmp_path / "a.json", "-o", tmp_path / "r.html", "--figures", figures)
    assert f"wrote {len(list(figures.iterdir()))} figures to {figures}\n" in told
    assert not list(figures.glob("*curves*"))


@pytest.mark.parametrize("turned", [False, True])
def test_a_run_that_is_given_more_than_once_counts_once(tmp_path: Path, turned: bool) -> None:
    runs, kept, page, out = (tmp_path / name for name in ("runs", "a.json", "page.html", "b.json"))
    one, other = study()[:2]
    one.save(runs / "a")
    other.save(runs / "b")
    zeroforget("archive", runs, "-o", kept)
    given = [str(path) for path in (runs, runs / "a", kept)][:: -1 if turned else 1]
    for words, said in (
        (["report", *given, "-o", page], "(2 runs, "),
        (["archive", *given, "-o", out], "wrote 2 runs to"),
        (["table", *given], "Avg."),
    ):
        told = CliRunner().invoke(app, list(map(str, words)))
        assert (told.exit_code, said in told.stdout) == (0, True)
        assert told.stderr == "given more than once, so counted once: 2 runs\n"
    assert "over the epochs of task 1" in page.read_text()  # of a run and its archive, the one with curves is shown
    assert out.read_bytes() == kept.read_bytes()
    told = CliRunner().invoke(app, ["table", str(runs), str(runs / "a")])
    assert told.stderr == "given more than once, so counted once: 1 run\n"


@pytest.mark.parametrize("command", ["table", "report"])
def test_runs_that_differ_are_never_taken_for_one(tmp_path: Path, command: str) -> None:
    one, runs, out = results(), tmp_path / "runs", tmp_path / "out"
    one.save(runs / "a")
    replace(one, parameters=[7, 7]).save(runs / "b")
    with pytest.raises(ValueError, match="is there twice on digits/5 with seed 0; give one run of each"):
        zeroforget(command, runs, "-o", out)
    assert not out.exists()


def test_a_report_shows_runs_that_differ_in_their_options(tmp_path: Path) -> None:
    one = results()
    one.save(tmp_path / "a")
    replace(one, options={"a": 1}).save(tmp_path / "b")
    assert "(2 runs, " in zeroforget("report", tmp_path, "-o", tmp_path / "page.html")
    assert "Finetuning (a=1)" in (tmp_path / "page.html").read_text()


OUTPUTS = {
    "archive": ([], "archive"),
    "table": ([], "table"),
    "table -f markdown": (["-f", "markdown", "--costs"], "table"),
    "table -f latex": (["-f", "latex", "--averages"], "table"),
    "table -f csv": (["-f", "csv"], "table"),
    "report": ([], "report"),
}


@pytest.mark.parametrize("command", OUTPUTS)
@pytest.mark.parametrize(
    "content", [b"# Notes\n\n| a |\n", b"\x10\x00\x00{}", b'{"format": "other"}', b"**bold**\n", b"a,b\n"]
)
def test_what_a_command_did_not_write_is_not_overwritten(tmp_path: Path, command: str, content: bytes) -> None:
    words, kind = OUTPUTS[command]
    results().save(tmp_path / "runs")
    out = tmp_path / "README.md"
    out.write_bytes(content)
    with pytest.raises(ValueError, match=rf"README\.md is there and is no {kind} of zeroforget's; name another file"):
        zeroforget(command.split()[0], tmp_path / "runs", "-o", out, *words)
    assert out.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "runs"]


@pytest.mark.parametrize("command", OUTPUTS)
def test_what_a_command_wrote_before_is_overwritten(tmp_path: Path, command: str) -> None:
    words, _ = OUTPUTS[command]
    first = command.split()[0]
    results().save(tmp_path / "runs" / "a")
    out = tmp_path / "out"
    out.touch()  # an empty file has nothing to lose
    zeroforget(first, tmp_path / "runs", "-o", out, *words)
    before = out.read_bytes()
    results("tfm").save(tmp_path / "runs" / "b")
    for more in [words, *(others for name, (others, _) in OUTPUTS.items() if name.startswith(first)), words]:
        zeroforget(first, tmp_path / "runs", "-o", out, *more)
    assert len(out.read_bytes()) > len(before) > 0


@pytest.mark.parametrize("command", ["archive", "table", "report"])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, command: str) -> None:
    results().save(tmp_path / "runs")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no regular file, and would be replaced by one; name another"):
        zeroforget(command, tmp_path / "runs", "-o", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(ValueError, match="is a folder; give the name of a file to write"):
        zeroforget(command, tmp_path / "runs", "-o", tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "pulledd"], "no method 'pulledd'"),
        (["--seeds", "a"], "--seeds wants whole numbers"),
        (["--set", "regime.epoch=1"], "did you mean 'epochs'"),
    ],
)
def test_mistakes_are_value_errors_that_main_prints_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        zeroforget("run", write_toml(tmp_path), "--out", tmp_path, *words)


def test_a_terminal_sees_bars(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    # Long enough for a screen that is drawn a few times a second.
    experiment = Experiment.load(write_toml(tmp_path, epochs=100), methods=["pulled"])
    with ExperimentDisplay(console, 1) as watch:
        watch.loading("pictures", 3, 10)
        run(experiment, tmp_path / "out", watch=watch)
        run(experiment, tmp_path / "out", watch=watch)
    shown = screen.getvalue()
    assert "pulled · task" in shown
    assert "epoch" in shown
    assert "left" in shown
    assert "finished before" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_runs_at_the_same_time_are_told_apart(terminal: bool, tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=160)
    one, two, three = Experiment.load(write_toml(tmp_path), methods=["pulled"], seeds=[0, 1, 2]).runs()
    epoch = Epoch(0, 0.1, 0.5, 0.5, 0.75, 1.0)
    tried = {"growth": 0.05, "search": [{"growth": 0.0}, {"growth": 0.05}]}
    record = {"index": 0, "name": "a", "accuracy": [0.5], "unchanged": [True], "seconds": 1.0, "log": {"notes": tried}}
    with ExperimentDisplay(console, 3, 2) as watch:
        watch.notice("a word")
        watch.loading("pictures", 3, 10)
        for config in (one, two):
            watch.run_begins(config, ["a", "b"], 0)
            watch.running[config.folder].told = 0.0
        watch.progress(one, Progress("a", 0, 0, *((1, 4, 2) if terminal else (0, 4, 4)), 4, 0.1, epoch), None)
        watch.progress(two, Progress("a", 0, 0, 0, 4, 2, 4, 0.1, None), "lr-0.1")
        if watch.bars is not None:
            watch.bars.refresh()
            assert watch.bars.tasks[0].completed == (1.5 / 4 + 0.5 / 4) / 2  # of three runs with two tasks each
        watch.task_done(two, record)
        watch.run_done(two, results(seed=1), False)
        watch.run_begins(three, ["a", "b"], 1)
        watch.run_failed(one, ValueError("its process was killed"))
    shown = screen.getvalue()
    title = "pulled on tests.experiments.helpers:three_digits"
    assert "a word" in shown
    assert f"[2/3] {title}, seed 1" in shown
    assert f"  {title}, seed 1: task 1/2 a: 50.0 %, average 50.0 %, grown by 5 % (0, 5 tried), 1.0 s" in shown
    assert f"[3/3] {title}, seed 2, going on after 1 of 2 tasks" in shown
    assert f"[2/3] {title}, seed 0 failed: its process was killed" in shown
    if terminal:
        assert "epoch 2/4, loss 0.500, accuracy 75.0 %" in shown
        assert "0/3 runs done" in shown
        assert f"{title}, seed 0 · task 1/2" in shown
        assert f"{title}, seed 1 · task 1/2 · lr-0.1" in shown
    else:
        assert f"    {title}, seed 0: task 1/2, epoch 1/4: loss 0.500, accuracy 75.0 %" in shown


def test_lines_say_how_long_it_takes_yet_what_is_kept_and_what_was_lost(tmp_path: Path) -> None:
    screen = io.StringIO()
    (config,) = Experiment.load(write_toml(tmp_path), methods=["pulled"]).runs()
    watch = ExperimentDisplay(Console(file=screen, width=160), 1)
    watch.run_begins(config, ["a", "b", "c"], 1)
    watch.progress(config, Progress("b", 1, 0, 1, 4, 4, 4, 0.1, Epoch(1, 0.1, 0.5, 0.5, 0.75, 10.0)), "lr-0.1")
    record = {"index": 2, "name": "c", "accuracy": [0.5, 0.7, 0.9], "unchanged": [False, True, True], "seconds": 1.0}
    for value in (None, 0.25):  # without a trade-off only the learning rate is searched
        searched = {"hyperparameters": {"option": None if value is None else "strength", "value": value}}
        watch.task_done(config, record | {"log": {"notes": searched}})
    watch.run_done(config, results(accuracy=[[0.9], [0.6, 0.8], [0.7, 0.9, 0.8]]), False)
    assert screen.getvalue().splitlines()[1:] == [
        "    task 2/3 lr-0.1, epoch 2/4: loss 0.500, accuracy 75.0 %; at most 20 s left",
        "  task 3/3 c: 90.0 %, average 70.0 %, 1 of 2 earlier ones bit-equal, 1.0 s",
        "  task 3/3 c: 90.0 %, average 70.0 %, 1 of 2 earlier ones bit-equal, strength 0.25 found, 1.0 s",
        "  average 80.0 %, most forgotten -20.0",
    ]


class Written:
    """In place of TensorBoard's own writer."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_each_epoch_once_and_every_task_at_its_step(tmp_path: Path) -> None:
    (config,) = Experiment.load(write_toml(tmp_path), methods=["pulled"]).runs()
    watch = TensorBoardObserver(tmp_path)
    made: list[Written] = []

    def make(place: str) -> Any:
        made.append(Written(place))
        return made[0]

    watch._make = make
    watch.run_begins(config, ["a", "b"], 1)
    for step in (4, 1, 2):  # the end of an epoch, and twice within the next one
        watch.progress(config, Progress("b", 1, 0, 1, 4, step, 4, 0.1, Epoch(0, 0.1, 0.5, 0.6, 0.75, 1.0)), "lr-0.1")
    watch.task_done(config, {"index": 1, "accuracy": [0.5, 1.0]})
    (writer,) = made
    assert not writer.closed
    watch.run_done(config, results(), False)
    assert writer.closed
    assert writer.place == str(tmp_path / config.folder / "tensorboard")
    assert writer.scalars == [
        ("task-2/lr-0.1/phase-0/loss", 0.5, 0),
        ("task-2/lr-0.1/phase-0/val_loss", 0.6, 0),
        ("task-2/lr-0.1/phase-0/val_accuracy", 0.75, 0),
        ("task-2/lr-0.1/phase-0/lr", 0.1, 0),
        ("accuracy/task-1", 0.5, 2),
        ("accuracy/task-2", 1.0, 2),
        ("accuracy/average", 0.75, 2),
    ]


def test_results_of_a_run_are_plain_json(tmp_path: Path) -> None:
    run(Experiment.load(write_toml(tmp_path, epochs=1, tasks=2), methods=["finetuning"]), tmp_path)
    (file,) = tmp_path.rglob("results.json")
    values = json.loads(file.read_text())
    assert values["method"] == "finetuning"
    assert values["tasks"] == [{"name": "digits-0", "classes": 2}, {"name": "digits-2", "classes": 2}]
    assert values["environment"]["command"]


def test_a_file_from_elsewhere_that_names_code_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroforget.experiments.experiment import foreign_code

    (tmp_path / "here").mkdir()
    file = tmp_path / "e.toml"
    file.write_text('scenario = "evil.code:run"\n[methods."mine:Method"]\n[network]\nname = "lenet"\n')
    monkeypatch.chdir(tmp_path / "here")
    assert foreign_code(file) == ["evil.code:run", "mine:Method"]
    told = CliRunner().invoke(app, ["run", str(file)])
    assert "names code, which is run: evil.code:run, mine:Method" in told.output
    monkeypatch.chdir(tmp_path)
    assert foreign_code(file) == []
