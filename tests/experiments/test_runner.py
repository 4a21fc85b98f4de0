"""Running: the same bits every time, however often it was stopped; one configuration, one process a folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experiments.helpers import Drawing, Pulled, three_digits, tiny_net, write_toml
from zeroforget.data import Task
from zeroforget.experiments.experiment import Experiment, RunConfig
from zeroforget.experiments.folder import Busy, Log, OtherConfiguration, RunFolder, differences, read_log
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.one_run import load_method, load_tensors, save_task
from zeroforget.experiments.resolve import NamedPart
from zeroforget.experiments.results import Results, load_runs
from zeroforget.experiments.runner import Failed, _Data, run
from zeroforget.methods import Method, TaskSpec
from zeroforget.methods.baselines import Joint
from zeroforget.training import Fit, FitLog, Progress

SEARCH = "\n[search]\nenabled = true\nlearning_rates = [0.1, 0.02]\nhalvings = 2\ndrop = 0.01\n"


class Interrupted(BaseException):
    """As abrupt as Ctrl-C."""


class StopAt(Observer):
    """Raises at the n-th report of progress."""

    every = 0.0

    def __init__(self, reports: int) -> None:
        self.reports = reports

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        self.reports -= 1
        if self.reports < 0:
            raise Interrupted


class Count(Observer):
    """Counts what happens."""

    every = 0.0

    def __init__(self) -> None:
        self.steps = self.tasks = self.repeated = 0
        self.failed: list[str] = []
        self.why: list[str] = []

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        self.steps += 1

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        self.tasks += 1

    def run_done(self, config: RunConfig, results: Results, repeated: bool) -> None:
        self.repeated += repeated

    def run_failed(self, config: RunConfig, error: Exception) -> None:
        self.failed.append(config.choice.label)
        self.why.append(str(error))


def comparable(results: list[Results]) -> list[dict[str, Any]]:
    return [r.comparable() for r in results]


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path), seeds=[0, 1])
    first = run(experiment, tmp_path / "a")
    assert comparable(first) == comparable(run(experiment, tmp_path / "b"))
    assert first[0].accuracy != first[2].accuracy or first[0].logs != first[2].logs


def test_every_seed_and_task_has_draws_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroforget.experiments.one_run._Run._try_replay", lambda *args: None)  # which makes one more
    path = write_toml(
        tmp_path, tasks=2, epochs=1, more='\n[methods.own]\nmethod = "tests.experiments.helpers:Drawing"\n'
    )
    Drawing.drawn.clear()
    run(Experiment.load(path, methods=["own"], seeds=[0, 1]), tmp_path)
    assert len(Drawing.drawn) == len(set(Drawing.drawn)) == 6  # of each seed: made, two tasks


def test_every_method_starts_from_the_same_network(tmp_path: Path) -> None:
    """With no pull and one phase the second method is fine-tuning, so it must find the same."""
    experiment = Experiment.load(write_toml(tmp_path), changes=["pulled.strength=0.0", "pulled.second=false"])
    finetuning, pulled = run(experiment, tmp_path)
    assert finetuning.accuracy == pulled.accuracy
    assert [log["epochs"][-1]["val_loss"] for log in finetuning.logs] == [
        log["epochs"][-1]["val_loss"] for log in pulled.logs
    ]


def test_a_run_leaves_its_configuration_environment_log_state_and_results(tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path), methods=["pulled"])
    results = run(experiment, tmp_path / "out")[0]
    folder = tmp_path / "out" / experiment.runs()[0].folder
    assert json.loads((folder / "config.json").read_text())["options"] == {"strength": 0.1, "second": True}
    assert {"python", "torch", "platform", "zeroforget", "commit", "date", "command"} <= results.environment.keys()
    assert load_runs([tmp_path / "out"]) == [results]
    events = [event["event"] for event in read_log(folder / "log.jsonl")]
    assert events[0] == "started"
    assert events.count("epoch") == 3 * 2 * 3  # tasks, phases, epochs
    assert events.count("task") == 3
    assert events[-1] == "finished"
    assert not (folder / "learning").exists()
    assert [p.parent.name for p in folder.rglob("state.safetensors")] == ["002"]
    assert results.unchanged[-1]
    assert results.overhead[0]["training"] == 32 * (64 * 8 + 8)
    assert results.parameters == [64 * 8 + 8 + 18 * tasks for tasks in (1, 2, 3)]


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path))
    first = run(experiment, tmp_path)
    count = Count()
    assert run(experiment, tmp_path, watch=count) == first
    assert (count.steps, count.repeated) == (0, 2)


@pytest.mark.parametrize("reports", [0, 3, 14, 32, 41, 58])
@pytest.mark.parametrize("more", ["", SEARCH], ids=["plain", "search"])
def test_interrupted_anywhere_and_started_again_it_ends_with_the_same_bits(
    reports: int, more: str, tmp_path: Path
) -> None:
    experiment = Experiment.load(write_toml(tmp_path, tasks=2, more=more), methods=["pulled"])
    count = Count()
    whole = run(experiment, tmp_path / "whole", watch=count)
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "cut", watch=StopAt(reports))
    again = Count()
    assert comparable(run(experiment, tmp_path / "cut", watch=again)) == comparable(whole)
    assert again.steps <= count.steps - reports + 5  # at most one epoch of 4 + 1 reports is repeated
    logs = [tmp_path / place / experiment.runs()[0].folder / "log.jsonl" for place in ("whole", "cut")]
    epochs = [
        [{k: v for k, v in e.items() if k != "seconds"} for e in read_log(log) if e["event"] == "epoch"] for log in logs
    ]
    assert epochs[0] == epochs[1]


def test_another_configuration_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=1)
    run(Experiment.load(path), tmp_path)
    with pytest.raises(OtherConfiguration, match=r"regime\.lr was 0\.1, now 0\.2"):
        run(Experiment.load(path, changes=["regime.lr=0.2"]), tmp_path)
    with pytest.raises(OtherConfiguration, match=r"options\.strength was 0\.1, now 3\.0"):
        run(Experiment.load(path, methods=["pulled"], changes=["pulled.strength=3"]), tmp_path)


def test_a_run_that_failed_before_it_began_does_not_hold_its_folder(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=1, more='[methods.picky]\nmethod = "tests.experiments.helpers:Picky"\n')
    with pytest.raises(ValueError, match="share is at most 1"):
        run(Experiment.load(path, methods=["picky"], changes=["picky.share=2.0"]), tmp_path / "out")
    folder = tmp_path / "out" / Experiment.load(path, methods=["picky"]).runs()[0].folder
    assert (folder / "config.json").exists()
    (folder / "environment.json").write_text("{}")
    results = run(Experiment.load(path, methods=["picky"], changes=["picky.share=0.5"]), tmp_path / "out")[0]
    assert results.environment["torch"] == torch.__version__
    assert json.loads((folder / "config.json").read_text())["options"]["share"] == 0.5


def test_a_run_of_an_older_version_goes_on_unless_a_newer_option_is_set(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=1)
    first = run(Experiment.load(path), tmp_path)
    for config in Experiment.load(path).runs():
        file = tmp_path / config.folder / "config.json"
        older = json.loads(file.read_text())
        del older["regime"]["mix_until"]
        file.write_text(json.dumps(older))
    count = Count()
    assert run(Experiment.load(path), tmp_path, watch=count) == first
    assert (count.steps, count.repeated) == (0, 2)
    with pytest.raises(OtherConfiguration, match=r"regime\.mix_until was 1\.0, now 0\.5"):
        run(Experiment.load(path, changes=["regime.mix_until=0.5"]), tmp_path)


def test_differences_are_named_by_their_path() -> None:
    old, new = {"a": {"b": 1, "c": [1]}, "d": None}, {"a": {"b": 2, "c": [1]}, "e": "x"}
    assert differences(old, new) == ["a.b was 1, now 2", 'e was null, now "x"']


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(Busy, match="being worked on by process"),
        RunFolder(tmp_path).locked(),
    ):
        pass
    with RunFolder(tmp_path).locked():
        pass


def test_a_lock_whose_owner_has_not_yet_signed_is_waited_for(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        signing = threading.Timer(0.1, lambda: (tmp_path / ".lock").write_text("4711"))
        signing.start()
        with pytest.raises(Busy, match="by process 4711; wait for it"), RunFolder(tmp_path).locked():
            pass
        signing.join()


def test_a_method_that_refuses_a_task_is_named(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=1, more='[methods.picky]\nmethod = "tests.experiments.helpers:Refusing"\n')
    with pytest.raises(ValueError, match="method 'picky', task 'digits-0': labels are wrong"):
        run(Experiment.load(path, methods=["picky"]), tmp_path)


def test_a_task_that_cannot_be_learned_is_met_before_anything_is_trained(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=1)
    experiment = Experiment.load(path, changes=["scenario={ name = 'tests.experiments.helpers:unlearnable' }"])
    with pytest.raises(ValueError, match=r"task 'digits-2' has 1 class\(es\)"):
        run(experiment, tmp_path)
    assert not list(tmp_path.rglob("log.jsonl"))


def test_a_method_that_waits_for_more_tasks_than_there_are_is_told(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=1, more='[methods.all]\nmethod = "joint"\nbegin = 4\n')
    with pytest.raises(ValueError, match="method 'all' waits for task 4, but there are 3: it was never trained"):
        run(Experiment.load(path, methods=["all"]), tmp_path)
    assert not list(tmp_path.rglob("results.json"))


def test_one_method_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    more = '\n[methods.exploding]\nmethod = "tests.experiments.helpers:Exploding"\n'
    experiment = Experiment.load(
        write_toml(tmp_path, epochs=1, more=more), methods=["finetuning", "exploding", "pulled"]
    )
    count = Count()
    with pytest.raises(Failed, match=r"(?s)1 of 3 runs failed.*loss became inf") as caught:
        run(experiment, tmp_path, watch=count)
    (folder,) = tmp_path.rglob("exploding/seed-0")
    assert f"\n{folder}: " in str(caught.value)  # where to look
    assert count.failed == ["exploding"]
    assert {r.method for r in load_runs([tmp_path])} == {"finetuning", "pulled"}


def test_one_method_that_refuses_the_network_does_not_stop_the_others(tmp_path: Path) -> None:
    more = '\n[methods.picky]\nmethod = "tests.experiments.helpers:Refusing"\n'
    experiment = Experiment.load(write_toml(tmp_path, epochs=1, more=more), methods=["picky", "finetuning"])
    count = Count()
    with pytest.raises(Failed, match=r"(?s)1 of 2 runs failed, the others are finished:.*picky.*labels are wrong"):
        run(experiment, tmp_path, watch=count)
    assert count.failed == ["picky"]
    assert {r.method for r in load_runs([tmp_path])} == {"finetuning"}
    with pytest.raises(Failed) as caught:
        run(Experiment.load(tmp_path / "short.toml", methods=["picky"]), tmp_path)
    assert "\n" not in str(caught.value)  # of a single run, the reason alone


def test_a_mistake_in_one_methods_code_does_not_stop_the_others_and_is_shown_whole(tmp_path: Path) -> None:
    more = '\n[methods.own]\nmethod = "tests.experiments.helpers:Misspelt"\n'
    path, count = write_toml(tmp_path, epochs=1, more=more), Count()
    with pytest.raises(
        Failed, match=r"(?s)1 of 2 runs failed.*Traceback.*self\.anchorr\.zero_.*no attribute 'anchorr'"
    ):
        run(Experiment.load(path, methods=["own", "finetuning"]), tmp_path, watch=count)
    assert count.failed == ["own"]
    assert count.why == ["AttributeError: 'Misspelt' object has no attribute 'anchorr'"]
    assert {r.method for r in load_runs([tmp_path])} == {"finetuning"}
    with pytest.raises(AttributeError, match="no attribute 'anchorr'"):  # alone: as Python shows it
        run(Experiment.load(path, methods=["own"]), tmp_path)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        ("Hasty", r"Hasty\.__init__ must begin with super\(\)\.__init__\(net, example\)"),
        ("Late", "method 'own': tensor 'late1' was saved, but the method has none of that name. Make it in __init__"),
    ],
)
def test_a_method_of_ones_own_that_could_not_go_on_is_told_at_its_first_task(
    cls: str, words: str, tmp_path: Path
) -> None:
    path = write_toml(tmp_path, epochs=1, more=f'\n[methods.own]\nmethod = "tests.experiments.helpers:{cls}"\n')
    with pytest.raises(Failed, match=words):
        run(Experiment.load(path, methods=["own"]), tmp_path)
    assert not list(tmp_path.rglob("task.json"))


def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    scenario = three_digits()

    def method(width: int = 4) -> Pulled:
        return Pulled(tiny_net((1, 8, 8), width=width), scenario.example())

    saved = method()
    saved.add_task(TaskSpec("a", 2))
    saved.add_task(TaskSpec("b", 3))
    save_task(tmp_path / "000", saved, {"name": "b"})
    loaded = method()
    load_method(tmp_path / "000", loaded)
    assert loaded.specs == saved.specs
    assert all(torch.equal(t, saved.state_dict()[n]) for n, t in loaded.state_dict().items())
    with pytest.raises(ValueError, match=r"tensor 'anchor0' was saved as \(4, 64\).*has \(5, 64\)"):
        load_method(tmp_path / "000", method(5))
    tensors = dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"'heads\.0\.bias' is missing"):
        load_tensors(saved, {n: t for n, t in tensors.items() if n != "heads.0.bias"}, "here")
    with pytest.raises(ValueError, match="'other' was saved, but the method has none"):
        load_tensors(saved, tensors | {"other": torch.zeros(1)}, "here")
    with pytest.raises(ValueError, match=r"'anchor1' was saved as \(4,\) torch.float64, .* torch.float32"):
        load_tensors(saved, tensors | {"anchor1": tensors["anchor1"].double()}, "here")


def test_every_scenario_of_an_experiment_is_read(tmp_path: Path) -> None:
    data = _Data(None, Observer())
    few, many = (NamedPart("tests.experiments.helpers:three_digits", {"tasks": tasks}) for tasks in (1, 2))
    assert [len(data(part).tasks) for part in (few, many, many, few)] == [1, 2, 2, 1]
    assert data(few) is data(few)


def test_a_lock_holds_the_number_of_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("99999999")
    with RunFolder(tmp_path).locked():
        assert (tmp_path / ".lock").read_text().startswith(f'{{"pid": {os.getpid()}, ')


def test_the_past_is_handed_to_those_who_ask_and_time_spent_before_a_stop_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: dict[str, list[int]] = {"Finetuning": [], "Joint": []}
    learn = Method.learn

    def watched(self: Method, task: Task, fit: Fit, past: Sequence[Task] = ()) -> FitLog:
        handed[type(self).__name__].append(len(past))
        log = learn(self, task, fit, past)
        log.seconds = 1000.0  # as epochs before an interruption would have it
        return log

    monkeypatch.setattr(Method, "learn", watched)
    monkeypatch.setattr(Joint, "learn", watched)
    monkeypatch.setattr(Joint, "train_task", Method.train_task)
    found = run(Experiment.load(write_toml(tmp_path, epochs=1), methods=["finetuning", "joint"]), tmp_path)
    assert handed == {"Finetuning": [0, 0, 0], "Joint": [0, 1, 2]}
    assert [seconds >= 1000 for seconds in found[0].seconds] == [True] * 3
    assert found[0].unchanged == [False, False, True]  # fine-tuning moves what older tasks read


def test_a_log_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.write("epoch", task=0, phase=0, epoch=0)
    with log.path.open("a") as file:
        file.write('{"event": "epo')
    log = Log(log.path)
    log.write("epoch", task=0, phase=0, epoch=0)
    log.write("epoch", task=0, phase=0, epoch=1)
    assert [e["epoch"] for e in read_log(log.path)] == [0, 1]


# Killed for real ---------------------------------------------------------------------------------------------------


class Tell(Observer):
    """Tells another process of every report; after the last one that it may give, it waits for its end."""

    every = 0.0

    def __init__(self, ears: Connection, reports: int) -> None:
        self.ears, self.left = ears, reports

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        self.ears.send_bytes(b".")
        self.left -= 1
        while self.left <= 0:
            time.sleep(60)


def work(toml: Path, out: Path, ears: Connection, reports: int) -> None:
    """What the process does that will be killed."""
    torch.set_num_threads(1)
    run(Experiment.load(toml), out, watch=Tell(ears, reports))


def killed(toml: Path, out: Path, reports: int, delay: float) -> bool:
    """Start the experiment in a process of its own and kill it `delay` seconds after so many reports of progress.

    It goes no further than two epochs on, however long this process is kept from killing it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zeroforget.experiments.runner", "tests.experiments.helpers"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(toml, out, there, reports + 10))
    process.start()
    there.close()
    with contextlib.suppress(EOFError):  # it came to its end before
        for _ in range(reports):
            here.recv_bytes()
    time.sleep(delay)
    process.kill()
    process.join()
    here.close()
    return process.exitcode == -9


@pytest.mark.parametrize(
    ("more", "kills"),
    [
        pytest.param("", 4, id="plain"),
        pytest.param("", 10, id="plain-ten", marks=pytest.mark.soak),
        pytest.param(SEARCH, 4, id="search"),
        pytest.param(SEARCH, 10, id="search-ten", marks=pytest.mark.soak),
    ],
)
def test_sigkill_at_random_moments_changes_not_one_bit(more: str, kills: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    toml = write_toml(tmp_path, epochs=8, more=more)
    count = Count()
    whole = run(Experiment.load(toml), tmp_path / "whole", watch=count)
    moments = random.Random(f"kill {more}")
    # Each kill strikes at a random report, and then anywhere within the training and writing that follow it.
    most = int(1.5 * count.steps / kills)
    struck = [killed(toml, tmp_path / "cut", moments.randrange(most), moments.uniform(0, 0.02)) for _ in range(kills)]
    assert sum(struck) >= kills - 2
    resumed = run(Experiment.load(toml), tmp_path / "cut")
    assert comparable(resumed) == comparable(whole)
    logs = [read_log(log) for log in (tmp_path / "cut").rglob("log.jsonl")]
    starts = sum(event["event"] in ("started", "resumed") for log in logs for event in log)
    assert starts >= 2 + kills // 2  # it was begun again in the middle, not from nothing each time
