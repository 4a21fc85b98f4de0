from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own cache and sees no data of the machine it runs on."""
    monkeypatch.setenv("ZEROFORGET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ZEROFORGET_DATA", str(tmp_path / "data"))
