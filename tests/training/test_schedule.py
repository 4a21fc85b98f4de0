"""The cosine schedule, which weights are kept, and label smoothing: each against its formula, written out plainly."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.methods import small_tasks
from tests.training.test_fit import Scripted, method, task
from zeroforget.methods import Method
from zeroforget.methods.baselines import Finetuning, Joint
from zeroforget.methods.registry import build
from zeroforget.methods.tfm import Tfm
from zeroforget.progress import Epoch
from zeroforget.training import Fit, FitLog, Progress, Regime
from zeroforget.training.seeding import seeded


class Stop(Exception):
    """Someone pulled the plug."""


def check_resumes(whole: Method, regime: Regime, epoch: int, step: int, folder: Path) -> None:
    """One that is stopped there and goes on from its folder ends with every bit of the one that learned at once."""

    def stop(progress: Progress) -> None:
        if (progress.epoch, progress.step) == (epoch, step):
            raise Stop

    broken = method(type(whole))
    with seeded("learn"), pytest.raises(Stop):
        broken.learn(task(), Fit(regime, folder=folder, progress=stop))
    with seeded("learn"):
        broken.learn(task(), Fit(regime, folder=folder))
    after = broken.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in whole.state_dict().items())


class Rates(Finetuning):
    """Notes the rate that each step was made with, by how far the weights of a constant gradient moved."""

    seen: list[float]

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        if not hasattr(self, "seen"):
            self.seen = []
        bias = self.get_parameter("heads.0.bias")
        self._before = bias.detach().clone()
        loss: Tensor = bias.sum() + 0 * self(x, task).sum()
        return loss

    def after_step(self) -> None:
        self.seen.append(float((self._before - self.get_parameter("heads.0.bias").detach())[0]))


def test_the_cosine_rises_and_falls_step_by_step_and_runs_every_epoch() -> None:
    learner = method(Rates)
    assert isinstance(learner, Rates)
    regime = Regime(lr=0.1, schedule="cosine", epochs=4, warmup=1.0, batch_size=18, patience=1, min_lr=0.09)
    log = learner.learn(task(), Fit(regime))  # 54 images: 3 steps an epoch
    rise = [0.1 * k / 3 for k in (1, 2, 3)]
    fall = [0.05 * (1 + math.cos(math.pi * k / 9)) for k in range(9)]
    assert learner.seen == pytest.approx(rise + fall, abs=1e-6)
    assert (len(log.epochs), log.stopped) == (4, "all epochs done")
    assert [e.lr for e in log.epochs] == pytest.approx([rise[2], fall[2], fall[5], fall[8]])


@pytest.mark.parametrize(("keep", "kept"), [("best", 1), ("accurate", 2), ("last", 4)])
@pytest.mark.parametrize("schedule", ["patience", "cosine"])
def test_which_weights_are_kept(keep: str, kept: int, schedule: str) -> None:
    states: list[dict[str, Tensor]] = []

    class Watching(Scripted):
        def score(self, predictor: object, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]:
            states.append({k: v.clone() for k, v in self.state_dict().items()})
            losses, correct = super().score(predictor, x, y, task)
            right = [0.2, 0.4, 0.8, 0.8, 0.6][len(states) - 1]
            return losses, torch.arange(len(correct)) < right * len(correct)

    learner = method(Watching)
    assert isinstance(learner, Watching)
    learner.script = [3.0, 1.0, 2.0, 4.0, 5.0]
    log = learner.learn(task(), Fit(Regime(epochs=5, keep=keep, schedule=schedule)))
    assert log.best == kept
    assert all(torch.equal(v, states[kept][k]) for k, v in learner.state_dict().items())


@pytest.mark.parametrize("rewind", [False, True])
def test_a_rate_that_falls_may_go_on_from_the_best_weights(rewind: bool) -> None:
    starts: list[dict[str, Tensor]] = []

    class Watching(Scripted):
        def before_step(self, progress: float) -> None:
            if progress == 0:
                starts.append({k: v.clone() for k, v in self.state_dict().items()})
            super().before_step(progress)

    learner = method(Watching)
    assert isinstance(learner, Watching)
    learner.script = [3.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    log = learner.learn(task(), Fit(Regime(epochs=7, patience=2, lr=0.1, decay=10.0, min_lr=1e-3, rewind=rewind)))
    assert [e.lr for e in log.epochs] == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001])
    kept = learner.state_dict()  # those after the second epoch, with which the third began
    assert all(torch.equal(v, starts[2][k]) for k, v in kept.items())
    for epoch, back in ((3, False), (4, rewind), (5, False), (6, rewind)):
        assert all(torch.equal(v, kept[k]) for k, v in starts[epoch].items()) == back


class Falling(Rates, Scripted):
    """Of a validation that is given, the rates that steps are made with."""


def test_when_the_rate_is_divided_steps_become_smaller() -> None:
    learner = method(Falling)
    assert isinstance(learner, Falling)
    learner.script = [1.0, 2.0, 3.0, 3.0, 3.0]
    learner.learn(task(), Fit(Regime(epochs=5, patience=2, lr=0.1, decay=10.0, batch_size=54)))
    assert learner.seen == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01], abs=1e-6)


def test_who_rewinds_forgets_its_momentum() -> None:
    learner = method(Falling)
    assert isinstance(learner, Falling)
    learner.script = [1.0, 2.0, 3.0, 3.0]
    options = {"momentum": 0.5}
    regime = Regime(epochs=4, patience=2, lr=0.1, decay=10.0, options=options, batch_size=54, rewind=True)
    learner.learn(task(), Fit(regime))
    assert learner.seen == pytest.approx([0.1, 0.15, 0.175, 0.01], abs=1e-6)


@pytest.mark.parametrize("cls", [Finetuning, Tfm])
def test_an_interrupted_run_that_rewinds_ends_with_the_same_bits(tmp_path: Path, cls: type) -> None:
    regime = Regime(lr=0.5, epochs=8, patience=1, options={"momentum": 0.9}, batch_size=18, rewind=True)

    whole = method(cls)
    with seeded("learn"):
        log = whole.learn(task(), Fit(regime))
    falls = [k for k in range(1, len(log.epochs)) if log.epochs[k].lr < log.epochs[k - 1].lr]
    assert falls, "no rate fell: the test would tell nothing"
    check_resumes(whole, regime, falls[0], 1, tmp_path)


@pytest.mark.parametrize(("keep", "kept"), [("best", 2), ("accurate", 1), ("last", 3)])
def test_the_log_says_which_epoch_is_kept(keep: str, kept: int) -> None:
    """Of equal accuracies the one with the smaller loss; nothing that cannot be counted."""
    log = FitLog()
    measured = [(math.inf, 0.9), (2.0, 0.8), (1.0, 0.7), (3.0, 0.8)]
    better = [log.add(Epoch(k, 0.1, 0.0, *values, 1.0), keep) for k, values in enumerate(measured)]
    assert log.best == kept
    assert better == [k in {"best": {1, 2}, "accurate": {1}, "last": {0, 1, 2, 3}}[keep] for k in range(4)]
    assert log.seconds == 4.0
    assert log.val_accuracy == measured[kept][1]


def test_the_accuracy_of_a_log_is_that_of_the_weights_kept_be_they_the_first_or_none() -> None:
    log = FitLog()
    assert math.isnan(log.val_accuracy)
    for k, values in enumerate([(1.0, 0.7), (2.0, 0.8)]):
        log.add(Epoch(k, 0.1, 0.0, *values, 1.0), "best")
    assert log.val_accuracy == 0.7


@pytest.mark.parametrize("cls", [Finetuning, Tfm])
@pytest.mark.parametrize("keep", ["best", "accurate", "last"])
def test_a_cosine_interrupted_and_resumed_ends_with_the_same_bits(tmp_path: Path, cls: type, keep: str) -> None:
    options = {"momentum": 0.9, "weight_decay": 0.01}
    regime = Regime(
        lr=0.02, schedule="cosine", warmup=1.5, epochs=5, options=options, keep=keep, batch_size=18, label_smoothing=0.1
    )

    whole = method(cls)
    with seeded("learn"):
        whole.learn(task(), Fit(regime))
    check_resumes(whole, regime, 3, 2, tmp_path)


def test_smoothing_is_that_of_torch_and_leaves_other_heads_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, y = torch.randn(12, 5, generator=draw, dtype=torch.float64), torch.arange(12) % 5
    learner = method()
    learner.smoothing = 0.2
    wanted = F.cross_entropy(logits, y, label_smoothing=0.2)
    assert torch.allclose(learner.cross_entropy(logits, y), wanted)
    # Joint masks other tasks' classes with -infinity: what is left is each image's own head.
    wide = torch.cat([logits, torch.full((12, 3), -torch.inf, dtype=torch.float64)], 1).requires_grad_()
    loss = learner.cross_entropy(wide, y)
    assert torch.allclose(loss, wanted)
    (gradient,) = torch.autograd.grad(loss, wide)
    assert gradient.isfinite().all()
    assert not gradient[:, 5:].any()


def test_the_regime_smooths_training_and_not_validation() -> None:
    class Asked(Finetuning):
        def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
            logits = self(x, task)
            loss = self.cross_entropy(logits, y)
            assert torch.allclose(loss, F.cross_entropy(logits, y, label_smoothing=0.3))
            return loss

    learner = method(Asked)
    data = task()
    log = learner.learn(data, Fit(Regime(epochs=2, label_smoothing=0.3, keep="last")))
    images, y = data.val.batch(torch.arange(len(data.val)))
    plain = F.cross_entropy(learner.predictor(0)(data.prepare.test(images)), y)
    assert log.epochs[-1].val_loss == pytest.approx(float(plain.detach()), rel=1e-5)


def test_joint_learns_under_smoothing() -> None:
    learner = method(Joint)
    tasks = [task("a"), task("b", seed=1)]
    fit = Fit(Regime(epochs=40, lr=0.3, schedule="cosine", label_smoothing=0.1, batch_size=18))
    with seeded("learn"):
        learner.learn(tasks[0], fit)
        log = learner.learn(tasks[1], fit, tasks[:1])
    assert log.val_accuracy > 0.6
    assert all(math.isfinite(e.loss) for e in log.epochs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(schedule="cosin"), "schedule is 'patience' or 'cosine', not 'cosin'"),
        (dict(rewind=True, schedule="cosine"), "rewind goes back to better weights: it wants schedule='patience'"),
        (dict(rewind=True, keep="last"), "rewind goes back to better weights: it wants schedule='patience'"),
        (dict(keep="first"), "keep is 'best', 'accurate' or 'last', not 'first'"),
        (dict(schedule="cosine", epochs=3, warmup=3.0), "below the 3 epochs"),
        (dict(warmup=1.0), "belongs to schedule='cosine'"),
        (dict(label_smoothing=1.0), "label_smoothing"),
    ],
)
def test_the_new_options_check_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Regime(**options)  # type: ignore[arg-type]


STEPS = [(0.0, 0.0), (0.5, 0.0), (0.9, 0.0), (0.0, 0.9), (0.5, 0.5), (0.5, 0.8), (0.9, 0.5), (0.9, 0.9), (0.9, 0.97)]
"""Momentum and dampening. Without momentum torch does not dampen; with it, all gradients but the first."""


@pytest.mark.parametrize(("momentum", "dampening"), STEPS)
def test_reach_is_how_far_a_steady_gradient_carries(momentum: float, dampening: float) -> None:
    regime = Regime(lr=0.1, options={"momentum": momentum, "dampening": dampening})
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = regime.make_optimizer([weight], regime.lr)
    places = []
    for _ in range(400):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        places.append(float(weight.detach()))
    assert places[-2] - places[-1] == pytest.approx(regime.reach)
    assert Regime(options={"momentum": 1.0}).reach == math.inf  # steps that never fade
    assert Regime(options={"momentum": 0.9, "dampening": 1.0}).reach == 0.0  # nothing counts but the first gradient


def test_nesterov_carries_a_steady_gradient_as_far_as_plain_momentum() -> None:
    plain = Regime(lr=0.1, options={"momentum": 0.9})
    assert Regime(lr=0.1, options={"momentum": 0.9, "nesterov": True}).reach == plain.reach
    assert Regime(options={"momentum": 1.0}).reach == math.inf


def test_the_rate_rises_to_its_height_and_no_further() -> None:
    """The last step of the warmup may reach beyond it."""
    regime = Regime(lr=0.1, schedule="cosine", warmup=1.1, epochs=4)
    assert [regime.cosine(done, 0.5) for done in (0.0, 0.5, 1.0)] == pytest.approx([0.1 * 0.5 / 1.1, 0.1 / 1.1, 0.1])


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_how_a_gpu_computes_is_as_it_was_after_training(precision: str) -> None:
    cuda, cudnn, fast = torch.backends.cuda.matmul, torch.backends.cudnn, precision == "tf32"
    usual = cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    for given in ((True, False, True), (False, True, False), usual):
        cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = given
        with suppress(Stop), Regime(precision=precision).arithmetic():
            assert (cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == (fast, fast, False)
            raise Stop
        assert (cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == given


@pytest.mark.parametrize("dampening", [0.0, 0.5, 0.9])
def test_a_teacher_is_obeyed_under_momentum(dampening: float) -> None:
    """Momentum carries ten times as far; a strong teacher must bound that, not the single step."""
    first, second = small_tasks.tasks(2)
    recipe = small_tasks.regime(options={"momentum": 0.9, "dampening": dampening}, epochs=6)
    learner = build("lwf", small_tasks.net(), small_tasks.example(), strength=10.0)
    with seeded("learn"):
        learner.learn(first, Fit(recipe))
        was = small_tasks.right(learner, 0)
        learner.learn(second, Fit(recipe))
    assert was > 0.9
    assert small_tasks.right(learner, 0) > was - 0.1


@pytest.mark.parametrize(
    ("device", "words"), [("foo", "no device 'foo'"), ("", "no device ''"), ("mps", "'cpu' or 'cuda'")]
)
def test_a_device_that_is_none_is_refused(device: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Regime(device=device)


def test_no_epochs_are_told_as_such() -> None:
    with pytest.raises(ValueError, match="epochs must be positive"):
        Regime(epochs=0)
