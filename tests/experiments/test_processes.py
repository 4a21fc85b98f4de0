"""Processes side by side: what they say when they fail, who hears it, how they are ended. Here none is started."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experiments.helpers import results, write_toml
from tests.experiments.test_watching import Heard
from zeroforget.experiments import parallel
from zeroforget.experiments.experiment import Experiment, RunConfig
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.results import Results
from zeroforget.experiments.scheduling import Voice, outcome, schedule

Said = tuple[Any, ...]


@pytest.fixture
def configs(tmp_path: Path) -> list[RunConfig]:
    return Experiment.load(write_toml(tmp_path), methods=["pulled"], seeds=[0, 1, 2]).runs()


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ears, mouth = Pipe(duplex=False)
    yield ears, mouth
    ears.close()
    mouth.close()


class Process:
    """In place of one that was started; it has ended once it is told to."""

    def __init__(self) -> None:
        self.exitcode: int | None = None
        self.sentinel, self.alive = os.pipe()
        self.did: list[str] = []

    def end(self, code: int = 0) -> None:
        self.exitcode = code
        os.close(self.alive)

    def bury(self) -> None:
        os.close(self.sentinel)
        if self.exitcode is None:
            os.close(self.alive)

    def join(self, seconds: float | None = None) -> None:
        self.did.append("joined")

    def terminate(self) -> None:
        self.did.append("asked")

    def kill(self) -> None:
        self.did.append("killed")


class Started:
    """In place of the function that starts a process: notes what it was given."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.threads: list[int] = []
        self.children: list[tuple[Process, Connection]] = []
        self.most = 0

    def __call__(self, config: RunConfig, work: object, threads: int) -> parallel._Child:
        ears, mouth = Pipe(duplex=False)
        self.seeds.append(config.seed)
        self.threads.append(threads)
        self.children.append((Process(), mouth))
        self.most = max(self.most, sum(process.exitcode is None for process, _ in self.children))
        mouth.send(("run_begins", ["a"], 0))
        return parallel._Child(config, process=self.children[-1][0], ears=ears)  # type: ignore[arg-type]

    def end(self, position: int, *last: Said, code: int = 0) -> None:
        process, mouth = self.children[position]
        for said in last:
            mouth.send(said)
        process.end(code)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    made = Started()
    monkeypatch.setattr(parallel, "_start", made)
    yield made
    for process, mouth in made.children:
        process.bury()
        mouth.close()


def side_by_side(configs: list[RunConfig], most: int, watch: Observer) -> list[Results | str]:
    return schedule(configs, parallel.RunProcesses(work, most), lambda config: None, watch)


def work(config: RunConfig, watch: Observer) -> Results:
    raise AssertionError("nobody is to do it here")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no such thing"), "no such thing"),
        (OSError("the disk is full"), "the disk is full"),
        (MemoryError(), f"memory is full. {parallel._FEWER}"),
        (torch.OutOfMemoryError("2 GiB\nwanted"), f"the GPU's memory is full: 2 GiB {parallel._FEWER}"),
    ],
)
def test_what_is_no_mistake_in_the_code_is_told_in_a_line(
    error: Exception, said: str, configs: list[RunConfig]
) -> None:
    def fails(config: RunConfig, watch: Observer) -> Results:
        raise error

    assert outcome(fails, configs[0], Observer(), parallel._FEWER) == said


@pytest.mark.parametrize("error", [ValueError(), TimeoutError(), KeyError("a"), RuntimeError("no")])
def test_what_is_a_mistake_or_says_nothing_comes_with_its_traceback(error: Exception, configs: list[RunConfig]) -> None:
    def fails(config: RunConfig, watch: Observer) -> Results:
        raise error

    why = outcome(fails, configs[0], Observer(), "")
    assert isinstance(why, str)
    assert "in fails" in why
    assert why.splitlines()[-1].startswith(type(error).__name__)


def test_who_is_not_heard_any_more_ends_quietly(configs: list[RunConfig], pipe: tuple[Connection, Connection]) -> None:
    def speaks(config: RunConfig, watch: Observer) -> Results:
        watch.loading("pictures", 1, 2)
        raise AssertionError("it cannot be heard")

    usual = signal.getsignal(signal.SIGTERM)
    pipe[0].close()
    try:
        parallel._live(speaks, configs[0], pipe[1], 1)
    finally:
        signal.signal(signal.SIGTERM, usual)


def test_a_process_takes_its_share_of_threads_and_ends_when_it_is_asked_to(
    configs: list[RunConfig], pipe: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[Said] = []
    monkeypatch.setattr(signal, "signal", lambda *given: did.append(given))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: did.append(("threads", count)))

    def works(config: RunConfig, watch: Observer) -> Results:
        did.append(("work", config))
        return results()

    parallel._live(works, configs[0], pipe[1], 3)
    assert pipe[0].recv() == ("ended", results())
    assert did == [
        (signal.SIGTERM, parallel._asked_to_end),
        ("threads", 3),
        ("work", configs[0]),
        (signal.SIGTERM, signal.SIG_IGN),
    ]
    with pytest.raises(SystemExit) as caught:
        parallel._asked_to_end(signal.SIGTERM, None)
    assert caught.value.code == 143
    assert did[-1] == (signal.SIGTERM, signal.SIG_IGN)  # asked once more, it goes on ending


def test_what_a_process_says_is_heard_word_for_word(
    configs: list[RunConfig], pipe: tuple[Connection, Connection]
) -> None:
    voice, heard = Voice(pipe[1].send), Heard(0.1)
    child = parallel._Child(configs[0], process=Process(), ears=pipe[0])  # type: ignore[arg-type]
    voice.loading("pictures", 3, 10)
    voice.run_begins(configs[0], ["a", "b"], 1)
    voice.task_done(configs[0], {"index": 1})
    assert child.listen(heard)
    assert heard.words == [
        ("loading", "pictures", 3, 10),
        ("run_begins", configs[0], ["a", "b"], 1),
        ("task_done", configs[0], {"index": 1}),
    ]
    pipe[1].send(("ended", results()))
    pipe[1].close()
    assert not child.listen(heard)
    assert child.end(heard) == results()
    assert heard.words[3:] == [("run_done", configs[0], results(), False)]


def test_of_a_traceback_the_last_line_is_told_as_it_comes(
    configs: list[RunConfig], pipe: tuple[Connection, Connection]
) -> None:
    """All of it is the outcome, which is told at the end, once."""
    heard, why = Heard(0.1), "Traceback (most recent call last):\n  in loss\nTypeError: a mistake"
    child = parallel._Child(configs[0], why, process=Process(), ears=pipe[0])  # type: ignore[arg-type]
    assert child.end(heard) == why
    ((what, config, error),) = heard.words
    assert (what, config, str(error)) == ("run_failed", configs[0], "TypeError: a mistake")


def test_outcomes_stand_in_the_order_of_the_runs_whoever_ends_first(configs: list[RunConfig], started: Started) -> None:
    """The second ends at once and makes room for the third, which dies; the first ends last."""
    order = []

    class Releasing(Observer):
        def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
            if config.seed == 1:
                started.end(1, ("ended", results(seed=1)))
            if config.seed == 2:
                started.end(2, code=-signal.SIGKILL)

        def run_done(self, config: RunConfig, found: object, repeated: bool) -> None:
            order.append(config.seed)

        def run_failed(self, config: RunConfig, error: Exception) -> None:
            order.append(config.seed)
            if config.seed == 2:
                started.end(0, ("ended", "no"))

    first, second, third = side_by_side(configs, 2, Releasing())
    assert (first, second) == ("no", results(seed=1))
    assert str(third).startswith("its process was killed (SIGKILL)")
    assert order == [1, 2, 0]
    assert started.seeds == [0, 1, 2]
    assert started.most == 2


@pytest.mark.parametrize(
    ("cores", "torchs", "most", "threads"), [(6, 8, 2, 3), (6, 2, 2, 2), (6, 8, 4, 1), (1, 8, 3, 1)]
)
def test_processes_share_the_cores(
    cores: int,
    torchs: int,
    most: int,
    threads: int,
    configs: list[RunConfig],
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ending(Observer):
        def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
            started.end(config.seed, ("ended", "no"))

    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    monkeypatch.setattr(parallel, "_cores", lambda: cores)
    assert side_by_side(configs, most, Ending()) == ["no"] * 3
    assert started.threads == [threads] * 3
    assert started.most <= most


def test_however_it_ends_processes_are_asked_then_killed_and_waited_for(
    configs: list[RunConfig], started: Started
) -> None:
    class Stopping(Observer):
        def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side(configs, 2, Stopping())
    assert [process.did for process, _ in started.children] == [["asked", "joined", "killed", "joined"]] * 2
    for _, mouth in started.children:
        with pytest.raises(OSError):  # so that no word of theirs waits for ever to be heard
            mouth.send("a word")


def test_a_watcher_that_fails_ends_them_all(configs: list[RunConfig], started: Started) -> None:
    """Else the process would wait to be heard, and everybody for it."""

    class Full(Observer):
        def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
            raise OSError("no space left on the disk of the log")

    with pytest.raises(OSError, match="no space left on the disk of the log"):
        side_by_side(configs, 2, Full())
    assert all("asked" in process.did for process, _ in started.children)


def test_inside_a_request_to_end_unwinds_and_afterwards_it_means_what_it_did() -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError("it is asked inside")

    usual = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(SystemExit) as caught, parallel.terminable():
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, usual)


def test_another_thread_runs_them_too(configs: list[RunConfig], started: Started) -> None:
    """Python lets signals be handled in the main one alone."""

    class Ending(Observer):
        def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
            started.end(config.seed, ("ended", "no"))

    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(side_by_side(configs, 1, Ending())))
    thread.start()
    thread.join(30)
    assert found == ["no"] * 3
