"""Mixed images: every pixel's origin, every label's share, and training that can be interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.training.test_schedule import method, task
from zeroforget.data import Split, Task
from zeroforget.methods.baselines import Finetuning, Joint
from zeroforget.training import Fit, Progress, Regime
from zeroforget.training.seeding import generator, seeded
from zeroforget.training.step import mix, partner


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 7), st.integers(0, 10**6))
def test_a_cut_image_is_a_rectangle_of_its_partner(count: int, height: int, width: int, seed: int) -> None:
    x = torch.randn(count, 2, height, width, generator=draw(seed))
    mixed, share = mix(x, 1.0, 0.0, draw(seed + 1))
    kept = (mixed == x).all(1)
    taken = (mixed == partner(x)).all(1)
    assert (kept | taken).all()
    for image in range(count):
        if image == count - 1 - image:
            continue  # its own partner
        rows, columns = taken[image].any(1), taken[image].any(0)
        assert torch.equal(taken[image], rows[:, None] & columns[None, :])
        for side in (rows, columns):
            assert (side.int().diff() != 0).sum() <= 2  # one stretch
        assert share[image] == pytest.approx(float(kept[image].float().mean()), abs=1e-6)


@pytest.mark.parametrize(("cutmix", "mixup"), [(1.0, 0.0), (0.5, 0.4), (0.0, 0.7)])
def test_every_pixel_is_what_the_draws_say(cutmix: float, mixup: float) -> None:
    """Rectangles have the drawn share of the image's area, around the drawn middle, as far as the image goes."""
    count, height, width = 24, 5, 3
    x = torch.rand(count, 2, height, width, generator=draw())
    mixed, share = mix(x, cutmix, mixup, draw(1))
    draws = torch.rand(4, count, 1, generator=draw(1))[:, :, 0].T.tolist()
    for image, (way, own, down, across) in enumerate(draws):
        weights = torch.ones(height, width)
        for row in range(height):
            for column in range(width):
                away = max(abs((row + 0.5) / height - down), abs((column + 0.5) / width - across))
                cut = 0.0 if away < (1 - own) ** 0.5 / 2 else 1.0
                weights[row, column] = cut if way < cutmix else own if way < cutmix + mixup else 1.0
        torch.testing.assert_close(mixed[image], weights * x[image] + (1 - weights) * x[count - 1 - image])
        torch.testing.assert_close(share[image], weights.mean())


def test_cuts_lie_as_often_on_one_side_as_on_the_other() -> None:
    x = torch.rand(6000, 1, 4, 4, generator=draw())
    mixed, _ = mix(x, 1.0, 0.0, draw(1))
    often = (mixed != x).float().mean((0, 1))
    torch.testing.assert_close(often, often.flip(0), atol=0.03, rtol=0)
    torch.testing.assert_close(often, often.flip(1), atol=0.03, rtol=0)


def test_a_blended_image_is_the_sum_of_two_in_proportion() -> None:
    x = torch.rand(8, 3, 5, 5, generator=draw())
    mixed, share = mix(x, 0.0, 1.0, draw(1))
    lam = share.view(-1, 1, 1, 1)
    assert torch.allclose(mixed, lam * x + (1 - lam) * x.flip(0))
    assert share.min() >= 0
    assert share.max() <= 1
    assert len(share.unique()) == 8


def test_the_shares_of_the_ways_are_those_asked_for() -> None:
    x = torch.rand(4000, 1, 4, 4, generator=draw())
    mixed, share = mix(x, 0.3, 0.2, draw(1))
    whole = (share == 1).float().mean()
    pieces = ((mixed == x) | (mixed == x.flip(0))).flatten(1).all(1).float().mean()
    assert whole == pytest.approx(0.5, abs=0.1)  # and cuts too small to hold a pixel's middle
    assert pieces == pytest.approx(0.8, abs=0.04)
    same, ones = mix(x, 0.0, 0.0, draw(1))
    assert torch.equal(same, x)
    assert torch.equal(ones, torch.ones(4000))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_mixed_labels(smoothing: float) -> None:
    learner = method()
    logits = torch.randn(7, 5, generator=draw(), dtype=torch.float64)
    y = torch.arange(7) % 5
    share = torch.rand(7, generator=draw(1), dtype=torch.float64)
    soft = share[:, None] * F.one_hot(y, 5) + (1 - share[:, None]) * F.one_hot(y.flip(0), 5)
    learner.smoothing, learner.share = smoothing, share
    assert torch.allclose(learner.cross_entropy(logits, y), F.cross_entropy(logits, soft, label_smoothing=smoothing))


def test_joint_asks_each_image_in_a_mixture_its_own_head() -> None:
    learner = method(Joint)
    tasks = [task("a"), task("b", seed=1)]
    heads: list[torch.Tensor] = []

    def look(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        heads.append(y)
        own = Joint.own(learner, logits, y)
        assert torch.equal((own > -torch.inf).sum(1), torch.full((len(y),), len(tasks[0].classes)))
        assert (own.gather(1, y[:, None]) > -torch.inf).all()
        return own

    with seeded("learn"):
        learner.learn(tasks[0], Fit(Regime(epochs=1)))
        learner.own = look  # type: ignore[method-assign]
        log = learner.learn(tasks[1], Fit(Regime(epochs=1, mixup=0.5, batch_size=8)), tasks[:1])
    assert log.epochs[0].loss < 10
    assert torch.equal(heads[1], heads[0].flip(0))
    assert (heads[0] // len(tasks[0].classes) != heads[1] // len(tasks[0].classes)).any()


def test_training_mixes_validation_does_not_and_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    regime = Regime(lr=0.02, epochs=4, batch_size=18, mixup=0.8, keep="last")
    plain, whole, broken = method(Finetuning), method(Finetuning), method(Finetuning)

    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.epoch == 2 and progress.step == 2:
            raise Stop

    data = task()
    with seeded("learn"):
        log = whole.learn(data, Fit(regime))
    with seeded("learn"):
        plain.learn(data, Fit(Regime(lr=0.02, epochs=4, batch_size=18, keep="last")))
    with seeded("learn"), pytest.raises(Stop):
        broken.learn(data, Fit(regime, folder=tmp_path, progress=stop))
    with seeded("learn"):
        broken.learn(data, Fit(regime, folder=tmp_path))
    assert whole.share is None
    after, other = broken.state_dict(), plain.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in whole.state_dict().items())
    assert not all(torch.equal(v, other[k]) for k, v in whole.state_dict().items())
    images, y = data.val.batch(torch.arange(len(data.val)))
    loss = F.cross_entropy(whole.predictor(0)(data.prepare.test(images)), y)
    assert log.epochs[-1].val_loss == pytest.approx(float(loss.detach()), rel=1e-5)


def test_images_are_not_mixed_in_the_last_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    learner = method(Finetuning)
    loss = learner.loss
    monkeypatch.setattr(learner, "loss", lambda *args: (seen.append(learner.share is not None), loss(*args))[1])
    data = task()
    with seeded("learn"):
        learner.learn(data, Fit(Regime(lr=0.02, epochs=5, batch_size=len(data.train), mixup=1.0, mix_until=0.6)))
    assert seen == [True, True, True, False, False]
    assert [Regime(cutmix=0.5, epochs=4).mixes(k) for k in range(4)] == [True] * 4
    assert not any(Regime(cutmix=0.5, epochs=4, mix_until=0.0).mixes(k) for k in range(4))
    assert not Regime(epochs=4).mixes(0)
    assert [Regime(mixup=0.5, epochs=100, mix_until=0.29).mixes(k) for k in (28, 29)] == [True, False]


def test_a_share_of_the_epochs_is_checked() -> None:
    with pytest.raises(ValueError, match="mix_until is a share of the epochs, from 0 to 1, not 30"):
        Regime(mixup=0.5, mix_until=30)


def test_what_is_no_image_is_not_cut() -> None:
    x = torch.rand(4, 6, generator=draw())
    mixed, share = mix(x, 0.0, 1.0, draw(1))
    assert torch.allclose(mixed, share[:, None] * x + (1 - share[:, None]) * x.flip(0))
    with pytest.raises(ValueError, match="use mixup"):
        mix(x, 0.5, 0.0, draw(1))


@pytest.mark.parametrize("options", [{"cutmix": -0.1}, {"mixup": 1.5}, {"cutmix": 0.6, "mixup": 0.6}])
def test_shares_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="together at most 1"):
        Regime(**options)  # type: ignore[arg-type]


def test_cuts_and_blends_are_drawn_for_images_as_they_are_asked_for() -> None:
    """By the loop: the first batch of a task is mixed as `mix` mixes it, from what augmentation draws."""
    seen = []

    class Noting(Finetuning):
        def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
            seen.append((x, self.share))
            return super().loss(x, y, task)

    pixels = torch.rand(8, 1, 4, 4, generator=draw())
    split = Split(pixels, torch.arange(8) % 2)
    data = Task("t", ("a", "b"), split, split, split)
    with seeded("net"):
        learner = Noting(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4)), pixels)
        learner.learn(data, Fit(Regime(epochs=1, batch_size=8, cutmix=0.7, mixup=0.2), seed=3))
    order = torch.randperm(8, generator=generator("shuffle", 3, 0, 0))
    mixed, share = mix(data.prepare.test(pixels[order]), 0.7, 0.2, generator("augment", 3, 0, 0))
    ((x, given),) = seen
    assert torch.equal(x, mixed)
    assert given is not None
    assert torch.equal(given, share)
