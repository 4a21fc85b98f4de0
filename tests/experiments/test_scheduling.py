"""Who trains which run: several commands share one folder, parts of an experiment, and engines whose runs die."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.experiments.helpers import results, write_toml
from tests.experiments.test_parallel import Seen
from zeroforget.experiments import scheduling
from zeroforget.experiments.cluster import Cluster, Hosts
from zeroforget.experiments.experiment import Experiment, Part, RunConfig
from zeroforget.experiments.folder import LOCKS, Busy, OtherConfiguration, RunFolder
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.results import Results
from zeroforget.experiments.runner import run
from zeroforget.experiments.scheduling import Job, schedule
from zeroforget.files import locks
from zeroforget.training import Progress


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "PAUSE_S", 0.01)


@pytest.fixture(params=["flock", "lease"])
def _locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCKS, request.param)


class Waited(Seen):
    """Does something when it is told that there is nothing left to do but wait."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self.then = then
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)
        self.then()


@pytest.mark.usefixtures("_locks")
@pytest.mark.parametrize("finished", [False, True])
def test_a_second_command_takes_what_is_free_and_then_what_becomes_free(finished: bool, tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path, epochs=1, tasks=2))
    alone = run(experiment, tmp_path / "alone")
    first = experiment.runs()[0].folder
    if not finished:  # by the other one, before it lets go
        (tmp_path / "alone" / first / "results.json").unlink()
    shutil.copytree(tmp_path / "alone" / first, tmp_path / "out" / first)
    done = tmp_path / "out" / first / "results.json"
    aside = done.with_name("aside")
    with ExitStack() as held:
        if finished:
            done.rename(aside)
        held.enter_context(RunFolder(tmp_path / "out" / first).locked())

        def let_go() -> None:
            if finished:
                aside.rename(done)
            held.close()

        watch = Waited(let_go)
        found = run(experiment, tmp_path / "out", watch=watch)
    assert [r.comparable() for r in found] == [r.comparable() for r in alone]
    told = [event for event in watch.events if event[0] != "task"]
    assert told[:2] == [("begins", "pulled"), ("done", "pulled")], "the free one is first"
    assert told[2:] == (
        [("repeated", "finetuning")] if finished else [("begins", "finetuning"), ("done", "finetuning")]
    )
    assert len(watch.notices) == 1
    assert watch.notices[0].startswith(f"waiting: {tmp_path / 'out' / first} is being worked on by process ")


class LoseTheLease(Seen):
    """Takes the first run's lease away, as another process does that saw no sign of life."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        super().run_begins(config, tasks, finished)
        if len(self.events) == 1:
            (self.out / config.folder / ".lock.9").write_bytes(b"free")


def test_a_run_whose_lease_was_lost_writes_no_more_and_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCKS, "lease")
    experiment = Experiment.load(write_toml(tmp_path, epochs=1, tasks=2))
    alone = run(experiment, tmp_path / "alone")
    seen = LoseTheLease(tmp_path / "out")
    found = run(experiment, tmp_path / "out", watch=seen)
    assert [r.comparable() for r in found] == [r.comparable() for r in alone]
    begun = [label for event, label in seen.events if event == "begins"]
    assert begun == ["finetuning", "pulled", "finetuning"]
    assert not [event for event, _ in seen.events if event == "failed"]


def test_a_file_system_without_locks_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "no locks here")

    monkeypatch.setattr("fcntl.flock", none)
    experiment = Experiment.load(write_toml(tmp_path, epochs=1, tasks=2), methods=["finetuning"])
    folder = RunFolder(tmp_path / experiment.runs()[0].folder)
    with folder.locked(), pytest.raises(Busy, match="by process"), folder.locked():
        pass
    assert run(experiment, tmp_path)[0].accuracy
    assert [entry.name for entry in folder.path.glob(".lock.*")] == [".lock.2"]
    assert locks.LEASE_S > 3 * locks.BEAT_S


# Parts ---------------------------------------------------------------------------------------------------------------


def test_parts_are_all_runs_each_once(tmp_path: Path) -> None:
    runs = Experiment.load(write_toml(tmp_path), seeds=range(5)).runs()
    parts = [Part(number, 3).of(runs) for number in (1, 2, 3)]
    assert sorted(str(config.folder) for part in parts for config in part) == sorted(str(c.folder) for c in runs)
    assert [len(part) for part in parts] == [4, 3, 3]
    assert Part(11, 11).of(runs) == []
    assert Part.parse("2/3") == Part(2, 3)
    for text in ("0/3", "4/3", "3", "a/b", "1/0", "-1/2"):
        with pytest.raises(ValueError, match="a part is NUMBER/PARTS, such as 3/8, counted from 1"):
            Part.parse(text)


def test_a_part_alone_is_run(tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path, epochs=1, tasks=2))
    assert [found.method for found in run(experiment, tmp_path, part=Part(2, 2))] == ["pulled"]
    assert run(experiment, tmp_path, part=Part(3, 3)) == []
    seen = Seen()
    run(experiment, tmp_path, watch=seen)
    assert ("repeated", "pulled") in seen.events
    assert ("done", "finetuning") in seen.events


# Devices -------------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_another_device_of_its_kind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.claim({"regime": {"device": "cuda:1", "lr": 0.1}}, {})
    (tmp_path / "log.jsonl").touch()
    folder.claim({"regime": {"device": "cuda", "lr": 0.1}}, {})
    with pytest.raises(OtherConfiguration, match=r'regime\.device was "cuda", now "cpu"'):
        folder.claim({"regime": {"device": "cpu", "lr": 0.1}}, {})


# Engines -------------------------------------------------------------------------------------------------------------


class Mortal:
    """Two runs at a time; of each the first so many attempts die, and a start is told in `begun`."""

    def __init__(self, deaths: int) -> None:
        self.deaths, self.open = deaths, False
        self.begun: list[str] = []
        self.running: list[Job] = []

    def has_room(self, running: int) -> bool:
        return running < 2

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.open = True
        try:
            yield
        finally:
            self.open = False

    def start(self, config: RunConfig, watch: Observer) -> Job:
        assert self.open
        self.begun.append(config.choice.label)
        self.running.append(Job(config))
        return self.running[-1]

    def ended(self, watch: Observer) -> list[Job]:
        job = self.running.pop()
        dead = self.begun.count(job.config.choice.label) <= self.deaths
        job.outcome = Busy("its host died") if dead else results(job.config.choice.label)
        return [job]


def test_what_died_is_begun_again(tmp_path: Path) -> None:
    engine, looked = Mortal(2), list[str]()
    configs = Experiment.load(write_toml(tmp_path)).runs()
    found = schedule(configs, engine, lambda config: looked.append(config.choice.label), Observer())
    assert [each.method for each in found if isinstance(each, Results)] == ["finetuning", "pulled"]
    assert sorted(engine.begun) == ["finetuning"] * 3 + ["pulled"] * 3
    assert sorted(looked) == sorted(engine.begun), "there is a look at a run before each beginning"
    assert not engine.open
    with pytest.raises(Busy):
        schedule(configs, Mortal(1), lambda config: None, Observer(), patient=False)


class Stop(Exception):
    """Raised by somebody who looks on."""


def test_an_engine_is_closed_however_it_ends(tmp_path: Path) -> None:
    engine = Mortal(0)

    def look(config: RunConfig) -> None:
        if engine.begun:
            raise Stop

    with pytest.raises(Stop):
        schedule(Experiment.load(write_toml(tmp_path)).runs(), engine, look, Observer())
    assert not engine.open


# A cluster, without one ----------------------------------------------------------------------------------------------


def test_ray_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--ray needs Ray .*: pip install 'zeroforget\[ray\]'"):
        run(Experiment.load(write_toml(tmp_path)), tmp_path, cluster=Cluster())


@pytest.mark.parametrize(("given", "said"), [({"cpus": 0.0}, "processors, not 0"), ({"gpus": 1.5}, "not on 1.5")])
def test_what_a_run_takes_of_a_cluster_is_checked(given: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Cluster(**given)
    assert (Cluster(cpus=0.5).threads, Cluster(cpus=3.0).threads) == (1, 3)


def test_hosts_take_all_runs_unless_there_is_a_bound(tmp_path: Path) -> None:
    def work(config: RunConfig, watch: Observer) -> Results:
        raise AssertionError

    assert Hosts(None, Cluster(), work, tmp_path, None, Observer()).has_room(10**6)
    bound = Hosts(None, Cluster(), work, tmp_path, 2, Observer())
    assert bound.has_room(1)
    assert not bound.has_room(2)


def test_an_address_where_nobody_answers_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(ValueError, match=f"no Ray cluster answers at '{address}' .*refused"):
        run(Experiment.load(write_toml(tmp_path)), tmp_path / "out", cluster=Cluster(address))
    assert not (tmp_path / "out").exists()


def test_progress_of_others_is_passed_on(tmp_path: Path) -> None:
    config = Experiment.load(write_toml(tmp_path)).runs()[0]
    said: list[tuple[object, ...]] = []
    voice, seen, job = scheduling.Voice(said.append), Seen(), Job(config)
    voice.loading("digits", 1, 2)
    voice.notice("something")
    voice.run_begins(config, ["a"], 0)
    voice.progress(config, Progress("a", 0, 0, 0, 1, 1, 1, 0.1, None), None)
    voice.task_done(config, {})
    voice.run_done(config, results(), False)  # told by what the work returns
    for what, *more in said:
        scheduling.pass_on(job, seen, str(what), *more)
    assert [event for event, _ in seen.events] == ["begins", "task"]
    job.outcome = "first line\nlast line"
    scheduling.tell_end(job, seen)
    assert seen.events[-1] == ("failed", "finetuning")
