"""Pictures and a learned model, made once; tests that change a model change a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.helpers import learned, pictures
from zeroforget.store import Model, open_model


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of the tasks low, middle and high."""
    return pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A model of two tasks; nobody may change it."""
    path = tmp_path_factory.mktemp("models") / "garden"
    learned(path, data, "low", "middle")
    return path


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Callable[[], Model]:
    """Makes copies of the trained model."""
    made = iter(range(1000))

    def copy() -> Model:
        path = tmp_path / f"copy{next(made)}"
        shutil.copytree(trained, path)
        return open_model(path)

    return copy


@pytest.fixture
def model(copied: Callable[[], Model]) -> Model:
    """A copy of the trained model."""
    return copied()
