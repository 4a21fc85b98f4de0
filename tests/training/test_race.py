"""Several learners side by side, an epoch at a time: whose turn it is, and what an interruption leaves of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.test_course import Even
from tests.training.test_fit import method, task
from zeroforget.methods import Method, TaskSpec
from zeroforget.methods.baselines import Finetuning
from zeroforget.training import Diverged, Fit, FitLog, Progress, Regime, feed
from zeroforget.training.checkpoint import Phases
from zeroforget.training.log import UNFINISHED
from zeroforget.training.seeding import seeded

REGIME = Regime(epochs=6, batch_size=27, keep="last")
Seen = list[tuple[int, int, str]]


class Wild(Finetuning):
    """Loses count in its second epoch."""

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        return super().loss(x, y, task) * (float("inf") if self.steps > 2 else 1.0)


def learner(cls: type = Finetuning) -> Method:
    made = method(cls)
    with seeded("head"):
        made.add_task(TaskSpec("t", 3))
    return made


def state(learner: Method) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.state_dict().items()}


def equal(learner: Method, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in learner.state_dict().items())


def noting(seen: list[Seen]) -> Callable[[list[FitLog]], list[int]]:
    """The first one always, the second every other time, the third no longer than two epochs."""

    def turns(logs: list[FitLog]) -> list[int]:
        seen.append([(len(log.epochs), log.best, log.stopped) for log in logs])
        return [0] + [1] * (len(seen) % 2) + [2] * (len(logs[2].epochs) < 2)

    return turns


def race(seen: list[Seen], **options: object) -> tuple[list[FitLog], list[Method]]:
    learners = [learner(Even) for _ in range(3)]
    return Fit(REGIME, **options).race(learners, task(), 0, noting(seen)), learners  # type: ignore[arg-type]


def test_who_has_a_turn_trains_an_epoch_until_none_is_left() -> None:
    seen: list[Seen] = []
    logs, learners = race(seen)
    assert [[epochs for epochs, _, _ in each] for each in seen] == [
        [0, 0, 0],
        [1, 1, 1],
        [2, 1, 2],
        [3, 2, 2],
        [4, 2, 2],
        [5, 3, 2],
        [6, 3, 2],
        [6, 4, 2],
    ]
    assert [log.stopped for log in logs] == ["all epochs done", UNFINISHED, UNFINISHED]
    assert seen[-1][0][2] == "all epochs done"
    assert not equal(learners[0], state(learners[2]))


@pytest.mark.parametrize("heard", [0, 1, 4, 20])
def test_a_race_stopped_anywhere_takes_the_same_course_to_the_same_bits(heard: int, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    left = heard

    def stop(progress: Progress) -> None:
        nonlocal left
        left -= progress.step == progress.steps
        if left < 0:
            raise Stop

    whole: list[Seen] = []
    logs, learners = race(whole)
    with pytest.raises(Stop):
        race([], folder=tmp_path, progress=stop)
    again: list[Seen] = []
    resumed, others = race(again, folder=tmp_path)
    assert again == whole
    assert [(len(log.epochs), log.best, log.stopped) for log in resumed] == [
        (len(log.epochs), log.best, log.stopped) for log in logs
    ]
    assert all(equal(one, state(other)) for one, other in zip(learners, others, strict=True))


def test_when_one_diverges_all_of_them_are_what_they_were() -> None:
    learners = [learner(), learner(Wild), learner()]
    before = [state(each) for each in learners]
    with pytest.raises(Diverged, match="epoch 2, step 1 of 2"):
        Fit(REGIME).race(learners, task(), 0)
    assert all(equal(each, old) for each, old in zip(learners, before, strict=True))


def test_ctrl_c_leaves_all_of_them_what_they_were() -> None:
    def stop(progress: Progress) -> None:
        if progress.epoch == 1:
            raise KeyboardInterrupt

    learners = [learner(), learner()]
    before = [state(each) for each in learners]
    with pytest.raises(KeyboardInterrupt):
        Fit(REGIME, progress=stop).race(learners, task(), 0)
    assert all(equal(each, old) for each, old in zip(learners, before, strict=True))


# Alone and together -----------------------------------------------------------------------------------------------


def dropping(width: int) -> Method:
    """A learner that draws in each step."""
    with seeded("net", width):
        net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 8))
        made = Finetuning(net, torch.zeros(2, 4))
        made.add_task(TaskSpec("t", 3))
    return made


@pytest.mark.parametrize("resident", [True, False])
def test_those_who_race_become_what_they_would_alone(resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not resident:
        monkeypatch.setattr(feed, "budget", lambda device: -1)
    regime, widths = Regime(epochs=3, batch_size=16), (8, 12, 20)
    together = [dropping(width) for width in widths]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    logs = Fit(regime).race(together, task(), 0)
    assert torch.equal(torch.get_rng_state(), before)
    for phase, (width, found, log) in enumerate(zip(widths, together, logs, strict=True)):
        alone = dropping(width)
        expected = Fit(regime, _phases=Phases({0: phase}))(alone, task(), 0)
        assert [(e.loss, e.val_loss) for e in log.epochs] == [(e.loss, e.val_loss) for e in expected.epochs]
        assert equal(found, state(alone))


@pytest.mark.parametrize("many", [1, 3])
def test_who_listens_hears_how_many_learn_side_by_side(many: int) -> None:
    heard: list[tuple[int, int]] = []
    fit = Fit(Regime(epochs=1, batch_size=16), progress=lambda p: heard.append((p.phase, p.abreast)))
    fit.race([dropping(8) for _ in range(many)], task(), 0)
    assert set(heard) == {(phase, many) for phase in range(many)}


@pytest.mark.parametrize("heard", [3, 10])
def test_a_race_that_is_stopped_leaves_all_what_they_were(heard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "budget", lambda device: -1)
    monkeypatch.setattr(feed, "SLOTS", 2)
    left = heard

    def stop(progress: Progress) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    learners = [dropping(8), dropping(12)]
    before = [state(each) for each in learners]
    draws = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt) as stopped:
        Fit(Regime(epochs=3, batch_size=16), progress=stop).race(learners, task(), 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("images")]
    assert stopped.tb is not None
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(equal(each, old) for each, old in zip(learners, before, strict=True))
