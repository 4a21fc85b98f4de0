"""TFM as a method: its schedule, its growth search, and what it reports."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.operators.kernel_twins import rectified
from zeroforget.axes.find import CannotGrow
from zeroforget.data import Scenario, scenario
from zeroforget.growing.network import GrowingNetwork
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.growth_search import Standing, standing
from zeroforget.methods.registry import build as build_method
from zeroforget.methods.registry import names
from zeroforget.methods.tfm import Candidate, Tfm
from zeroforget.nets import build
from zeroforget.operators import quick_layers as quick
from zeroforget.operators.quick_layers import Quick
from zeroforget.training import Diverged, Fit, FitLog, Progress, Regime, logits
from zeroforget.training.seeding import seeded

FEW = Regime(epochs=3)


@pytest.fixture(scope="module")
def digits() -> Scenario:
    return scenario("digits/5", seed=0)


def method(name: str = "tfm", **options: object) -> Tfm:
    with seeded("net"):
        made = build_method(name, build("small", (1, 8, 8)), torch.randn(2, 1, 8, 8), **options)
    assert isinstance(made, Tfm)
    return made


EXAMPLE = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Regime:
    """A regime for a GPU, whether there is one or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    regime = Regime(device="cuda")
    monkeypatch.undo()
    return regime


def test_both_names_are_found_and_differ_in_normalization(digits: Scenario) -> None:
    assert {"tfm", "tfm-nofn"} <= set(names())
    for name, has in [("tfm", True), ("tfm-nofn", False)]:
        learner = method(name)
        for task in digits.tasks[:2]:
            learner.learn(task, Fit(Regime(epochs=1)))
        assert any(".norms.1." in n for n, _ in learner.named_parameters()) == has


class Reader(nn.Module):
    """Reads pictures line by line; nothing can be told of what projected recurrent layers do with features."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.last = nn.LSTM(8, 12, batch_first=True, proj_size=10), nn.Linear(10, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.last(self.lines(x.flatten(1, 2))[0][:, -1]))


def test_what_a_refusal_advises_are_options(digits: Scenario) -> None:
    x = torch.randn(4, 1, 8, 8)
    with pytest.raises(CannotGrow, match=r"keep=\['lines'\].*unknown=\"keep\""):
        build_method("tfm", Reader(), x)
    with pytest.warns(UserWarning, match="these layers keep their width"):
        learner = build_method("tfm", Reader(), x, unknown="keep")
    other = build_method("tfm", Reader(), x, keep=["lines"])
    assert isinstance(learner, Tfm)
    assert isinstance(other, Tfm)
    assert set(learner.net.axes.sizes) == set(other.net.axes.sizes) == {"last"}
    learner.learn(digits.tasks[0], Fit(FEW))
    before = learner.predictor(0)(x)
    learner.learn(digits.tasks[1], Fit(FEW))
    assert torch.equal(learner.predictor(0)(x), before)


def test_a_network_in_which_nothing_can_grow_learns_heads(digits: Scenario) -> None:
    x = torch.randn(4, 1, 8, 8)
    with pytest.raises(ValueError, match="pass start=1"):
        build_method("tfm", Reader(), x, keep=["lines", "last"])
    learner = build_method("tfm", Reader(), x, keep=["lines", "last"], start=1.0)
    learner.learn(digits.tasks[0], Fit(FEW))
    before = learner.predictor(0)(x)
    learner.learn(digits.tasks[1], Fit(FEW))
    assert torch.equal(learner.predictor(0)(x), before)


def test_the_schedule_grows_until_the_network_is_full(digits: Scenario) -> None:
    learner = method(start=0.6, growth=0.25)
    for task in digits.tasks[:4]:
        log = learner.learn(task, Fit(Regime(epochs=1)))
    growths = [record.growth for record in learner.net.history]
    assert growths == pytest.approx([0.6, 0.25, 0.15, 0.0])
    assert learner.net.widths() == dict(learner.net.axes.sizes)
    assert log.notes["growth"] == pytest.approx(0.0)


def test_a_schedule_in_steps_smaller_than_a_feature_is_followed_without_a_word() -> None:
    learner = method(start=0.45, growth=0.01, align=8)
    widths = []
    for task in range(9):  # warnings are errors here
        learner.add_task(TaskSpec(f"task {task}", 2))
        widths.append(learner.net.widths())
    again = method(start=0.45, growth=0.01, align=8)
    again.replay(json.loads(json.dumps(learner.structure())))
    assert widths[1] == widths[0] != widths[-1] == again.net.widths()


def test_widths_that_are_left_open_are_as_the_device_likes_them(digits: Scenario, on_gpu: Regime) -> None:
    assert Tfm.settled({"align": None, "fn": "all"}, Regime()) == {"align": 1, "fn": "all"}
    assert Tfm.settled({"align": None}, on_gpu) == {"align": 8}
    assert Tfm.settled({"align": 1}, on_gpu) == {"align": 1}
    learner = method(start=0.45)
    learner.learn(digits.tasks[0], Fit(Regime(epochs=1)))
    assert [entry["align"] for entry in learner.structure()] == [1]
    assert any(width % 8 for width in learner.net.widths().values())


def test_structure_that_was_learned_on_a_gpu_is_replayed_anywhere() -> None:
    there, here = method(start=0.45, align=8), method(start=0.45)
    there.add_task(TaskSpec("a", 2))
    here.replay(json.loads(json.dumps(there.structure())))
    there.add_task(TaskSpec("b", 2))
    here.add_task(TaskSpec("b", 2))
    assert here.net.widths() == there.net.widths()
    assert not any(width % 8 for width in here.net.widths().values())
    older = method(start=0.45)  # that did not say: widths were multiples of 1, unless the option said otherwise
    older.replay([{"name": "a", "classes": 2, "growth": 0.45}])
    older.add_task(TaskSpec("b", 2))
    plain = method(start=0.45, align=1)
    plain.add_task(TaskSpec("a", 2)), plain.add_task(TaskSpec("b", 2))
    assert older.net.widths("a") == plain.net.widths("a") != there.net.widths("a")
    assert older.net.widths() == plain.net.widths()


def test_a_network_that_grows_already_is_taken_with_its_tasks(digits: Scenario) -> None:
    first = method(start=0.4, align=4)
    first.learn(digits.tasks[0], Fit(FEW))
    before = first.predictor(0)(EXAMPLE)
    second = Tfm(first.net, EXAMPLE, growth=0.3)
    assert second.net is first.net
    assert [spec.name for spec in second.specs] == [digits.tasks[0].name]
    second.learn(digits.tasks[1], Fit(FEW))
    assert second.structure()[1]["growth"] == 0.3
    assert second.structure()[1]["align"] == 4
    assert torch.equal(second.predictor(0)(EXAMPLE), before)


def test_a_first_task_that_fails_leaves_a_network_that_can_learn_it(digits: Scenario) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    learner, whole = method(start=0.4), method(start=0.4)
    draws = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        learner.learn(digits.tasks[0], Fit(FEW, progress=stop))
    assert not learner.specs
    assert not learner.net.history
    for each in (learner, whole):
        torch.set_rng_state(draws)
        each.learn(digits.tasks[0], Fit(FEW))
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in learner.state_dict().items())


def test_early_layers_may_start_wider(digits: Scenario) -> None:
    learner = method(start=0.25, growth=0.25, early=0.75)
    full = learner.net.axes.sizes
    first, second = digits.tasks[:2]
    learner.learn(first, Fit(FEW))
    shares = [learner.net.widths()[axis] / full[axis] for axis in full]
    assert shares == pytest.approx([0.75, 0.5, 0.25], abs=0.03)
    before = logits(learner.predictor(0), first.test, first.prepare)
    learner.learn(second, Fit(FEW))
    shares = [learner.net.widths()[axis] / full[axis] for axis in full]
    assert shares == pytest.approx([0.83, 0.67, 0.5], abs=0.03)  # a third of what each has left, as of the last
    assert torch.equal(logits(learner.predictor(0), first.test, first.prepare), before)

    again = method(start=0.25, growth=0.25, early=0.75)
    again.replay(json.loads(json.dumps(learner.structure())))
    again.load_state_dict(learner.state_dict())
    assert again.net.widths() == learner.net.widths()
    assert torch.equal(logits(again.predictor(0), first.test, first.prepare), before)


@pytest.mark.parametrize("align", [1, 4])
def test_every_task_finds_room_and_the_last_one_fills_the_network(align: int) -> None:
    learner = method(start=0.4, growth=0.15, early=0.6, align=align)
    full = learner.net.axes.sizes
    births = dict.fromkeys(full, 0)
    for task in range(5):
        before = learner.net.widths()
        learner.add_task(TaskSpec(f"task {task}", 2))
        for axis, width in learner.net.widths().items():
            births[axis] += width > before[axis]
        assert (learner.net.widths() == dict(full)) == (task == 4)
    if align == 1:
        assert set(births.values()) == {5}
    assert learner.net.left() == pytest.approx(0.0)
    learner.add_task(TaskSpec("one more", 2))
    assert learner.net.widths() == dict(full)


def test_how_a_network_grows_is_told_by_the_options() -> None:
    def grown(**options: object) -> Tfm:
        learner = method(start=0.3, growth=0.3, **options)
        for name in "ab":
            learner.add_task(TaskSpec(name, 2))
        return learner

    plain, aligned, weighed, bridged = grown(), grown(align=8), grown(unit="weights"), grown(bridge="random")
    assert any(width % 8 for width in plain.net.widths().values())
    assert not any(width % 8 for width in aligned.net.widths().values())
    assert all(weighed.net.widths()[axis] > width for axis, width in plain.net.widths().items())
    assert bridged.net.widths() == plain.net.widths()
    zeros = [sum(int((p == 0).sum()) for p in each.net.body.parameters() if p.dim() > 1) for each in (plain, bridged)]
    assert zeros[0] > zeros[1] == 0


def test_early_layers_in_a_search_of_the_first_task(digits: Scenario) -> None:
    learner = method(search_start=[0.25, 0.5], early=1.0, margin=1.0)
    log = learner.learn(digits.tasks[0], Fit(Regime(epochs=1)))
    assert log.notes["growth"] == 0.25
    widths = learner.net.widths()
    assert [widths[axis] / size for axis, size in learner.net.axes.sizes.items()] == pytest.approx(
        [1.0, 0.625, 0.25], abs=0.03
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [(dict(early=0.0), "above 0"), (dict(early=1.5), "at most 1"), (dict(early=0.5, unit="weights"), "unit must be")],
)
def test_what_early_may_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method(**options)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("start", 0.0, "above 0"),
        ("start", 1.1, "at most 1"),
        ("search_start", [0.5, -0.1], "above 0"),
        ("search_start", [float("nan")], "above 0"),
        ("growth", -0.01, "0 or more"),
        ("search", [0.05, -0.2], "0 or more"),
        ("margin", -0.01, "0 or more"),
        ("margin", float("nan"), "0 or more"),
    ],
)
def test_shares_that_make_no_sense_are_refused(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"{option}.*{message}"):
        method(**{option: value})


class Silent(nn.Module):
    """Answers with NaN wherever it is asked outside of training, while it is wider than a bound."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.layer, self.bound = nn.Linear(64, 20), bound

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features)"""
        h = torch.relu(self.layer(x.flatten(1)))
        silent = not self.training and torch.is_grad_enabled() is False and x.shape[0] > 2 and h.shape[1] > self.bound
        return h * torch.nan if silent else h


@pytest.mark.parametrize("options", [{}, {"search": [0.2, 0.4]}])
def test_a_validation_loss_that_is_never_a_number_is_told_and_leaves_all_as_it_was(
    digits: Scenario, options: dict[str, object]
) -> None:
    learner = Tfm(Silent(bound=10), torch.randn(2, 1, 8, 8), start=0.5, growth=0.2, **options)  # type: ignore[arg-type]
    first, second = digits.tasks[:2]
    learner.learn(first, Fit(Regime(epochs=1)))
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    with pytest.raises(Diverged, match=f"{second.name}.*never a number.*lower lr.*unchanged"):
        learner.learn(second, Fit(Regime(epochs=1)))
    assert len(learner.specs) == len(learner.net.history) == 1
    after = learner.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with pytest.raises(Diverged, match=first.name):
        Tfm(Silent(bound=0), torch.randn(2, 1, 8, 8)).learn(first, Fit(Regime(epochs=1)))


@pytest.mark.parametrize(("precision", "advice"), [("float32", False), ("bf16", True)])
def test_full_precision_is_advised_where_it_was_not_asked_for(digits: Scenario, precision: str, advice: bool) -> None:
    with pytest.raises(Diverged, match="never a number") as caught:
        Tfm(Silent(bound=0), torch.randn(2, 1, 8, 8)).learn(digits.tasks[0], Fit(Regime(epochs=1, precision=precision)))
    assert ("precision='float32'" in str(caught.value)) == advice


@pytest.mark.parametrize("prune", [True, False])
def test_a_candidate_that_never_answers_with_numbers_is_not_chosen(digits: Scenario, prune: bool) -> None:
    learner = Tfm(Silent(bound=15), torch.randn(2, 1, 8, 8), search_start=[0.5, 0.6, 0.9], margin=1.0, prune=prune)
    log = learner.learn(digits.tasks[0], Fit(Regime(epochs=1)))
    assert log.notes["growth"] == 0.5


def test_the_search_keeps_the_smallest_growth_within_the_margin(digits: Scenario) -> None:
    learner = method(search=[0.3, 0.05, 0.1], margin=1.0)
    learner.learn(digits.tasks[0], Fit(FEW))
    log = learner.learn(digits.tasks[1], Fit(FEW))
    table = log.notes["search"]
    assert [row["growth"] for row in table] == [0.05, 0.1, 0.3]
    assert [row["chosen"] for row in table] == [True, False, False]
    assert learner.net.history[1].growth == 0.05

    strict = method(search=[0.05, 0.1, 0.3], margin=0.0)
    strict.learn(digits.tasks[0], Fit(FEW))
    log = strict.learn(digits.tasks[1], Fit(FEW))
    best = max(row["val_accuracy"] for row in log.notes["search"])
    chosen = next(row for row in log.notes["search"] if row["chosen"])
    assert chosen["val_accuracy"] == best
    assert all(row["growth"] >= chosen["growth"] for row in log.notes["search"] if row["val_accuracy"] == best)
    assert log.val_accuracy == best


@pytest.mark.parametrize(("prune", "epochs"), [(True, [3, 0]), (False, [3, 3])])
def test_candidates_wait_that_the_margin_makes_needless(digits: Scenario, prune: bool, epochs: list[int]) -> None:
    """Whatever the second one reached, the first and smaller is within a margin of 1; growths are tried once each."""
    learner = method(search_start=[0.5, 0.25, 0.5], margin=1.0, prune=prune)
    log = learner.learn(digits.tasks[0], Fit(FEW))
    assert [row["growth"] for row in log.notes["search"]] == [0.25, 0.5]
    assert [row["epochs"] for row in log.notes["search"]] == epochs
    assert log.notes["growth"] == 0.25


def test_candidates_are_judged_by_the_number_of_validation_images(
    digits: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    images: set[int] = set()

    def noting(log: FitLog, count: int) -> Standing:
        images.add(count)
        return standing(log, count)

    monkeypatch.setattr("zeroforget.methods.tfm.standing", noting)
    method(search_start=[0.25, 0.5]).learn(digits.tasks[0], Fit(Regime(epochs=1)))
    assert images == {len(digits.tasks[0].val)}


def test_every_candidate_starts_from_the_same_draws_and_is_a_copy() -> None:
    learner, draws = method(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    first, other, again = (
        learner.candidate(TaskSpec("a", 2), Candidate(share), draws).state_dict() for share in (0.5, 0.7, 0.5)
    )
    assert first.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert any(other[name].shape != tensor.shape for name, tensor in first.items() if name in other)
    assert not learner.specs
    assert learner.state_dict().keys() == before.keys()


def test_one_that_has_no_rival_trains_in_place(digits: Scenario) -> None:
    """Where there is nothing to choose, nothing is copied and nothing races, and the bits are the same."""
    alone, scheduled = method(search=[0.2]), method(growth=0.2)
    nets = alone.net, scheduled.net
    for learner in (alone, scheduled):
        for task in digits.tasks[:2]:
            with seeded("drawn", task.name):
                log = learner.learn(task, Fit(Regime(epochs=1)))
            assert "search" not in log.notes
    assert (alone.net, scheduled.net) == nets
    assert alone.net.fingerprint(0) == scheduled.net.fingerprint(0)
    assert alone.net.fingerprint(1) == scheduled.net.fingerprint(1)


def test_the_search_keeps_the_trained_weights_of_the_winner(digits: Scenario) -> None:
    searched = method(search=[0.05, 0.2], margin=1.0)
    single = method(growth=0.05)
    for learner in (searched, single):
        for index, task in enumerate(digits.tasks[:2]):
            with seeded("learn", index):
                learner.learn(task, Fit(FEW))
    # Both trained the growth of 0.05 as the first phase of the task, from the same draws: the same bits.
    task = digits.tasks[1]
    a, b = (logits(learner.predictor(1), task.test, task.prepare) for learner in (searched, single))
    assert torch.equal(a, b)


def test_old_logits_survive_a_search(digits: Scenario) -> None:
    learner = method(search=[0.05, 0.2], search_start=[0.4, 0.6])
    first = digits.tasks[0]
    log = learner.learn(first, Fit(FEW))
    assert len(log.notes["search"]) == 2
    before = logits(learner.predictor(0), first.test, first.prepare)
    for task in digits.tasks[1:3]:
        learner.learn(task, Fit(FEW))
        assert torch.equal(logits(learner.predictor(0), first.test, first.prepare), before)


def test_a_search_interrupted_between_candidates_resumes_with_the_same_bits(digits: Scenario, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.phase == 1 and progress.epoch == 1:
            raise Stop

    whole, broken = method(search=[0.05, 0.2]), method(search=[0.05, 0.2])
    for learner in (whole, broken):
        with seeded("learn", 0):
            learner.learn(digits.tasks[0], Fit(FEW))
    with seeded("learn", 1):
        whole.learn(digits.tasks[1], Fit(FEW))
    with seeded("learn", 1), pytest.raises(Stop):
        broken.learn(digits.tasks[1], Fit(FEW, folder=tmp_path, progress=stop))
    assert len(broken.specs) == len(broken.net.history) == 1
    with seeded("learn", 1):
        broken.learn(digits.tasks[1], Fit(FEW, folder=tmp_path))
    after = broken.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in whole.state_dict().items())


def test_structure_is_told_and_replayed(digits: Scenario) -> None:
    learner = method(search=[0.05, 0.2], margin=0.0)
    for task in digits.tasks[:3]:
        learner.learn(task, Fit(Regime(epochs=1)))
    fresh = method(search=[0.05, 0.2], margin=0.0)
    fresh.replay(learner.structure())
    fresh.load_state_dict(learner.state_dict())
    for k, task in enumerate(digits.tasks[:3]):
        a, b = (logits(m.predictor(k), task.test, task.prepare) for m in (learner, fresh))
        assert torch.equal(a, b)


def test_overhead_is_what_the_network_holds(digits: Scenario) -> None:
    learner = method()
    for task in digits.tasks[:3]:
        learner.learn(task, Fit(Regime(epochs=1)))
    assert isinstance(learner.net, GrowingNetwork)
    assert learner.overhead().inference == learner.net.overhead().total
    floats = sum(t.numel() for n, t in learner.net.state_dict().items() if ".norms." in n)
    masks = 3 * sum(-(-w // 4) for w in learner.net.widths().values())
    assert learner.overhead().inference == 32 * floats + 8 * masks


def test_rectifiers_behind_normalization_are_found_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a recorded step on a GPU runs them; here by the kernels' twins."""
    torch.manual_seed(0)
    example = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    net = build("vgg16-tiny", (3, 32, 32), width=0.1, norm="batch", dropout=0.0).double()
    learner = build_method("tfm", net, example, start=0.5, growth=0.2)
    monkeypatch.setattr(quick, "fits", lambda x: x.dim() == 4)
    for name in ("a", "b"):
        learner.add_task(TaskSpec(name, 3))
        learner.train()
        task, y = len(learner.specs) - 1, torch.tensor([0, 1, 2, 0])
        found = rectified(learner, example, task)
        assert len(found) == 10
        losses = []
        for context in (nullcontext(), Quick(found)):
            learner.zero_grad()
            with context:
                loss = learner.loss(example, y, task)
            loss.backward()
            losses.append([loss.detach(), *(p.grad.clone() for p in learner.trainable() if p.grad is not None)])
        torch.testing.assert_close(losses[1], losses[0])
        assert len(losses[0]) > 20
        learner.zero_grad()
