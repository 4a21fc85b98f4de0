"""Learning from shards: what learning from their folder gives, and from more than can be decoded at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zeroforget import store
from zeroforget.data import pack
from zeroforget.store import pictures
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import BORN
from zeroforget.store.options import Options

TINY = {"network": "lenet", "width": 0.25, "size": 28, "gray": True, "epochs": 2, "augment": False}


def photos(folder: Path, shift: int = 0) -> Path:
    random = np.random.default_rng(shift)
    for number in range(2):
        (folder / f"class{number}").mkdir(parents=True)
        for row in range(12):
            values = random.integers(100 * number, 100 * number + 100, (28, 28), np.uint8)
            Image.fromarray(values).save(folder / f"class{number}" / f"{row}.png")
    return folder


def options() -> Options:
    known = Options.__dataclass_fields__
    return Options(**{key: value for key, value in TINY.items() if key in known})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFORGET_CACHE", str(tmp_path / "cache"))


def test_from_shards_a_task_has_the_bits_that_its_folder_gives(tmp_path: Path) -> None:
    pack.pack(str(photos(tmp_path / "photos")), tmp_path / "shards", per_shard=7, workers=1)
    found = []
    for name in ("photos", "shards"):
        model = store.open_model(tmp_path / f"of-{name}")
        facts = model.learn(tmp_path / name, "things", options=options(), progress=False)
        found.append((facts.network, facts.accuracy, facts.data, facts.files[BORN]))
    assert found[0] == found[1]


def test_more_than_can_be_decoded_at_once_is_streamed_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack.pack(str(photos(tmp_path / "photos")), tmp_path / "shards", per_shard=7, workers=1)
    monkeypatch.setattr(pictures, "IN_MEMORY", 1000)
    model = store.open_model(tmp_path / "model")
    facts = model.learn(tmp_path / "shards", "things", options=options(), progress=False)
    assert facts.data.counts == (12, 12)
    (found,) = model.verify({"things": tmp_path / "shards"}).measured
    assert found.held_out == facts.accuracy
    with pytest.raises(ModelError, match="class1 is no class of this task"):
        pictures.list_pictures(tmp_path / "shards", ("class0", "dogs"))


def test_a_test_part_that_the_data_name_is_left_alone(tmp_path: Path) -> None:
    for part in ("train", "test"):
        photos(tmp_path / "parts" / part, len(part))
    pack.pack(str(tmp_path / "parts"), tmp_path / "shards", workers=1)
    found = pictures.read_pictures(pictures.list_pictures(tmp_path / "shards"), (1, 28, 28))
    assert found.counts == (12, 12)
    assert len({str(file) for file in found.files}) == 24
    assert all(file.parent.name == "train-000000.tar" for file in found.files)
