"""What a run writes down: figures of the right images, who made them and where; and nothing that a kill left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.experiments.helpers import write_toml
from tests.experiments.test_runner import Count, Interrupted
from zeroforget.data import Scenario, Split, Task
from zeroforget.experiments.experiment import Experiment, RunConfig
from zeroforget.experiments.folder import RunFolder, read_log
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.results import load_runs
from zeroforget.experiments.runner import Failed, run
from zeroforget.methods import Method
from zeroforget.training import Progress
from zeroforget.training.evaluate import Predictor

SLOW = 0.03
SEARCH = "\n[search]\nenabled = true\nlearning_rates = [0.1, 0.02]\nhalvings = 1\n"


class Noting(Method):
    """Notes the first numbers of the network and of the batch it is given, and takes its time to answer."""

    given: ClassVar[list[list[float]]] = []
    batches: ClassVar[list[list[float]]] = []

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        super().__init__(net, example)
        self.begun = False
        self.given.append(next(net.parameters()).flatten()[:4].tolist())

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """The first batch of each that is made tells the order of its images."""
        self.batch = x.flatten(1).sum(1).tolist()
        return super().loss(x, y, task)

    def after_step(self) -> None:
        """A step that only counts operations is never made."""
        if not self.begun:
            self.batches.append(self.batch)
        self.begun = True

    def predictor(self, task: int) -> Predictor:
        """As slow as a large test set."""
        time.sleep(SLOW)
        return super().predictor(task)


class Full(Method):
    """Finds no room on the GPU."""

    def end_task(self, task: Task, fit: object) -> None:
        """As torch says it."""
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand much more")


def misleading() -> Scenario:
    """Two tasks whose validation labels are right and whose test labels are turned round."""
    x = torch.cat([torch.zeros(40, 1, 8, 8), torch.ones(40, 1, 8, 8)])
    y = torch.arange(80) // 40
    return Scenario(
        "misleading",
        (1, 8, 8),
        tuple(Task(name, ("0", "1"), Split(x, y), Split(x, y), Split(x, 1 - y)) for name in ("a", "b")),
    )


class StopAfter(Observer):
    """Raises when a task is done, and keeps how a run that goes on is announced."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.finished: list[int] = []

    def run_begins(self, config: RunConfig, tasks: list[str], finished: int) -> None:
        self.finished.append(finished)

    def task_done(self, config: RunConfig, record: dict[str, Any]) -> None:
        if record["index"] == self.task:
            raise Interrupted


def own(path: Path, cls: str) -> Path:
    """An experiment with a method of this file."""
    return write_toml(path, tasks=2, epochs=1, more=f'[methods.own]\nmethod = "tests.experiments.test_records:{cls}"\n')


def test_every_seed_has_a_network_and_an_order_of_images_of_its_own(tmp_path: Path) -> None:
    Noting.given.clear()
    Noting.batches.clear()
    found = run(Experiment.load(own(tmp_path, "Noting"), methods=["own"], seeds=[0, 1]), tmp_path)
    first, again, other, _ = Noting.given  # each made once more, to see whether it could go on
    assert first == again != other
    one, two = Noting.batches
    assert one != two
    assert [each.seed for each in found] == [0, 1]
    for each in found:  # the time of learning and of judging every task so far
        for tasks, (seconds, log) in enumerate(zip(each.seconds, each.logs, strict=True), 1):
            assert seconds >= log["seconds"] + SLOW * tasks


def test_accuracies_are_those_of_test_images(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=8)
    scenario = "scenario={ name = 'tests.experiments.test_records:misleading' }"
    (found,) = run(Experiment.load(path, methods=["finetuning"], changes=[scenario]), tmp_path)
    assert [log["epochs"][-1]["val_accuracy"] for log in found.logs] == [1.0, 1.0]
    assert found.learned == [0.0, 0.0]


def test_a_search_never_looks_at_test_images(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=8, more=SEARCH)
    scenario = "scenario={ name = 'tests.experiments.test_records:misleading' }"
    (found,) = run(Experiment.load(path, methods=["finetuning"], changes=[scenario]), tmp_path)
    for log in found.logs:
        assert [trial["accuracy"] for trial in log["notes"]["hyperparameters"]["trials"]] == [1.0, 1.0]


def test_every_task_is_searched_anew_from_the_trade_off_that_is_in_force(tmp_path: Path) -> None:
    path = write_toml(tmp_path, tasks=2, epochs=2, more=SEARCH)
    path.write_text(path.read_text().replace("strength = 0.1\n", ""))
    experiment = Experiment.load(path, methods=["pulled"])
    (found,) = run(experiment, tmp_path)
    events = read_log(tmp_path / experiment.runs()[0].folder / "log.jsonl")
    trained = [(e["task"], e["trial"]) for e in events if e["event"] == "epoch" and e["epoch"] == e["phase"] == 0]
    assert trained[:5] == [(0, "lr-0.1"), (0, "lr-0.02"), (1, "lr-0.1"), (1, "lr-0.02"), (1, "value-00")]
    noted = found.logs[1]["notes"]["hyperparameters"]
    assert noted["option"] == "strength"
    assert noted["trials"][2]["value"] == 1.0  # the signature's own


class Trials(Observer):
    """Keeps which trials are trained, and stops in the first epoch of one."""

    every = 0.0

    def __init__(self, stop: str = "") -> None:
        self.stop = stop
        self.seen: list[str | None] = []

    def progress(self, config: RunConfig, progress: Progress, trial: str | None) -> None:
        if trial == self.stop:
            raise Interrupted
        self.seen.append(trial)


def test_a_trial_that_diverged_is_not_tried_again_by_a_run_that_goes_on(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=2, more=SEARCH.replace("[0.1", "[1e30, 0.1"))
    experiment = Experiment.load(path, methods=["finetuning"])
    with pytest.raises(Interrupted):
        run(experiment, tmp_path, watch=Trials("lr-0.02"))
    learning = RunFolder(tmp_path / experiment.runs()[0].folder).learning(0)
    noted = json.loads((learning / "search.json").read_text())
    assert list(noted) == ["lr-1e+30", "lr-0.1"]
    assert noted["lr-1e+30"] is None
    watch = Trials()
    (found,) = run(experiment, tmp_path, watch=watch)
    assert watch.seen[0] == "lr-0.02"
    trials = found.logs[0]["notes"]["hyperparameters"]["trials"]
    assert [trial["accuracy"] for trial in trials[:2]] == [None, noted["lr-0.1"]]


def test_memory_that_is_full_stops_one_run_and_not_the_others(tmp_path: Path) -> None:
    count = Count()
    with pytest.raises(
        Failed, match=r"1 of 2 runs failed(?s:.*)own(?s:.*)the GPU's memory is full: CUDA out of memory"
    ):
        run(Experiment.load(own(tmp_path, "Full"), methods=["own", "finetuning"]), tmp_path, watch=count)
    assert count.why == ["the GPU's memory is full: CUDA out of memory. Tried to allocate 2.00 GiB."]
    assert [each.method for each in load_runs([tmp_path])] == ["finetuning"]


def test_a_method_that_waited_for_its_task_is_finished(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=1, more='[methods.all]\nmethod = "joint"\nbegin = 3\n')
    (found,) = run(Experiment.load(path, methods=["all"]), tmp_path)
    assert found.trained == [False, False, True]


def test_a_run_that_goes_on_says_so_and_tells_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment.load(write_toml(tmp_path, epochs=1), methods=["finetuning"])
    folder = tmp_path / experiment.runs()[0].folder
    for machine, task in (("here", 0), ("there", 1)):
        monkeypatch.setattr("zeroforget.experiments.one_run.environment", lambda machine=machine: {"torch": machine})
        monkeypatch.setattr("zeroforget.experiments.folder.environment", lambda machine=machine: {"torch": machine})
        with pytest.raises(Interrupted):
            run(experiment, tmp_path, watch=(watch := StopAfter(task)))
        assert watch.finished == [task]
    (found,) = run(experiment, tmp_path)
    assert found.environment == {"torch": "here"} == json.loads((folder / "environment.json").read_text())
    starts = [e for e in read_log(folder / "log.jsonl") if e["event"] in ("started", "resumed")]
    assert [(e["event"], e["finished"], e["environment"]["torch"]) for e in starts] == [
        ("started", 0, "here"),
        ("resumed", 1, "there"),
        ("resumed", 2, "there"),
    ]


def leave(*files: Path) -> None:
    """As a kill between two steps does."""
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_what_a_kill_left_between_two_steps_is_cleared_away(tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path, epochs=1), methods=["finetuning"])
    folder = RunFolder(tmp_path / experiment.runs()[0].folder)
    for task in (1, 2):
        with pytest.raises(Interrupted):
            run(experiment, tmp_path, watch=StopAfter(task))
        assert not folder.learning(task).exists()
        aside = folder.task(task + 1).with_name(f".00{task + 1}.tmp")
        leave(folder.learning(task) / "fit" / "old", folder.task(0) / "state.safetensors", aside / "half")
    run(experiment, tmp_path)
    assert not folder.learning(2).exists()
    tasks = folder.path / "tasks"
    assert sorted(str(path.relative_to(tasks)) for path in tasks.glob("[0-9]*/*")) == [
        "000/task.json",
        "001/task.json",
        "002/state.safetensors",
        "002/task.json",
    ]


def test_results_say_all_that_decides_them(tmp_path: Path) -> None:
    experiment = Experiment.load(write_toml(tmp_path, epochs=1), changes=["regime.lr=0.03"], seeds=[5])
    finetuning, pulled = run(experiment, tmp_path)
    for found in (finetuning, pulled):
        assert (found.experiment, found.scenario, found.seed) == (
            "short",
            "tests.experiments.helpers:three_digits",
            5,
        )
        assert found.network == "tests.experiments.helpers:tiny_net(width=8)"
        assert (found.regime["lr"], found.regime["epochs"], found.regime["precision"]) == (0.03, 1, "float32")
    assert (finetuning.method, finetuning.options) == ("finetuning", {})
    assert (pulled.method, pulled.options) == ("pulled", {"strength": 0.1, "second": True})


def test_growth_and_parameters_are_those_after_each_task(tmp_path: Path) -> None:
    """Of 8 features the first task has 55 %, the others 5 % each: 4, 5 and 5; every task's head reads its own."""
    path = write_toml(tmp_path, epochs=1)
    (found,) = run(Experiment.load(path, methods=["tfm"]), tmp_path)
    (widths,) = found.growth.values()
    assert widths == [4, 5, 5]
    heads = [2 * width + 2 for width in widths]
    assert found.parameters == [65 * width + sum(heads[: t + 1]) for t, width in enumerate(widths)]


class Looking(Method):
    """Keeps how cuDNN was set whenever it was asked to answer."""

    seen: ClassVar[set[tuple[bool, bool, bool]]] = set()

    def predictor(self, task: int) -> Predictor:
        """The answers are those of the base class."""
        plain = super().predictor(task)

        def answer(x: Tensor) -> Tensor:
            cudnn = torch.backends.cudnn
            self.seen.add((cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32))
            return plain(x)

        return answer


def test_logits_that_are_compared_come_from_one_algorithm(tmp_path: Path) -> None:
    """On a GPU cuDNN would otherwise try several, and round: logits of one network would differ."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    Looking.seen.clear()
    run(Experiment.load(own(tmp_path, "Looking"), methods=["own"]), tmp_path)
    assert (True, False, False) in Looking.seen
    assert (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32) == before != (True, False, False)
