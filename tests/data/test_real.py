"""The whole of Fashion-MNIST, where Debian's package `dataset-fashion-mnist` is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroforget.data import load, scenario

FASHION = Path("/usr/share/datasets/fashion-mnist")
installed = pytest.mark.skipif(not FASHION.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")


@installed
def test_fashion_mnist_in_full() -> None:
    found = load("fashion-mnist", FASHION.parent)
    assert found.images.shape == (70000, 1, 28, 28)
    assert found.labels[~found.test].bincount().tolist() == [6000] * 10
    assert found.labels[found.test].bincount().tolist() == [1000] * 10
    pixels = found.images[~found.test].float() / 255
    assert pixels.mean().item() == pytest.approx(found.prepare.mean[0], abs=1e-4)
    assert pixels.std().item() == pytest.approx(found.prepare.std[0], abs=1e-4)


@installed
def test_fashion_mnist_in_five_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROFORGET_DATA")  # then the system's folder is looked in too
    made = scenario("fashion-mnist/5")
    assert [(len(task.train), len(task.val), len(task.test)) for task in made.tasks] == [(10800, 1200, 2000)] * 5
    assert made.tasks[4].classes == ("Bag", "Ankle boot")
