"""Guessing the task: the distance is Mahalanobis', the temperature the true one, the guess as good as documented."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from zeroforget.data import Scenario, Split, missing, plan, scenario
from zeroforget.store import open_model, task_guess
from zeroforget.store.errors import Damaged
from zeroforget.store.schema import Calibration


def test_the_distance_is_mahalanobis_where_all_directions_are_kept() -> None:
    torch.manual_seed(0)
    mix = torch.randn(6, 6, dtype=torch.float64)
    labels = torch.arange(300) % 3
    centres = 4 * torch.randn(3, 6, dtype=torch.float64)
    values = torch.randn(300, 6, dtype=torch.float64) @ mix + centres[labels]
    about = task_guess.spread(values, labels, 3)
    means = torch.stack([values[labels == c].mean(0) for c in range(3)])
    inner = values - means[labels]
    covariance = inner.T @ inner / len(inner)
    covariance += task_guess.SHRINK * covariance.trace() / 6 * torch.eye(6, dtype=torch.float64)
    asked = torch.randn(20, 6, dtype=torch.float64) * 5
    away = asked[:, None] - means
    wanted = torch.einsum("nci,ij,ncj->nc", away, covariance.inverse(), away).min(1).values
    assert torch.allclose(task_guess.distance(asked, about), (wanted / 6).sqrt(), rtol=1e-4)


def test_few_directions_keep_the_ones_that_matter() -> None:
    torch.manual_seed(0)
    scales = torch.cat([torch.full((4,), 10.0), torch.full((96,), 0.1)]).double()
    values = torch.randn(400, 100, dtype=torch.float64) * scales
    about = task_guess.spread(values, torch.zeros(400, dtype=torch.int64), 1)
    assert about["directions"].shape == (100, task_guess.DIRECTIONS)
    along, across = torch.zeros(2, 100, dtype=torch.float64)
    along[0], across[50] = 10.0, 10.0
    near, far = task_guess.distance(torch.stack([along, across]), about)
    assert far > 2 * near


def test_at_length_1_strength_does_not_matter() -> None:
    torch.manual_seed(0)
    values, labels = torch.randn(80, 12).abs() + 3 * torch.eye(4, 12)[torch.arange(80) % 4], torch.arange(80) % 4
    asked, about = values[:9], task_guess.spread(values, labels, 4, unit=True)
    assert torch.allclose(task_guess.distance(asked, about), task_guess.distance(7 * asked, about))
    assert torch.allclose(about["means"].norm(dim=1), torch.ones(4), atol=0.1)
    plain = task_guess.spread(values, labels, 4)
    assert not torch.allclose(task_guess.distance(asked, plain), task_guess.distance(7 * asked, plain), rtol=0.5)


def test_the_temperature_undoes_overconfidence() -> None:
    torch.manual_seed(0)
    truth = 2 * torch.randn(20_000, 5)
    labels = torch.distributions.Categorical(logits=truth).sample()
    assert task_guess.temperature(truth * 3, labels) == pytest.approx(3, rel=0.05)
    assert task_guess.temperature(truth, labels) == pytest.approx(1, rel=0.05)


def test_a_perfect_score_on_few_pictures_asks_for_no_certainty() -> None:
    scores = torch.tensor([[9.0, -9.0], [-9.0, 9.0]]).repeat(10, 1)
    labels = torch.tensor([0, 1]).repeat(10)
    calibration = Calibration(task_guess.temperature(scores, labels), (0.0, 1.0))
    assert float(task_guess.probabilities(scores, calibration).max()) < 0.97


def test_ranks_are_probabilities_and_prefer_the_familiar() -> None:
    usual = Calibration(1.0, tuple(float(v) for v in torch.linspace(0.5, 1.5, 101)))
    ranks = task_guess.rank({"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([4.0, 1.0])}, {"a": usual, "b": usual})
    assert torch.allclose(ranks["a"] + ranks["b"], torch.ones(2))
    assert ranks["a"][0] > 0.99 > 0.01 > ranks["a"][1]


def test_tensors_of_another_network_are_refused(trained: Path) -> None:
    dense = open_model(trained).dense("low")
    about = task_guess.spread(torch.randn(20, 5), torch.zeros(20, dtype=torch.int64), 2)
    with pytest.raises(Damaged):
        task_guess.check(about, dense, 2, "spread.safetensors")


def guessed_right(made: Scenario, size: int, base: Path, per_class: int, epochs: int) -> float:
    """Learn a scenario's tasks from pictures on disk; the share of its test pictures whose task is guessed."""
    model = open_model(base / "model")
    for number, task in enumerate(made.tasks):
        seen: dict[int, int] = {}
        images, labels = task.train.batch(torch.arange(len(task.train)))
        for image, label in zip(images, labels.tolist(), strict=True):
            seen[label] = seen.get(label, -1) + 1
            if seen[label] < per_class:
                place = base / str(number) / f"class {label}"
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image[0].numpy()).save(place / f"{seen[label]:05d}.png")
        model.learn(base / str(number), f"task {number}", size=size, gray=True, epochs=epochs)
    right = [_guessed(model.likely_tasks(_images(task.test)), number) for number, task in enumerate(made.tasks)]
    return float(torch.cat(right).double().mean())


def _images(split: Split) -> torch.Tensor:
    return split.batch(torch.arange(min(1000, len(split))))[0]


def _guessed(likely: dict[str, torch.Tensor], number: int) -> torch.Tensor:
    return torch.stack(list(likely.values())).argmax(0) == number


@pytest.mark.soak
def test_the_guess_on_digits_is_as_good_as_documented(tmp_path: Path) -> None:
    found = guessed_right(scenario("digits/5"), 8, tmp_path, 1000, 20)
    print(f"digits/5: {found:.4f}")
    assert found > 0.9


@pytest.mark.soak
def test_the_guess_on_clothes_is_as_good_as_documented(tmp_path: Path) -> None:
    if missing(plan("fashion-mnist/5")):
        pytest.skip("Fashion-MNIST is not on this disk")
    found = guessed_right(scenario("fashion-mnist/5"), 28, tmp_path, 600, 12)
    print(f"fashion-mnist/5: {found:.4f}")
    assert found > 0.5
