"""Each data set is read from files in its official layout: classes, labels, test marks, and the right pixels."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, UnidentifiedImageError
from scipy.io import savemat

from tests.data import helpers
from zeroforget.data import Collection, DataError, load, load_folder, missing
from zeroforget.data.decode import decode
from zeroforget.data.readers import arrays
from zeroforget.data.readers.folders import read_folder
from zeroforget.data.readers.published import read_birds
from zeroforget.data.sources import SOURCES
from zeroforget.store.errors import ModelError
from zeroforget.store.pictures import list_pictures, read_pictures

CODES = ("n01443537", "n01629819", "n01641577")


def mean_colours(collection: Collection) -> list[tuple[int, ...]]:
    return [tuple(row) for row in collection.images.float().mean((2, 3)).round().int().tolist()]


def assert_colours(collection: Collection, numbers: list[int]) -> None:
    """JPEG moves a flat colour by a few grey levels."""
    seen = np.array(mean_colours(collection))
    assert np.abs(seen - np.array([helpers.colour(number) for number in numbers])).max() <= 4


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("zipped", [True, False])
def test_idx(tmp_path: Path, name: str, zipped: bool) -> None:
    images, labels = helpers.mnist(tmp_path / name, zipped)
    found = load(name, tmp_path)
    assert np.array_equal(found.images.numpy(), images[:, None])
    assert found.labels.tolist() == labels.tolist()
    assert found.test.tolist() == [False] * 60 + [True] * 20
    assert found.shape == (1, 28, 28)
    assert found.classes[9] == ("9" if name == "mnist" else "Ankle boot")


def test_cifar100(tmp_path: Path) -> None:
    data = helpers.cifar100(tmp_path / "cifar100" / "cifar-100-python")
    found = load("cifar100", tmp_path)
    assert np.array_equal(found.images.numpy(), data.reshape(-1, 3, 32, 32))
    assert found.labels[:3].tolist() == [0, 1, 2]
    assert int(found.test.sum()) == 100
    assert found.classes[42] == "thing 42"


def test_cifar10_joins_its_batches(tmp_path: Path) -> None:
    helpers.cifar10(tmp_path / "cifar-10-batches-py")
    found = load("cifar10", tmp_path)
    assert found.images[:, 0, 0, 0].tolist() == [number for number in range(1, 7) for _ in range(10)]
    assert found.test.tolist() == [False] * 50 + [True] * 10


def test_tiny_imagenet(tmp_path: Path) -> None:
    helpers.tiny_imagenet(tmp_path / "tiny-imagenet-200", CODES)
    found = load("tiny-imagenet", tmp_path)
    assert found.codes == CODES
    assert found.classes == tuple(f"word of {code}" for code in CODES)
    assert found.shape == (3, 64, 64)
    assert found.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [2, 2, 1, 1, 0, 0]
    assert_colours(found, [0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 17, 16, 11, 10, 5, 4])


def test_tiny_imagenet_with_sorted_validation_images(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet"
    helpers.tiny_imagenet(folder, CODES)
    (folder / "val" / "val_annotations.txt").unlink()
    for number, code in enumerate(CODES):
        helpers.picture(folder / "val" / code / "images" / "a.JPEG", number, (64, 64))
    found = load("tiny-imagenet", tmp_path)
    assert found.labels[found.test].tolist() == [0, 1, 2]


@pytest.mark.parametrize("flat", [True, False])
def test_imagenet(tmp_path: Path, flat: bool) -> None:
    helpers.imagenet(tmp_path / "imagenet", flat)
    found = load("imagenet", tmp_path)
    assert found.classes == ("tench", "crane (n02012849)", "crane (n03126707)")
    assert found.images.shape == (12, 3, 256, 256)
    assert found.shape == (3, 224, 224)
    assert found.labels[found.test].tolist() == ([2, 0, 1] if flat else [0, 1, 2])
    assert_colours(found, [0, 1, 2, 10, 11, 12, 20, 21, 22, 100, 101, 102])


def test_flowers_train_on_both_official_parts(tmp_path: Path) -> None:
    helpers.flowers(tmp_path / "flowers")
    found = load("flowers", tmp_path)
    assert len(found.classes) == 4
    assert int((~found.test).sum()) == 12
    assert found.images.shape[2:] == (256, 256)
    assert found.shape == (3, 224, 224)
    train, valid, test = [1, 2, 7, 8, 13, 14, 19, 20], [3, 9, 15, 21], [4, 5, 6, 10, 11, 12, 16, 17, 18, 22, 23, 24]
    assert_colours(found, train + valid + test)
    assert found.labels.tolist() == [(number - 1) // 6 for number in train + valid + test]


def test_birds_are_cut_to_their_boxes(tmp_path: Path) -> None:
    helpers.birds(tmp_path / "birds" / "CUB_200_2011")
    found = load("birds", tmp_path)
    assert found.shape == (3, 224, 224)
    assert found.test.tolist() == [False, False, False, True, True] * 4
    inner = found.images[:, :, 20:-20, 20:-20].float().mean((2, 3))
    expected = torch.tensor([helpers.colour(number) for number in range(1, 21)]).float()
    assert (inner - expected).abs().max() <= 4


def test_a_box_of_birds_is_two_corners(tmp_path: Path) -> None:
    helpers.birds(tmp_path)
    assert read_birds(tmp_path).boxes[0].tolist() == [10, 5, 30, 15]


@pytest.mark.parametrize("headed", [True, False])
def test_actions(tmp_path: Path, headed: bool) -> None:
    helpers.actions(tmp_path / "actions")
    names = tmp_path / "actions" / "ImageSplits" / "actions.txt"
    names.write_text("".join(names.read_text().splitlines(keepends=True)[not headed :]))
    found = load("actions", tmp_path)
    assert found.classes == ("applauding", "blowing_bubbles", "riding_a_bike", "waving_hands")
    assert found.labels.tolist() == [label for count in (4, 2) for label in range(4) for _ in range(count)]
    assert found.shape == (3, 224, 224)


def test_scenes(tmp_path: Path) -> None:
    helpers.scenes(tmp_path / "indoorCVPR_09")
    found = load("scenes", tmp_path)
    assert found.classes == ("airport_inside", "bakery", "kitchen", "tv_studio")
    assert int(found.test.sum()) == 4
    assert_colours(found, [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32, 3, 13, 23, 33])


def test_cars(tmp_path: Path) -> None:
    helpers.cars(tmp_path / "cars")
    found = load("cars", tmp_path)
    assert found.classes[3] == "Maker Model 4 2012"
    assert found.labels.tolist() == [label for count in (3, 2) for label in range(4) for _ in range(count)]
    assert_colours(
        found,
        [10 * n + p for n in range(1, 5) for p in range(3)] + [100 + 10 * n + p for n in range(1, 5) for p in range(2)],
    )


def test_labels_of_cars_may_lie_in_their_kit(tmp_path: Path) -> None:
    helpers.cars(tmp_path / "cars")
    name = "cars_test_annos_withlabels.mat"
    (tmp_path / "cars" / name).rename(tmp_path / "cars" / "devkit" / name)
    assert int(load("cars", tmp_path).test.sum()) == 8


def test_aircraft_lose_their_banner(tmp_path: Path) -> None:
    helpers.aircraft(tmp_path / "fgvc-aircraft-2013b")
    found = load("aircraft", tmp_path)
    assert found.classes == ("707-320", "A340-600", "BAE 146-200", "Cessna 172")
    assert found.labels[found.test].tolist() == [0, 1, 2, 3]
    clear = found.images[:, :, :250].float().mean((2, 3))
    foot = found.images[:, :, -3:].float().mean((2, 3))
    assert (clear - foot).abs().max() < 12


def test_folder_with_a_test_part(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("cats", "dogs")):
            for place in range(count):
                helpers.picture(tmp_path / "pets" / part / name / f"{place}.jpg", 10 * label + place)
    found = load_folder(tmp_path / "pets", size=32)
    assert found.name == "pets"
    assert found.classes == ("cats", "dogs")
    assert found.images.shape == (10, 3, 32, 32)
    assert found.labels[found.test].tolist() == [0, 0, 1, 1]


def test_of_test_and_validation_images_only_those_for_testing_are(tmp_path: Path) -> None:
    for part in ("train", "test", "valid"):
        for place in range(2):
            helpers.picture(tmp_path / "pets" / part / "cats" / f"{part}{place}.jpg", place)
    (tmp_path / "pets" / "train" / ".cache").mkdir()
    helpers.picture(tmp_path / "pets" / "train" / "cats" / "._0.jpg", 1)
    found = read_folder(tmp_path / "pets")
    assert found.classes == ("cats",)
    assert [name for name, final in zip(found.files, found.test, strict=True) if final] == [
        *("test/cats/test0.jpg", "test/cats/test1.jpg")
    ]
    assert found.val is not None
    assert [name for name, held in zip(found.files, found.val, strict=True) if held] == [
        *("valid/cats/valid0.jpg", "valid/cats/valid1.jpg")
    ]
    assert len(found.files) == 6
    assert torch.equal(load_folder(tmp_path / "pets", 8).val, torch.from_numpy(found.val))


@pytest.mark.parametrize("part", ["test", "val"])
def test_a_class_that_has_no_training_folder_is_refused(tmp_path: Path, part: str) -> None:
    for place in ("train", "test", "val"):
        helpers.picture(tmp_path / "pets" / place / "cats" / "0.jpg", 0)
    (tmp_path / "pets" / part / "birds").mkdir()
    with pytest.raises(DataError, match=rf"{part}/birds is a class that .*train does not have; repair or remove it"):
        load_folder(tmp_path / "pets", 8)


@pytest.mark.parametrize("parts", [("train", "test", "val", "validation"), ("train", "val", "validation")])
def test_two_folders_for_validation_are_refused(tmp_path: Path, parts: tuple[str, ...]) -> None:
    for part in parts:
        helpers.picture(tmp_path / "pets" / part / "cats" / "0.jpg", 0)
    with pytest.raises(DataError, match=r"pets holds val and validation, .*; keep one of them \(.* in 'test'\)$"):
        load_folder(tmp_path / "pets", 8)


def test_a_validation_folder_without_images_of_classes_is_not_passed_over(tmp_path: Path) -> None:
    for place in ("train/cats", "test/cats", "val"):
        helpers.picture(tmp_path / "pets" / place / "0.jpg", 0)
    with pytest.raises(DataError, match="pets/val holds no images in class folders; repair or remove it"):
        load_folder(tmp_path / "pets", 8)


def test_a_folder_that_is_not_there_is_told_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for given, what in (("../gone", "missing"), ("file", "no folder")):
        told = f"{tmp_path}/{given} is {what}; '{given}' is relative to the folder where the command is given"
        with pytest.raises(DataError, match=f"^{re.escape(told)}, in an experiment's file too$"):
            load(f"folder:{given}")
    with pytest.raises(DataError, match=r"^/.*/gone is missing; name a folder of class folders$"):
        load_folder(tmp_path / "gone")


def test_a_folder_without_images_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty" / "cats").mkdir(parents=True)
    with pytest.raises(DataError, match="empty lists no images"):
        load_folder(tmp_path / "empty", 8)


def test_folder_without_one_sets_a_fifth_of_each_class_apart(tmp_path: Path) -> None:
    for label, name in enumerate(("a", "b")):
        for place in range(10):
            helpers.picture(tmp_path / "things" / name / f"{place}.jpg", 10 * label + place)
    (tmp_path / "things" / "a" / "notes.txt").write_text("not an image")
    found = load(f"folder:{tmp_path / 'things'}", size=16)
    assert found.labels[found.test].tolist() == [0, 0, 1, 1]
    assert torch.equal(found.test, load_folder(tmp_path / "things", size=16).test)


def test_every_mode_of_image_becomes_rgb(tmp_path: Path) -> None:
    for number, mode in enumerate(("L", "CMYK", "RGB")):
        (tmp_path / "modes" / "a").mkdir(parents=True, exist_ok=True)
        Image.new(mode, (8, 8)).save(tmp_path / "modes" / "a" / f"{number}.jpg")
    for number, mode in enumerate(("P", "RGBA", "LA", "1", "I;16")):
        (tmp_path / "modes" / "b").mkdir(parents=True, exist_ok=True)
        Image.new(mode, (8, 8)).save(tmp_path / "modes" / "b" / f"{number}.png")
    paletted = Image.new("P", (8, 8))
    paletted.save(tmp_path / "modes" / "b" / "9.png", transparency=bytes([0, 128]))
    assert load_folder(tmp_path / "modes", size=8).images.shape == (9, 3, 8, 8)


def test_table_of_data_sets_holds_together() -> None:
    assert set(SOURCES) >= {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet", "imagenet"}
    assert set(SOURCES) >= {"flowers", "birds", "actions", "scenes", "cars", "aircraft"}
    length = {"md5": 32, "sha1": 40, "sha256": 64}
    for source in SOURCES.values():
        for archive in source.archives:
            assert archive.url.endswith(archive.file) or not archive.url
            assert archive.url or source.by_hand
            if archive.checksum:
                algorithm, _, digits = archive.checksum.partition(":")
                assert len(digits) == length[algorithm]
                assert int(digits, 16) >= 0


def test_a_copy_is_found_by_argument_by_variable_and_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers.mnist(tmp_path / "other" / "MNIST" / "raw")
    with pytest.raises(DataError, match=r"'mnist' is not on this disk .*--download.*--data-root"):
        load("mnist")
    assert len(load("mnist", tmp_path / "other")) == 80
    assert len(load("mnist", tmp_path / "other" / "MNIST" / "raw")) == 80
    monkeypatch.setenv("ZEROFORGET_DATA", f"{tmp_path / 'none'}:{tmp_path / 'other'}")
    assert len(load("mnist")) == 80
    assert missing("mnist/5") == []


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _scribble(path: Path) -> None:
    path.write_bytes(b"not what it should be")


DAMAGES: list[tuple[str, Callable[[Path], object], str, Callable[[Path], None], str]] = [
    ("mnist", helpers.mnist, "train-images-idx3-ubyte.gz", _cut_short, "damaged"),
    ("mnist", helpers.mnist, "t10k-labels-idx1-ubyte.gz", _scribble, "damaged"),
    ("cifar100", helpers.cifar100, "train", _cut_short, "damaged"),
    ("cifar10", helpers.cifar10, "data_batch_3", Path.unlink, "missing"),
    ("flowers", helpers.flowers, "setid.mat", _cut_short, "damaged"),
    ("flowers", helpers.flowers, "imagelabels.mat", _scribble, "damaged"),
    ("flowers", helpers.flowers, "jpg/image_00003.jpg", Path.unlink, "missing"),
    ("flowers", helpers.flowers, "jpg/image_00003.jpg", _cut_short, "cannot be decoded"),
    ("flowers", helpers.flowers, "jpg/image_00003.jpg", _scribble, "cannot be decoded"),
    ("birds", helpers.birds, "image_class_labels.txt", Path.unlink, "missing"),
    ("birds", helpers.birds, "bounding_boxes.txt", _cut_short, "bounding_boxes"),
    ("actions", helpers.actions, "ImageSplits/test.txt", Path.unlink, "missing"),
    ("cars", helpers.cars, "devkit/cars_meta.mat", _scribble, "damaged"),
    ("aircraft", helpers.aircraft, "data/images/0000011.jpg", _cut_short, "cannot be decoded"),
]


@pytest.mark.parametrize(("name", "write", "file", "harm", "word"), DAMAGES)
def test_a_damaged_or_missing_file_names_itself_and_the_remedy(
    tmp_path: Path, name: str, write: Callable[[Path], object], file: str, harm: Callable[[Path], None], word: str
) -> None:
    write(tmp_path / name)
    harm(tmp_path / name / file)
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert Path(file).name.partition(".")[0] in message
    assert word in message
    assert f"zeroforget data {name}" in message
    assert "ZEROFORGET_DATA" in message


def test_wrong_names_get_the_nearest_right_one() -> None:
    with pytest.raises(DataError, match="did you mean 'flowers'"):
        load("flower")


def test_labels_that_fit_no_class_are_an_error(tmp_path: Path) -> None:
    helpers.mnist(tmp_path / "mnist")
    helpers.idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", np.full(20, 11), True)
    with pytest.raises(DataError, match="label is 11"):
        load("mnist", tmp_path)


def test_labels_of_cifar_that_fit_no_class_are_an_error(tmp_path: Path) -> None:
    helpers.cifar10(tmp_path / "cifar10")
    batch = helpers.python2_batch(np.zeros((2, 3072), np.uint8), labels=[9, 10])
    (tmp_path / "cifar10" / "data_batch_3").write_bytes(batch)
    with pytest.raises(DataError, match="data_batch_3 is damaged: labels outside 0 to 9"):
        load("cifar10", tmp_path)


def test_counts_that_do_not_agree_are_an_error(tmp_path: Path) -> None:
    helpers.mnist(tmp_path / "mnist")
    helpers.idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", np.zeros(19), True)
    with pytest.raises(DataError, match="20 t10k images but 19 labels"):
        load("mnist", tmp_path)
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(bytes((0, 0, 8, 1, 0, 0, 0, 20)) + bytes(19))
    with pytest.raises(DataError, match="19 values where its header promises 20"):
        load("mnist", tmp_path)
    helpers.imagenet(tmp_path / "imagenet", flat=True)
    (tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000002.JPEG").unlink()
    with pytest.raises(DataError, match=r"val holds 2 images, but .* speaks of 3; unpack"):
        load("imagenet", tmp_path)


def test_idx_files_unpack_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "ALWAYS", 2**16)
    helpers.mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(2**20)))
    with pytest.raises(DataError, match=r"unpacks to more than [\d,]+ bytes, too many for its size"):
        load("mnist", tmp_path)


def test_a_list_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    helpers.imagenet(tmp_path / "imagenet", flat=True)
    (truth,) = (tmp_path / "imagenet").rglob("*ground_truth.txt")
    truth.write_text("3\none\n2\n")
    with pytest.raises(DataError, match=r"'imagenet' in .*imagenet is damaged: .*'one'; ask for access"):
        load("imagenet", tmp_path)


def test_imagenet_has_test_images_of_every_class(tmp_path: Path) -> None:
    helpers.imagenet(tmp_path / "imagenet", flat=False)
    (tmp_path / "imagenet" / "val" / "n02012849").rename(tmp_path / "aside")
    with pytest.raises(DataError, match=r"n02012849 is missing \(1 classes have no test images\)"):
        load("imagenet", tmp_path)


def test_a_flower_that_is_in_no_class_is_an_error(tmp_path: Path) -> None:
    helpers.flowers(tmp_path / "flowers")
    sets = {"trnid": [1, 25], "valid": [2], "tstid": [3]}
    savemat(tmp_path / "flowers" / "setid.mat", {name: np.array([ids]) for name, ids in sets.items()})
    with pytest.raises(DataError, match=r"setid\.mat is damaged: no image 25"):
        load("flowers", tmp_path)


def test_a_class_folder_whose_name_is_no_text_is_named_at_once(tmp_path: Path) -> None:
    for name in (b"cats", b"caf\xe9"):
        folder = Path(os.fsdecode(os.fsencode(tmp_path / "things") + b"/" + name))
        for place in range(3):
            helpers.picture(folder / f"{place}.jpg", place)
    with pytest.raises(DataError, match=r"things/caf\\xe9 has a name that is not UTF-8: rename it"):
        load_folder(tmp_path / "things", size=8)


def test_an_image_whose_name_is_no_text_is_read(tmp_path: Path) -> None:
    for place in range(3):
        helpers.picture(tmp_path / "things" / "cats" / os.fsdecode(b"%d\xe9.jpg" % place), place)
    assert_colours(load_folder(tmp_path / "things", size=8), [0, 1, 2])


def test_experiments_and_models_see_the_same_pictures(tmp_path: Path) -> None:
    """One lister and one decoder: the same files in the same order, with the same pixels and proportions."""
    photos = tmp_path / "photos"
    helpers.picture(photos / "a" / "deep" / "0.jpg", 1, (900, 300))
    helpers.picture(photos / "a" / "1.PNG", 2, (30, 80))
    (helpers.picture(photos / "a" / "2.jpg", 3)).rename(photos / "a" / "no ending")
    helpers.picture(photos / "b" / "0.webp", 4, (64, 64))
    helpers.picture(photos / "__MACOSX" / "0.jpg", 5)
    helpers.picture(photos / "b" / "__MACOSX" / "0.jpg", 5)
    (photos / "b" / "Thumbs.db").write_bytes(b"x")
    (photos / "b" / "notes.txt").write_text("no picture")
    listing, found = list_pictures(photos), read_folder(photos)
    assert [str(file.relative_to(photos)) for file in listing.files] == list(found.files)
    assert found.files == ("a/1.PNG", "a/deep/0.jpg", "a/no ending", "b/0.webp")
    assert [file.name for file in listing.ignored] == ["notes.txt"]
    images = read_pictures(listing, (3, 32, 32)).images
    assert torch.equal(images, load_folder(photos, 32).images)
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste((0, 0, 255), (100, 0, 200, 100))
    wide.save(photos / "b" / "0.png")
    assert int(load_folder(photos, 32).images[3, 2, :, 2:-2].min()) == 255  # the middle third, not squeezed


@pytest.mark.parametrize("ending", ["png", "jpg", "eps", ""])
def test_no_picture_starts_another_program(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would hand PostScript to Ghostscript, whatever the file is called."""
    script = tmp_path / "bin" / "gs"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    page = tmp_path / "things" / "a" / f"0.{ending}".rstrip(".")
    page.parent.mkdir(parents=True)
    page.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")
    for fit in ("stretch", "cover"):
        with pytest.raises(UnidentifiedImageError):
            decode(str(page), 8, fit=fit)
    with pytest.raises(DataError, match=r"cannot be decoded|lists no images"):
        load_folder(tmp_path / "things", 8)
    assert not (tmp_path / "started").exists()


def test_a_folder_too_deep_is_suggested(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        helpers.picture(tmp_path / "pets" / "images" / name / "0.jpg", 1)
    with pytest.raises(DataError, match=r"pets holds one folder, 'images', which holds 2 \(cats, dogs\): did you mean"):
        load_folder(tmp_path / "pets", 8)
    with pytest.raises(ModelError, match=r"did you mean .*pets/images\?"):
        list_pictures(tmp_path / "pets")
