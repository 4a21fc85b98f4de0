"""The training loop: the regime as the paper has it, resuming, stopping on NaN, and leaving no half-trained weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zeroforget.data import Preparation, Split, Task, scenario
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.baselines import Finetuning
from zeroforget.methods.tfm import Tfm
from zeroforget.training import Diverged, Fit, Progress, Regime, accuracy
from zeroforget.training.seeding import seeded


def task(name: str = "t", scale: float = 1.0, seed: int = 0) -> Task:
    """Three classes of points around three centres."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(90) % 3
    x = torch.randn(90, 4, generator=draw) + 2.0 * nn.functional.one_hot(y, 4)
    parts = [Split(x * scale, y[i], i) for i in torch.arange(90).split([54, 18, 18])]
    return Task(name, ("a", "b", "c"), parts[0], parts[1], parts[2], Preparation((0.0,) * 4, (1.0,) * 4))


def method(cls: type = Finetuning, **options: object) -> Finetuning | Tfm:
    with seeded("net"):
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU())
        made: Finetuning | Tfm = cls(net, torch.randn(2, 4), **options)
    return made


class Scripted(Finetuning):
    """Validation losses are given, so that the schedule can be read off."""

    script: list[float]

    def score(self, predictor: object, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_left"):
            self._left = iter(self.script)
        return torch.full((len(x),), next(self._left)), torch.zeros(len(x))


def test_the_rate_is_divided_after_five_epochs_without_a_better_loss_and_training_ends_below_the_bound() -> None:
    learner = method(Scripted)
    assert isinstance(learner, Scripted)
    learner.script = [3.0, 2.0] + [2.5] * 100
    log = learner.learn(task(), Fit(Regime(lr=0.05, patience=5, decay=3.0, min_lr=1e-3)))
    rates = [e.lr for e in log.epochs]
    assert rates[:7] == [0.05] * 7
    assert rates[7:12] == pytest.approx([0.05 / 3] * 5)
    assert min(rates) >= 1e-3
    assert log.stopped == "learning rate below its bound"
    assert len(rates) == 7 + 5 * 3  # 0.05/3, 0.05/9, 0.05/27; 0.05/81 is below the bound
    assert log.best == 1


def test_a_rate_that_begins_below_the_bound_trains_until_validation_stops_getting_better() -> None:
    learner = method(Scripted)
    assert isinstance(learner, Scripted)
    learner.script = [3.0, 2.0, 1.0] + [2.5] * 100
    log = learner.learn(task(), Fit(Regime(lr=1e-5, patience=5, min_lr=1e-4)))
    assert [e.lr for e in log.epochs] == [1e-5] * 8
    assert log.stopped == "learning rate below its bound"


def test_the_weights_of_the_best_validation_loss_come_back() -> None:
    kept: list[dict[str, Tensor]] = []

    class Watching(Scripted):
        def score(self, predictor: object, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]:
            kept.append({k: v.clone() for k, v in self.state_dict().items()})
            return super().score(predictor, x, y, task)

    learner = method(Watching)
    assert isinstance(learner, Watching)
    learner.script = [3.0, 1.0, 2.0, 4.0]
    log = learner.learn(task(), Fit(Regime(epochs=4)))
    assert log.stopped == "all epochs done"
    assert log.best == 1
    assert all(torch.equal(v, kept[1][k]) for k, v in learner.state_dict().items())
    assert not all(torch.equal(v, kept[3][k]) for k, v in learner.state_dict().items())


def test_same_seed_same_bits_and_another_seed_other_bits() -> None:
    states = []
    for seed in (0, 0, 1):
        learner = method()
        with seeded("learn"):
            learner.learn(task(), Fit(Regime(epochs=3), seed=seed))
        states.append(learner.state_dict())
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())
    assert not all(torch.equal(v, states[2][k]) for k, v in states[0].items())


def test_training_leaves_the_global_random_state_alone() -> None:
    learner = method()
    learner.add_task(__import__("zeroforget.methods.base", fromlist=["TaskSpec"]).TaskSpec("t", 3))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    Fit(Regime(epochs=1))(learner, task(), 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "rmsprop", "Adagrad"])
def test_any_optimizer_learns(optimizer: str) -> None:
    learner = method()
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    data = task()
    learner.learn(data, Fit(Regime(optimizer=optimizer, lr=0.02, epochs=60, options=options, clip=5.0)))
    assert accuracy(learner.predictor(0), data.test, data.prepare) > 0.6


@pytest.mark.parametrize("cls", [Finetuning, Tfm])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_interrupted_and_resumed_ends_with_the_same_bits(tmp_path: Path, cls: type, optimizer: str) -> None:
    regime = Regime(optimizer=optimizer, lr=0.02, epochs=6, options={"weight_decay": 0.01})

    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.epoch == 3 and progress.index == 1 and progress.step == 1:
            raise Stop

    whole, broken = method(cls), method(cls)
    for index in range(2):
        with seeded("learn", index):
            whole.learn(task(str(index), seed=index), Fit(regime, seed=4))
    with seeded("learn", 0):
        broken.learn(task("0"), Fit(regime, seed=4))
    state = {k: v.clone() for k, v in broken.state_dict().items()}
    with seeded("learn", 1), pytest.raises(Stop):
        broken.learn(task("1", seed=1), Fit(regime, seed=4, folder=tmp_path, progress=stop))
    assert all(torch.equal(v, state[k]) for k, v in broken.state_dict().items())  # as before the interrupted task
    with seeded("learn", 1):
        log = broken.learn(task("1", seed=1), Fit(regime, seed=4, folder=tmp_path))
    assert len(log.epochs) == 6
    after = broken.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in whole.state_dict().items())
    with seeded("learn", 2):  # a finished phase is not trained again
        again = method(cls)
        again.learn(task("0"), Fit(regime, seed=4))


@pytest.mark.parametrize("cls", [Finetuning, Tfm])
@pytest.mark.parametrize("first", [True, False])
def test_divergence_says_what_when_and_what_to_try_and_changes_nothing(cls: type, first: bool) -> None:
    learner = method(cls)
    if not first:
        learner.learn(task("good"), Fit(Regime(epochs=2)))
    state = {k: v.clone() for k, v in learner.state_dict().items()}
    with pytest.raises(Diverged, match=r"task 'wild'.*epoch \d+, step \d+ of .*lower lr, clip=1.0"):
        learner.learn(task("wild", scale=1e20), Fit(Regime(lr=1e10, epochs=3)))
    after = learner.state_dict()
    assert state.keys() == after.keys()
    assert all(torch.equal(v, after[k]) for k, v in state.items())
    assert len(learner.specs) == (0 if first else 1)
    log = learner.learn(task("next"), Fit(Regime(epochs=2)))
    assert math.isfinite(log.epochs[-1].loss)


@pytest.mark.parametrize("schedule", ["patience", "cosine"])
def test_the_last_weights_are_not_kept_if_the_last_step_ruined_them(schedule: str) -> None:
    learner = method()
    state = {k: v.clone() for k, v in learner.state_dict().items()}
    regime = Regime(lr=1e30, epochs=1, batch_size=54, schedule=schedule, keep="last")
    with pytest.raises(
        Diverged, match=r"the validation loss became inf in epoch 1, step 1 of 1, at learning rate 1e\+30"
    ):
        learner.learn(task(), Fit(regime))
    assert all(torch.equal(v, state[k]) for k, v in learner.state_dict().items())


@pytest.mark.parametrize(("keep", "ends"), [("best", True), ("accurate", True), ("last", False)])
@pytest.mark.parametrize("worst", [math.inf, math.nan])
def test_a_validation_loss_that_cannot_be_counted_only_matters_where_it_is_kept(
    keep: str, ends: bool, worst: float
) -> None:
    class Sure(Scripted):
        """The more it is lost, the more it gets right."""

        def score(self, predictor: object, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]:
            losses = super().score(predictor, x, y, task)[0]
            return losses, ~losses.isfinite()

    for script, sound in (([2.0, worst, 3.0], True), ([2.0, 3.0, worst], ends)):
        learner = method(Sure)
        assert isinstance(learner, Sure)
        learner.script = script
        if sound:
            log = learner.learn(task(), Fit(Regime(epochs=3, keep=keep)))
            assert log.best == (2 if keep == "last" else 0)
        else:
            with pytest.raises(Diverged, match="validation loss became inf in epoch 3"):
                learner.learn(task(), Fit(Regime(epochs=3, keep=keep)))


def test_last_weights_that_are_infinite_are_not_kept_even_if_no_validation_image_tells() -> None:
    class Dead(Scripted):
        def after_step(self) -> None:
            with torch.no_grad():
                self.get_parameter("net.0.bias").fill_(-math.inf)

    learner = method(Dead)
    assert isinstance(learner, Dead)
    learner.script = [1.0]
    with pytest.raises(Diverged, match="a weight became -inf in epoch 1"):
        learner.learn(task(), Fit(Regime(epochs=1, keep="last", batch_size=54)))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda loss: 0.5, "not 0.5"),
        (lambda loss: loss.detach(), r"not a tensor \(\) without one"),
        (lambda loss: loss.expand(3), r"not a tensor \(3,\)"),
    ],
)
def test_a_loss_that_no_step_can_follow_is_told(returned: Callable[[Tensor], object], words: str) -> None:
    class Odd(Finetuning):
        def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
            return returned(super().loss(x, y, task))  # type: ignore[return-value]

    learner = method(Odd)
    with pytest.raises(ValueError, match=rf"Odd\.loss must return one number with a gradient, {words}"):
        learner.learn(task(), Fit(Regime(epochs=1)))
    assert not learner.specs


def test_one_number_is_a_loss_whatever_its_shape() -> None:
    class Framed(Finetuning):
        def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
            return super().loss(x, y, task)[None]

    logs = []
    for cls in (Finetuning, Framed):
        with seeded("learn"):
            logs.append(method(cls).learn(task(), Fit(Regime(epochs=1))))
    assert logs[0].epochs[0].loss == logs[1].epochs[0].loss


def test_bad_data_is_refused_before_anything_changes() -> None:
    good = task()
    images = good.train.images.clone()
    images[3, 1] = float("nan")
    rows = good.train.rows
    bad = {
        "NaN or infinite": Task("n", good.classes, Split(images, good.train.labels, rows), good.val, good.test),
        "labels run from": Task("l", ("a", "b"), good.train, good.val, good.test),
        "at least 2": Task("o", ("a",), good.train, good.val, good.test),
        "no val images": Task("e", good.classes, good.train, Split(images[:0], good.val.labels[:0]), good.test),
    }
    for cls in (Finetuning, Tfm):
        learner = method(cls)
        learner.learn(good, Fit(Regime(epochs=1)))
        state = {k: v.clone() for k, v in learner.state_dict().items()}
        for message, data in bad.items():
            with pytest.raises(ValueError, match=message):
                learner.learn(data, Fit(Regime(epochs=1)))
            assert all(torch.equal(v, state[k]) for k, v in learner.state_dict().items())
            assert len(learner.specs) == 1


def test_images_of_the_wrong_shape_are_refused_and_change_nothing() -> None:
    learner = method(Tfm)
    learner.learn(task(), Fit(Regime(epochs=1)))
    state = {k: v.clone() for k, v in learner.state_dict().items()}
    wide = torch.randn(9, 7)
    split = Split(wide, torch.arange(9) % 3)
    with pytest.raises(ValueError, match=r"does not fit; the network takes \(batch, 4\)"):
        learner.learn(Task("wide", ("a", "b", "c"), split, split, split), Fit(Regime(epochs=1)))
    assert all(torch.equal(v, state[k]) for k, v in learner.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(optimizer="sdg"), "no optimizer 'sdg'"),
        (dict(optimizer="LBFGS"), "LBFGS cannot"),
        (dict(precision="fp8"), "precision is"),
        (dict(lr=0.0), "lr must be positive"),
        (dict(batch_size=-1), "batch_size must be positive"),
        (dict(decay=1.0), "above 1"),
    ],
)
def test_a_regime_checks_itself(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Regime(**options)  # type: ignore[arg-type]


def test_bf16_trains_and_keeps_old_tasks_bit_equal() -> None:
    tasks = scenario("digits/5", seed=0).tasks[:2]
    from zeroforget.nets import build
    from zeroforget.training import logits

    with seeded("net"):
        learner = Tfm(build("small", (1, 8, 8)), torch.randn(2, 1, 8, 8))
    fit = Fit(Regime(epochs=6, precision="bf16"))
    learner.learn(tasks[0], fit)
    before = logits(learner.predictor(0), tasks[0].test, tasks[0].prepare)
    learner.learn(tasks[1], fit)
    assert torch.equal(logits(learner.predictor(0), tasks[0].test, tasks[0].prepare), before)
    assert accuracy(learner.predictor(1), tasks[1].test, tasks[1].prepare) > 0.75


def test_a_regime_knows_what_can_be_captured() -> None:
    assert not Regime(capture=True).can_capture()  # a CPU has no graphs
    assert not Regime().can_capture()


def test_augmentation_without_a_generator_draws_from_the_global_one() -> None:
    prepare = Preparation((0.5,), (0.5,), crop=6, pad=1, flip=True)
    images = torch.randint(0, 256, (32, 1, 8, 8), dtype=torch.uint8)
    with seeded("a"):
        first = prepare.train(images)
    with seeded("a"):
        again = prepare.train(images)
    with seeded("b"):
        other = prepare.train(images)
    assert first.shape == (32, 1, 6, 6)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def dropping() -> Finetuning:
    """Dropout before pooling and batch norm, as in a network of the public tables."""
    with seeded("dropping"):
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout(0.5), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(72, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(),
        )  # fmt: skip
        made = Finetuning(net, torch.zeros(2, 1, 8, 8))
        made.add_task(TaskSpec("one", 2))
    return made


def test_settled_statistics_are_those_of_images_of_which_nothing_is_dropped() -> None:
    digits = scenario("digits/5", seed=0).tasks[0]
    found = {}
    for settle in (False, True):
        learner = dropping()
        state = torch.get_rng_state()
        log = Fit(Regime(epochs=3, lr=0.05, batch_size=32, keep="last", settle=settle))(learner, digits, 0)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in learner.train().modules())
        norm = next(module for module in learner.modules() if isinstance(module, nn.BatchNorm1d))
        images, _ = digits.train.batch(torch.arange(len(digits.train)))
        seen = list[torch.Tensor]()
        norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        learner.eval()
        with torch.no_grad():
            learner(digits.prepare.test(images), 0)
        assert norm.running_var is not None
        found[settle] = float((norm.running_var / seen[0].var(0)).log().abs().mean()), log.epochs
    assert found[True][0] < 0.1 < 0.4 < found[False][0]
    assert found[True][1][0].loss == found[False][1][0].loss  # the first epoch's training is the same
    assert found[True][1][-1].val_loss < found[False][1][-1].val_loss


def test_settled_statistics_are_the_tasks_own() -> None:
    with seeded("net"):
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        learner = Tfm(net, torch.randn(2, 4), start=0.5, growth=0.25)
    fit = Fit(Regime(epochs=2, settle=True))
    learner.learn(task("one"), fit)
    x = torch.randn(6, 4)
    before = learner.eval()(x, 0)
    learner.learn(task("two", seed=1), fit)
    assert torch.equal(learner.eval()(x, 0), before)
