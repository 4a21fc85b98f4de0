"""Growth and rank together: chosen by bytes, exact, and what practitioners call an adapter when nothing grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.methods import helpers
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.lean import Lean
from zeroforget.proving.grow import grow
from zeroforget.training import Regime


def lean(name: str = "lean", **options: object) -> Lean:
    made = helpers.make(name, **options)
    assert isinstance(made, Lean)
    return made


def test_each_later_task_adds_growth_and_rank() -> None:
    method, (first, second, _) = lean(start=0.5, growth=0.25, rank=3), helpers.tasks()
    helpers.learn(method, first)
    widths = method.net.widths()
    log = helpers.learn(method, second)
    assert sum(method.net.widths().values()) > sum(widths.values())
    assert method.net.ranks(0) == {}
    assert method.net.ranks(1) == {"0.weight": 3, "5.weight": 3, "8.weight": 3}
    assert (log.notes["growth"], log.notes["rank"]) == (0.25, 3)
    assert method.overhead().inference > 16 * sum(w.newest_rank().up.numel() for w in method.net.leaning().values())  # type: ignore[union-attr]


def test_adapters_grow_by_nothing_and_lean_all_the_same() -> None:
    done = helpers.run("adapters")
    method = done.method
    assert isinstance(method, Lean)
    assert method.net.widths(0) == method.net.widths(2)
    assert all(len(method.net.ranks(task)) == 3 for task in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(done.logits[1], done.logits[2], strict=False))


def test_steps_learn_what_a_frozen_network_cannot() -> None:
    """The negative control: the same task without rank, without growth, is learned worse."""
    first, second, _ = helpers.tasks()
    found = {}
    for rank in (0, 8):
        method = lean("adapters", rank=rank)
        helpers.learn(method, first)
        log = helpers.learn(method, second)
        found[rank] = min(epoch.loss for epoch in log.epochs)
    assert found[8] < 0.8 * found[0]


def test_steps_start_where_the_tasks_own_images_are() -> None:
    first, second, third = helpers.tasks()
    starts = []
    for task, aim in ((second, 64), (second, 64), (third, 64), (second, 0)):
        method = lean(rank=2, aim=aim)
        helpers.learn(method, first)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            helpers.learn(method, task, regime=helpers.REGIME.__class__(epochs=1, lr=1e-9))
        birth = method.net.leaning()["5.weight"].newest_rank()
        assert birth is not None
        starts.append(birth.down.detach().clone())
    assert torch.equal(starts[0], starts[1])
    assert not torch.allclose(starts[0], starts[2], atol=1e-3)
    assert not torch.allclose(starts[0], starts[3], atol=1e-3)


def test_pairs_are_tried_by_their_bytes() -> None:
    pairs = [[0.3, 0], [0.0, 2], [0.1, 1], [0.0, 0]]
    method, (first, second, _) = lean(start=0.5, pairs=pairs, margin=0.5), helpers.tasks()
    helpers.learn(method, first)
    cost = method.net.added_bytes
    wanted = sorted(((growth, rank) for growth, rank in pairs), key=lambda pair: cost(*pair))
    log = helpers.learn(method, second)
    assert [(one["growth"], one.get("rank", 0)) for one in log.notes["search"]] == wanted
    assert (log.notes["growth"], log.notes.get("rank", 0)) == wanted[0]  # with such a margin the cheapest will do


@pytest.mark.parametrize("budget", [500, 4000, 20_000])
def test_a_budget_is_kept_and_used(budget: int) -> None:
    method, (first, second, _) = lean(start=0.4, budget=budget), helpers.tasks()
    helpers.learn(method, first)
    before = method.net.added_bytes
    tried = method.candidates()
    costs = [before(*candidate) for candidate in tried]
    assert all(cost <= budget for cost in costs)
    assert any(candidate.rank and not candidate.growth for candidate in tried)
    assert any(candidate.growth and not candidate.rank for candidate in tried) or before(0.001) > budget
    log = helpers.learn(method, second)
    accuracies = [one["val_accuracy"] for one in log.notes["search"]]
    chosen = next(one for one in log.notes["search"] if one["chosen"])
    assert chosen["val_accuracy"] == max(accuracies)


def test_bytes_are_those_that_a_task_adds() -> None:
    net = grow(helpers.plain_net(), helpers.EXAMPLE, start=0.5, fn="none")
    net.add_task("first", 2)
    for growth, rank in ((0.2, 0), (0.0, 4), (0.1, 3)):
        told = net.added_bytes(growth, rank)
        net.add_task("more", 2, growth, rank)
        steps = [birth for w in net.leaning().values() if (birth := w.newest_rank()) is not None]
        parameters = sum(t.numel() for tensor in net.tensors() for t in (tensor.rows, tensor.cols) if t is not None)
        assert told == 4 * parameters + 2 * sum(birth.up.numel() + birth.down.numel() for birth in steps)
        net.drop_task()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(aim=-1), "aim is a number of images"),
        (dict(pairs=[[0.1]]), "pairs are of a growth and a rank"),
        (dict(pairs=[[0.1, 1.5]]), "a rank is a whole number of directions"),
        (dict(budget=0), "budget is the bytes"),
        (dict(rank=-2), "a rank is a whole number of directions"),
        (dict(budget=100, search=[0.1]), "search and budget each say what to try"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lean(**options)


def test_a_whole_rank_that_was_read_as_a_float_is_that_number() -> None:
    """An experiment's file says rank = 16, and options of type float are read as floats."""
    rank = lean(rank=2.0).rank
    assert rank == 2
    assert isinstance(rank, int)


def test_options_of_tfm_are_options_of_lean() -> None:
    assert lean(fn="none", align=2, early=0.9).net.fn == "none"
    with pytest.raises(ValueError, match="no option 'frank'"):
        lean(frank=1)


def test_structure_is_replayed_with_its_ranks() -> None:
    method, (first, second, _) = lean(rank=2), helpers.tasks()
    helpers.learn(method, first)
    helpers.learn(method, second)
    again = lean(rank=5)
    again.replay(method.structure())
    assert again.net.ranks() == method.net.ranks()
    again.drop_task()
    again.add_task(TaskSpec("other", 2))
    assert set(again.net.ranks().values()) == {5}


@pytest.mark.parametrize("pairs", [(), ((0.1, 2), (0.25, 0))])
def test_a_rate_of_its_own_is_adams_for_every_task(
    pairs: tuple[tuple[float, float], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = Regime.make_optimizer, list[tuple[str, float]]()

    def noted(regime: Regime, *given: Any, **more: Any) -> torch.optim.Optimizer:
        seen.append((regime.optimizer, regime.lr))
        return made(regime, *given, **more)

    monkeypatch.setattr(Regime, "make_optimizer", noted)
    method = lean(rank=3, lr=0.003, pairs=pairs)
    for task in helpers.tasks()[:2]:
        helpers.learn(method, task, regime=Regime(epochs=1))
    assert set(seen) == {("adam", 0.003)}
    assert len(seen) == 1 + max(1, len(pairs))


def test_a_rate_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        lean(lr=0.0)
