"""A search that stops early decides as one that does not: by its logic for all curves, and on real data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroforget.data import Scenario, Split, Task, scenario
from zeroforget.growing.growth import smallest_within
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.growth_search import CHANCE, LUCK, QUIET, RECENT, STEADY, TOSSED, TREND, standing, turns
from zeroforget.methods.tfm import Candidate, Tfm
from zeroforget.nets import build
from zeroforget.progress import Epoch
from zeroforget.training import Fit, FitLog, Progress, Regime
from zeroforget.training.log import UNFINISHED
from zeroforget.training.seeding import generator, seeded

IMAGES = 50
Curve = list[tuple[float, float]]
"""Learning rate and accuracy of the weights kept, epoch by epoch."""


def log(curve: Curve, count: int) -> FitLog:
    """Each epoch is better than the one before by its loss, whatever its accuracy."""
    epochs = [Epoch(n, lr, 1.0, 1.0 / (n + 1), accuracy, 1.0) for n, (lr, accuracy) in enumerate(curve[:count])]
    return FitLog(epochs, count - 1, "ended" if count == len(curve) else "")


def race(curves: Sequence[Curve], margin: float) -> tuple[int, list[int]]:
    """What is chosen, and how many epochs each was trained."""
    seen = [0] * len(curves)
    while going := turns([standing(log(c, k), IMAGES) for c, k in zip(curves, seen, strict=True)], margin):
        for i in going:
            assert seen[i] < len(curves[i])
            seen[i] += 1
    ended = [i for i, c in enumerate(curves) if seen[i] == len(c)]
    return ended[smallest_within(ended, [curves[i][-1][1] for i in ended], margin)], seen


def bound(curve: Curve) -> float:
    """By how much the end may be above the last of these epochs: what docs/experiments.md says, one by one."""
    share, root = curve[-1][0] / max(lr for lr, _ in curve), math.sqrt(IMAGES)
    if share > 0.5 or len(curve) < 2:
        return 1.0
    steps = [abs(curve[k][1] - curve[k - 1][1]) for k in range(max(1, len(curve) - RECENT), len(curve))]
    tossed = math.fsum(steps) / len(steps)
    by_rate = share * (STEADY + CHANCE / root) + LUCK * tossed
    if len(curve) <= RECENT or curve[-1][0] != curve[-2][0]:
        return by_rate + 1 / IMAGES
    rose = max(0.0, curve[-1][1] - curve[-1 - RECENT][1])
    return min(by_rate, max(TOSSED * tossed + TREND * rose, QUIET / root)) + 1 / IMAGES


@st.composite
def curve(draw: st.DrawFn) -> Curve:
    """Any accuracies, as long as the assumptions hold: at a low rate the end is not far above."""
    rates = [0.1 / 3**k for k in sorted(draw(st.lists(st.integers(0, 5), min_size=1, max_size=2 * RECENT + 4)))]
    end = draw(st.integers(0, IMAGES)) / IMAGES
    made: Curve = []
    for lr in rates[:-1]:
        made.append((lr, draw(st.integers(0, IMAGES)) / IMAGES))
        if made[-1][1] < end - bound(made) - 1e-9:
            made[-1] = lr, end
    return [*made, (rates[-1], end)]


@given(st.lists(curve(), min_size=1, max_size=5), st.sampled_from([0.0, 0.001, 0.02, 0.1]))
def test_the_decision_is_that_of_training_everything(curves: list[Curve], margin: float) -> None:
    chosen, seen = race(curves, margin)
    assert chosen == smallest_within(range(len(curves)), [c[-1][1] for c in curves], margin)
    assert seen[chosen] == len(curves[chosen])


def flat(accuracy: float, epochs: int = 10, drops: int = 5) -> Curve:
    return [(0.1 / 3 ** max(0, drops + 1 + n - epochs), accuracy) for n in range(epochs)]


def test_nobody_beats_one_that_is_right_on_all_images() -> None:
    chosen, seen = race([flat(1.0, 12), flat(1.0), flat(1.0)], 0.015)
    assert (chosen, seen) == (0, [12, 1, 1])


def test_one_that_falls_behind_before_its_end_brings_the_others_back() -> None:
    falls = [*flat(1.0, 11)[:-1], (0.1 / 3**5, 0.8)]
    chosen, seen = race([falls, flat(1.0), flat(1.0)], 0.015)
    assert (chosen, seen) == (1, [11, 10, 1])


def test_one_that_is_far_behind_at_a_low_rate_is_stopped_when_another_has_ended() -> None:
    slow = [(0.1, 0.2)] * 4 + [(0.1 / 3**5, 0.2)] * 30
    chosen, seen = race([slow, flat(0.9)], 0.015)
    assert chosen == 1
    assert seen[0] < 12


def test_one_whose_accuracy_hardly_moves_is_stopped_at_a_rate_not_so_low() -> None:
    """By its rate alone the first might still come within the margin."""
    quiet = [(0.1, 0.5)] * 12 + [(0.1 / 3, 0.5)] * 60
    tossed = [(lr, accuracy + 0.05 * (n % 2)) for n, (lr, accuracy) in enumerate(quiet)]
    assert race([quiet, flat(0.7, 20)], 0.015) == (1, [14, 20])
    assert race([tossed, flat(0.7, 20)], 0.015) == (1, [72, 20])


def test_how_little_one_moves_tells_nothing_where_the_rate_falls_all_the_time() -> None:
    rising = [(0.1 * 0.97**n, 0.3 + 0.006 * n) for n in range(60)]
    assert race([rising, flat(0.66, 20)], 0.015) == (0, [60, 20])


def test_one_that_has_no_weights_to_keep_yet_may_come_to_anything() -> None:
    epochs = [Epoch(n, 0.1 / 3 ** (n > 5), 1.0, math.inf, 0.5, 1.0) for n in range(24)]
    assert standing(FitLog(epochs), 1000).high == 1.0


def test_at_a_high_rate_nothing_is_sure() -> None:
    late = [(0.1, 0.1)] * 20 + [(0.1, 0.9)]
    assert race([late, flat(0.9)], 0.015) == (0, [21, 10])


def test_one_that_cannot_matter_waits_while_others_still_may() -> None:
    """The second is bounded long before the third, which is still at a high rate."""
    second, third = [(0.1, 0.5)] + [(0.1 / 3**5, 0.5)] * 30, [(0.1, 0.3)] * 20 + [(0.1 / 3**5, 0.3)] * 30
    chosen, seen = race([flat(0.5, 12), second, third], 0.03)
    assert (chosen, seen) == (0, [12, 2, 21])


def test_whoever_stands_highest_ends_the_doubt_about_one_that_is_out_of_its_reach() -> None:
    """The first may come within the margin of the second, not of the third: the end of that one tells, and none of the
    others trains for it."""
    first, third = [(0.1, 0.485)] + [(0.1 / 3**4, 0.485)] * 90, [(0.1, 0.56)] + [(0.1 / 3**5, 0.56)] * 20
    chosen, seen = race([first, flat(0.545, 8), third, third], 0.04)
    assert chosen == 1
    assert seen == [2, 8, 21, 2]


# On real data -----------------------------------------------------------------------------------------------------


def few(task: Task, count: int) -> Task:
    """A task with a part of its images."""

    def part(split: Split, size: int) -> Split:
        rows = torch.randperm(len(split), generator=generator("few", task.name))[:size]
        return Split(split.images, split.labels[rows], rows if split.rows is None else split.rows[rows])

    return replace(task, train=part(task.train, count), val=part(task.val, count // 4), test=part(task.test, 50))


def searching(data: Scenario, net: str, seed: int, **options: object) -> Tfm:
    with seeded("net", seed):
        return Tfm(
            build(net, data.shape),
            data.example(),
            search_start=(0.2, 0.4, 0.6),
            search=(0.0, 0.05, 0.1, 0.2),
            **options,
        )


def compare(data: Scenario, net: str, regime: Regime, seed: int) -> tuple[int, int]:
    """Learn all tasks with and without pruning: the same growths and the same bits; returns the epochs of both."""
    pruned, full = searching(data, net, seed), searching(data, net, seed, prune=False)
    epochs = [0, 0]
    for index, task in enumerate(data.tasks):
        logs = []
        for learner in (pruned, full):
            with seeded("learn", seed, index):
                logs.append(learner.learn(task, Fit(regime, seed)))
        tables = [log.notes["search"] for log in logs]
        assert [row["chosen"] for row in tables[0]] == [row["chosen"] for row in tables[1]]
        assert all(row["ended"] for row in tables[1])
        epochs = [total + sum(row["epochs"] for row in table) for total, table in zip(epochs, tables, strict=True)]
    states = pruned.state_dict(), full.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    return epochs[0], epochs[1]


DIGITS = Regime(epochs=16, lr=0.1, patience=2, min_lr=0.003)


def test_digits_are_decided_alike_in_fewer_epochs() -> None:
    data = scenario("digits/5", seed=1)
    pruned, full = compare(replace(data, tasks=data.tasks[:3]), "small", DIGITS, 1)
    assert pruned < 0.75 * full


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["digits/5", "digits/2"])
def test_digits_are_decided_alike_for_many_seeds(name: str, seed: int) -> None:
    pruned, full = compare(scenario(name, seed=seed), "small", replace(DIGITS, patience=5, epochs=60), seed)
    assert pruned < full


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["fashion-mnist/5", "fashion-mnist/2"])
def test_clothes_are_decided_alike_in_the_papers_regime(name: str, seed: int) -> None:
    try:
        data = scenario(name, seed=seed)
    except ValueError:
        pytest.skip("fashion-mnist is not on this disk")
    part = replace(data, tasks=tuple(few(task, 1000) for task in data.tasks))
    pruned, full = compare(part, "lenet", Regime(), seed)
    assert pruned < full


def test_a_search_stopped_anywhere_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def learned(learner: Tfm, fit: Fit, index: int) -> FitLog:
        with seeded("learn", index):
            return learner.learn(data.tasks[index], fit)

    data = scenario("digits/5", seed=1)
    whole, cut = searching(data, "small", 0), searching(data, "small", 0)
    expected = [learned(whole, Fit(DIGITS), index) for index in range(2)]
    assert any(not row["ended"] for log in expected for row in log.notes["search"])
    for index, moments in enumerate([(0, 15), (3, 20)]):
        for moment in moments:
            heard = 0

            def stop(progress: Progress, moment: int = moment) -> None:
                nonlocal heard
                heard += progress.step == progress.steps
                if heard > moment:
                    raise Stop

            with pytest.raises(Stop):
                learned(cut, Fit(DIGITS, folder=tmp_path / str(index), progress=stop), index)
        log = learned(cut, Fit(DIGITS, folder=tmp_path / str(index)), index)
        assert [{**row, "seconds": 0} for row in log.notes["search"]] == [
            {**row, "seconds": 0} for row in expected[index].notes["search"]
        ]
    after = cut.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in whole.state_dict().items())


def test_whoever_gets_no_turn_is_not_trained() -> None:
    data = scenario("digits/5", seed=0)
    spec = TaskSpec("first", 2)
    trials = [searching(data, "small", 0).candidate(spec, Candidate(0.3), torch.get_rng_state()) for _ in range(2)]
    before = [{n: t.clone() for n, t in trial.moving().items()} for trial in trials]
    logs = Fit(Regime(epochs=2)).race(trials, data.tasks[0], 0, lambda logs: [] if logs[1].epochs else [1])
    assert [len(each.epochs) for each in logs] == [0, 1]
    assert [each.stopped for each in logs] == [UNFINISHED] * 2
    same = [
        all(torch.equal(t, old[n]) for n, t in trial.moving().items())
        for trial, old in zip(trials, before, strict=True)
    ]
    assert same == [True, False]
