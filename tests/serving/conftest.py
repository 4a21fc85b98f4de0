"""Pictures and a learned model, made once, and a server of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.helpers import Client, Running
from tests.store.helpers import learned, pictures


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of the tasks low, middle and high."""
    return pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A model of the tasks low and middle; nobody may change it."""
    path = tmp_path_factory.mktemp("models") / "garden"
    learned(path, data, "low", "middle")
    return path


@pytest.fixture
def garden(trained: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(trained, tmp_path / "garden"))


@pytest.fixture(scope="session")
def running(trained: Path) -> Iterator[Running]:
    """A server of the model that nobody changes."""
    with Running(trained, upload=200_000, pixels=1_000_000) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    """A connection to it."""
    one = running.client()
    yield one
    one.close()
