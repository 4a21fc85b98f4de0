"""The search for learning rate and trade-off, on real digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.experiments.helpers import Exploding, Pulled, three_digits, tiny_net, write_toml
from zeroforget.experiments.experiment import Experiment, RunConfig
from zeroforget.experiments.folder import read_log
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.runner import run
from zeroforget.experiments.search import Search, SearchSettings, carried
from zeroforget.methods import Method, TaskSpec
from zeroforget.training import Diverged, Fit, FitLog, Regime, accuracy
from zeroforget.training.seeding import seeded

SCENARIO = three_digits(tasks=2, images=60)
REGIME = Regime(epochs=8, batch_size=16)


class Bench:
    """Learns tasks one after another, searching each time, and remembers the trials."""

    def __init__(self, method: type[Method] = Pulled, **options: object) -> None:
        with seeded("init", 0):
            self.method = method(tiny_net(SCENARIO.shape, width=16), SCENARIO.example(), **options)
        self.learned: list[str] = []

    def learn(self, index: int, settings: SearchSettings, start: float | None, file: Path | None = None) -> FitLog:
        task = SCENARIO.tasks[index]

        def learn(method: Method, lr: float, name: str) -> FitLog:
            self.learned.append(name)
            with seeded("learn", 0, index):
                return method.learn(task, Fit(Regime(**(vars(REGIME) | {"lr": lr}))))

        self.method, log = Search(self.method, task, learn, REGIME.lr, settings, start, file)()
        return log


def val(method: Method, index: int) -> float:
    task = SCENARIO.tasks[index]
    return accuracy(method.predictor(index), task.val, task.prepare)


@pytest.mark.parametrize("rates", [(1e-4, 0.1), (0.1, 1e-4)])
def test_the_first_task_searches_the_learning_rate_only_and_keeps_what_it_trained(rates: tuple[float, ...]) -> None:
    bench = Bench(strength=100.0, second=False)
    log = bench.learn(0, SearchSettings(True, rates), 100.0)
    assert bench.learned == [f"lr-{rate:g}" for rate in rates]
    found = log.notes["hyperparameters"]
    assert found["lr"] == 0.1
    assert found["option"] is None
    assert [t["accuracy"] for t in found["trials"]][rates.index(0.1)] == val(bench.method, 0) > 0.9


def test_the_trade_off_is_halved_until_the_task_is_learned_well_enough() -> None:
    bench = Bench(strength=1000.0, second=False)
    settings = SearchSettings(True, (0.02, 0.001), drop=0.05, halvings=20)
    bench.learn(0, settings, 1000.0)
    before = {n: t.clone() for n, t in bench.method.state_dict().items()}
    log = bench.learn(1, settings, 1000.0)
    found = log.notes["hyperparameters"]
    stability = [t for t in found["trials"] if t["name"].startswith("value")]
    # Halved each time, and stopped at the first that is good enough.
    assert [t["value"] for t in stability] == [1000.0 / 2**n for n in range(len(stability))]
    assert len(stability) > 1
    enough = 0.95 * found["finetuning"]
    assert all((t["accuracy"] or 0.0) < enough for t in stability[:-1])
    assert stability[-1]["accuracy"] >= enough
    # What is returned is the method as that trial left it.
    assert val(bench.method, 1) == stability[-1]["accuracy"]
    assert bench.method.strength == found["value"] == stability[-1]["value"]
    # Fine-tuning trials had no pull at all, and left nothing behind.
    assert [t["value"] for t in found["trials"] if t["name"].startswith("lr")] == [0.0, 0.0]
    assert torch.equal(bench.method.state_dict()["heads.0.weight"], before["heads.0.weight"])


def test_halving_ends_and_the_weakest_is_kept() -> None:
    bench = Bench(strength=1e3, second=False)
    settings = SearchSettings(True, (0.001,), drop=0.0, halvings=1)
    bench.learn(0, settings, 1e3)
    log = bench.learn(1, settings, 1e3)
    trials = [t["name"] for t in log.notes["hyperparameters"]["trials"]]
    assert trials[-1] in ("value-00", "value-01")
    assert len(trials) <= 3


def test_finished_trials_are_read_from_the_file(tmp_path: Path) -> None:
    settings = SearchSettings(True, (0.1, 0.01))
    first, second = Bench(second=False), Bench(second=False)
    log = first.learn(0, settings, 1.0, tmp_path / "search.json")
    again = second.learn(0, settings, 1.0, tmp_path / "search.json")
    chosen = log.notes["hyperparameters"]["lr"]
    assert second.learned == [f"lr-{chosen:g}"]  # only the chosen one is trained, to have it
    assert again.notes["hyperparameters"] == log.notes["hyperparameters"]
    for name, tensor in first.method.state_dict().items():
        assert torch.equal(tensor, second.method.state_dict()[name])


def test_learning_rates_that_diverge_are_passed_over_and_all_of_them_is_an_error() -> None:
    bench = Bench(Exploding)
    settings = SearchSettings(True, (1e30, 0.1))
    log = bench.learn(0, settings, None)
    assert [t["accuracy"] is None for t in log.notes["hyperparameters"]["trials"]] == [True, False]
    with pytest.raises(Diverged, match="loss became"):
        bench.learn(1, settings, None)
    assert len(bench.method.specs) == 1


def test_without_learning_rates_the_regimes_own_is_taken() -> None:
    bench = Bench(second=False)
    log = bench.learn(0, SearchSettings(True), 1.0)
    assert bench.learned == ["lr-0.05"]
    assert log.notes["hyperparameters"]["lr"] == REGIME.lr == 0.05


def test_a_run_searches_when_its_file_says_so(tmp_path: Path) -> None:
    more = "\n[search]\nenabled = true\nlearning_rates = [0.1, 0.01]\nhalvings = 3\n"
    experiment = Experiment.load(write_toml(tmp_path, tasks=2, more=more))
    results = run(experiment, tmp_path)
    for result, option in zip(results, (None, "strength"), strict=True):
        first, second = (log["notes"]["hyperparameters"] for log in result.logs)
        assert first["option"] is None
        assert second["option"] == option
    log = read_log(tmp_path / experiment.runs()[1].folder / "log.jsonl")
    trials = [event for event in log if event["event"] == "trial"]
    assert [t["name"] for t in trials if t["task"] == 0] == ["lr-0.1", "lr-0.01"]
    assert "value-00" in [t["name"] for t in trials if t["task"] == 1]


def test_a_search_in_one_task_serves_the_later_ones_too_even_after_a_kill(tmp_path: Path) -> None:
    """The trade-off found in task 2 is that of task 3; a run that was killed in between reads it from its folder."""
    more = "\n[search]\nenabled = true\nlearning_rates = [0.02, 0.001]\ntasks = [2]\ndivide = 10\ndrop = 0.05\n"
    experiment = Experiment.load(write_toml(tmp_path, tasks=3, more=more), changes=["pulled.strength=1000"])
    result = run(experiment, tmp_path / "whole")[1]
    first, second, third = (log["notes"] for log in result.logs)
    assert "hyperparameters" not in first
    assert "hyperparameters" not in third
    found = second["hyperparameters"]
    tried = [trial["value"] for trial in found["trials"]]
    assert tried == [0.0, 0.0, *(1000.0 / 10**k for k in range(len(tried) - 2))]
    assert len(tried) > 3

    class Killed(BaseException):
        pass

    class Killer(Observer):
        def task_done(self, config: RunConfig, record: dict[str, object]) -> None:
            if record["index"] == 1 and config.choice.label == "pulled":
                raise Killed

    with pytest.raises(Killed):
        run(experiment, tmp_path / "again", watch=Killer())
    again = run(experiment, tmp_path / "again")[1]
    assert again.accuracy == result.accuracy
    rates = [log["epochs"][0]["lr"] for log in again.logs]
    assert rates == [experiment.regime.lr, found["lr"], found["lr"]]


@pytest.mark.parametrize("wrong", [{"divide": 1.0}, {"tasks": (0,)}])
def test_settings_check_themselves(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="divide > 1 and tasks counted from 1"):
        SearchSettings(**wrong)  # type: ignore[arg-type]


class Elsewhere(Pulled):
    """Keeps its trade-off where the search does not look."""

    tradeoff = "firmness"


@pytest.mark.parametrize(
    ("figures", "tried", "lr", "value"),
    [
        (
            [0.9, 0.9, 0.9],
            ["lr-0.1", "lr-0.05", "value-00"],
            0.1,
            8.0,
        ),  # equals: the earlier rate, and enough
        ([0.8, 0.9, 0.1, 0.1, 0.1], ["lr-0.1", "lr-0.05", "value-00", "value-01", "value-02"], 0.05, 2.0),
    ],
)
def test_the_course_of_a_search_by_given_accuracies(
    figures: list[float], tried: list[str], lr: float, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def learn(method: Method, lr: float, name: str) -> FitLog:
        assert ("end_task" in vars(method)) == name.startswith("lr-")  # fine-tuning does nothing after training
        method.add_task(TaskSpec("more", 2))
        names.append(name)
        return FitLog()

    monkeypatch.setattr("zeroforget.experiments.search.accuracy", lambda *args, **kwargs: figures[len(names) - 1])
    method = Pulled(tiny_net(SCENARIO.shape), SCENARIO.example())
    method.add_task(TaskSpec("first", 2))
    search = Search(
        method, SCENARIO.tasks[1], learn, 0.1, SearchSettings(True, (0.1, 0.05), drop=0.0, halvings=2), start=8.0
    )
    _, log = search()
    assert names == tried
    assert (log.notes["hyperparameters"]["lr"], log.notes["hyperparameters"]["value"]) == (lr, value)
    assert log.notes["hyperparameters"]["finetuning"] == max(figures[:2])
    assert list(search._trained) == tried[-1:]  # one copy at a time


@pytest.mark.parametrize("tried", [["lr-0.1"], ["lr-0.1", "value-00", "value-01"]], ids=["rates", "values"])
def test_a_search_that_diverges_to_the_end_is_an_error(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    method = Pulled(tiny_net(SCENARIO.shape), SCENARIO.example())
    method.add_task(TaskSpec("first", 2))

    def learn(method: Method, lr: float, name: str) -> FitLog:
        names.append(name)
        if name[:2] == tried[-1][:2]:
            raise Diverged(f"loss became inf in {name}")
        method.add_task(TaskSpec("more", 2))
        return FitLog()

    monkeypatch.setattr("zeroforget.experiments.search.accuracy", lambda *args, **kwargs: 0.9)
    with pytest.raises(Diverged, match=f"in {tried[-1]}"):
        Search(method, SCENARIO.tasks[1], learn, 0.1, SearchSettings(True, halvings=1), start=8.0)()
    assert names == tried  # none of them twice


def test_a_search_read_from_its_file_leaves_the_trade_off_it_found(tmp_path: Path) -> None:
    settings = SearchSettings(True, (0.02,), drop=0.05, divide=10.0)
    found = []
    for _ in range(2):
        bench = Bench(strength=1000.0, second=False)
        for index in range(2):
            log = bench.learn(index, settings, 1000.0, tmp_path / f"{index}.json")
        found.append((bench.method.strength, log.notes["hyperparameters"]["value"], val(bench.method, 1)))
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] < 1000.0
    assert bench.learned == ["lr-0.02", log.notes["hyperparameters"]["trials"][-1]["name"]]


def test_what_was_found_last_is_carried_on() -> None:
    method = Pulled(tiny_net(SCENARIO.shape), SCENARIO.example(), strength=7.0)
    notes = [{"hyperparameters": {"lr": lr, "value": value}} for lr, value in ((0.3, 4.0), (0.2, 2.0))]
    assert carried(method, [*notes, {}], 0.1) == 0.2
    assert method.strength == 2.0


def test_a_trade_off_that_was_not_searched_is_not_carried_on() -> None:
    method = Pulled(tiny_net(SCENARIO.shape), SCENARIO.example(), strength=7.0)
    assert carried(method, [{"hyperparameters": {"lr": 0.3, "value": None}}, {}], 0.1) == 0.3
    assert method.strength == 7.0


def test_halvings_are_counted_from_none() -> None:
    with pytest.raises(ValueError, match="halvings >= 0"):
        SearchSettings(halvings=-1)
    assert SearchSettings(halvings=0).halvings == 0


def test_a_search_in_tasks_that_do_not_come_is_refused() -> None:
    for tasks in ((), (2,), (2, 9)):
        SearchSettings(enabled=True, tasks=tasks).check(3)
    SearchSettings(tasks=(9,)).check(3)
    with pytest.raises(ValueError, match=r"tasks are \[9\], but there are 3: nothing would be searched"):
        SearchSettings(enabled=True, tasks=(9,)).check(3)


def test_a_run_whose_search_would_find_nothing_is_refused_before_it_trains(tmp_path: Path) -> None:
    path = write_toml(tmp_path, epochs=1, more="[search]\nenabled = true\ntasks = [4]\n")
    with pytest.raises(ValueError, match="but there are 3"):
        run(Experiment.load(path, methods=["finetuning"]), tmp_path)
    assert not list(tmp_path.rglob("log.jsonl"))


def test_a_trade_off_that_the_method_does_not_keep_is_named_before_anything_is_trained() -> None:
    bench = Bench(Elsewhere)
    with pytest.raises(ValueError, match=r"Elsewhere\.tradeoff is 'firmness', but the method has no attribute"):
        bench.learn(0, SearchSettings(True), None)
    assert bench.learned == []
