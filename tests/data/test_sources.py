"""What the table of data sets says of each: how its images are prepared, what it needs, where it is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data import helpers
from zeroforget.data import DataError, load
from zeroforget.data.cache import SYSTEM, cache_folder, data_roots
from zeroforget.data.loading import find
from zeroforget.data.sources import SOURCES
from zeroforget.data.values import Treatment

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STATISTICS = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "tiny-imagenet": ((0.4802, 0.4481, 0.3975), (0.2764, 0.2689, 0.2816)),
}
FLIPPED, CROPPED = (None, 0, True), (224, 0, True)
VARIED = {
    **dict.fromkeys(("digits", "mnist", "fashion-mnist"), (None, 0, False)),
    **dict.fromkeys(("cifar10", "cifar100"), (None, 4, True)),
    **dict.fromkeys(("tiny-imagenet", "birds", "actions"), FLIPPED),
    **dict.fromkeys(("imagenet", "flowers", "scenes", "cars", "aircraft"), CROPPED),
}
STORED = {
    "tiny-imagenet": Treatment(64),
    "birds": Treatment(224, boxes=True),
    "actions": Treatment(224),
    "aircraft": Treatment(256, trim=20),
    **dict.fromkeys(("imagenet", "flowers", "scenes", "cars"), Treatment(256)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_images_are_prepared_as_they_ever_were(name: str) -> None:
    """Published results depend on it."""
    source = SOURCES[name]
    prepare = source.prepare
    if name != "digits":
        assert (prepare.mean, prepare.std) == STATISTICS.get(name, IMAGENET)
    assert (prepare.crop, prepare.pad, prepare.flip) == VARIED[name]
    assert (prepare.zoom, prepare.erase, prepare.alter) == (1.0, 0, 0.0)
    assert source.treatment == STORED.get(name)


def test_a_mirror_has_the_same_files() -> None:
    mirrored = [archive for source in SOURCES.values() for archive in source.archives if archive.mirror]
    assert len(mirrored) == 4
    assert all(archive.mirror.endswith(f"/{archive.file}") for archive in mirrored)


def test_only_imagenets_training_images_are_archives_of_archives() -> None:
    nested = [archive for source in SOURCES.values() for archive in source.archives if archive.nested]
    assert [(archive.file, archive.into, archive.gives) for archive in nested] == [
        ("ILSVRC2012_img_train.tar", "train", "train")
    ]


def test_a_data_set_is_there_when_all_of_it_is(tmp_path: Path) -> None:
    helpers.cars(tmp_path / "cars")
    assert find(SOURCES["cars"], tmp_path) == tmp_path / "cars"
    (tmp_path / "cars" / "cars_test").rename(tmp_path / "cars" / "elsewhere")
    assert find(SOURCES["cars"], tmp_path) is None


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_mnist_may_have_a_dot_in_their_names(tmp_path: Path, zipped: bool) -> None:
    helpers.mnist(tmp_path / "mnist", zipped)
    for path in list((tmp_path / "mnist").iterdir()):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    assert len(load("mnist", tmp_path)) == 80


def test_what_is_given_out_on_request_is_not_said_to_be_fetched() -> None:
    with pytest.raises(DataError, match="ask for access") as told:
        load("imagenet")
    assert "--download" not in str(told.value)


def test_where_data_and_decoded_images_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_roots("~/a") == (tmp_path / "a",)
    monkeypatch.setenv("ZEROFORGET_DATA", "~/b:/c:")
    monkeypatch.setenv("ZEROFORGET_CACHE", "~/d")
    assert (data_roots(), cache_folder()) == ((tmp_path / "b", Path("/c")), tmp_path / "d")
    monkeypatch.delenv("ZEROFORGET_DATA")
    monkeypatch.delenv("ZEROFORGET_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    ours = tmp_path / ".cache" / "zeroforget"
    assert (data_roots(), cache_folder()) == ((ours / "data", SYSTEM), ours / "decoded")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "zeroforget" / "decoded"
