"""Folders of class folders: what is in them, what is wrong with them, what is held out."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.store.helpers import write_digits
from zeroforget.store.errors import ModelError
from zeroforget.store.learning import lesson_of
from zeroforget.store.options import Options
from zeroforget.store.pictures import check, check_apart, held_out, lesson, list_pictures, read_pictures, statistics
from zeroforget.store.writing import Watch

GRAY = (1, 8, 8)


def notes(folder: Path, *, strict: bool = False) -> str:
    return "\n".join(check(read_pictures(list_pictures(folder), GRAY), strict=strict))


def test_files_below_class_folders_in_any_depth(tmp_path: Path) -> None:
    write_digits(tmp_path, (0, 1), 3)
    (tmp_path / "digit0" / "more").mkdir()
    (tmp_path / "digit0" / "000.png").rename(tmp_path / "digit0" / "more" / "x.png")
    (tmp_path / "digit1" / ".hidden.png").write_bytes(b"")
    (tmp_path / ".cache").mkdir()
    listing = list_pictures(tmp_path)
    assert listing.classes == ("digit0", "digit1")
    assert listing.labels == (0, 0, 0, 1, 1, 1)


def test_the_held_out_pictures_are_known_by_their_pixels(tmp_path: Path) -> None:
    one, two = (write_digits(tmp_path / name, (0, 1), 6) for name in "ab")

    def key(folder: Path) -> str:
        decoded = read_pictures(list_pictures(folder), GRAY)
        return lesson("x", decoded, share=0.5, seed=0, flip=False, shift=0).data.pixels

    assert key(one) == key(two)
    for file in (two / "digit0").iterdir():
        Image.new("L", (8, 8), 7).save(file)
    assert key(one) != key(two)


def test_folders_that_are_no_classes(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a folder"):
        list_pictures(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no pictures"):
        list_pictures(tmp_path / "empty")
    for part in ("train", "val"):
        write_digits(tmp_path / "parts" / part, (0, 1), 2)
    with pytest.raises(ModelError, match=r"learn from .*train.*val.*--data"):
        list_pictures(tmp_path / "parts")
    one = write_digits(tmp_path / "one", (0,), 4)
    with pytest.raises(ModelError, match="at least two"):
        notes(one)


def test_pictures_beside_class_folders_are_counted(tmp_path: Path) -> None:
    write_digits(tmp_path, (0, 1), 12)
    for name in ("README.txt", ".hidden.png"):
        (tmp_path / name).write_bytes(b"")
    assert "left out" not in notes(tmp_path)
    for number in range(2):
        shutil.copy(tmp_path / "digit0" / "000.png", tmp_path / f"{number}.PNG")
        said = f"left out: {'2 pictures' if number else '1 picture'} beside the class folders"
        assert notes(tmp_path).splitlines() == [said]
    with pytest.raises(ModelError, match="digit0 holds 12 pictures but no class folders; put each class's"):
        list_pictures(tmp_path / "digit0")
    for name in ("digit0", "digit1"):
        shutil.rmtree(tmp_path / name)
        (tmp_path / name).mkdir()
    with pytest.raises(ModelError, match="holds 2 pictures but no pictures in its class folders; put"):
        list_pictures(tmp_path)


def test_a_model_in_the_place_of_the_pictures_is_told(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a model, not pictures: name the model first"):
        check_apart(tmp_path / "new", trained)


def test_unreadable_pictures_are_skipped_counted_and_refused_above_a_twentieth(tmp_path: Path) -> None:
    write_digits(tmp_path, (0, 1), 24)
    (tmp_path / "digit0" / "000.png").write_bytes(b"")
    (tmp_path / "digit1" / "readme.txt").write_text("no picture, and its name says so")
    said = notes(tmp_path)
    assert "000.png is empty" in said
    assert "1 of 48 pictures cannot be read and are skipped" in said
    assert "1 file that is no picture is left out" in said
    with pytest.raises(ModelError, match="strict"):
        notes(tmp_path, strict=True)
    for number in range(1, 4):
        (tmp_path / "digit0" / f"00{number}.png").write_bytes(b"broken")
    with pytest.raises(ModelError, match=r"4 of 48 pictures .*more than 5%.*003.png is no picture"):
        notes(tmp_path)


def test_pipes_are_named_and_skipped(tmp_path: Path) -> None:
    write_digits(tmp_path, (0, 1), 24)
    os.mkfifo(tmp_path / "digit0" / "pipe.png")
    assert "pipe.png is no regular file" in notes(tmp_path)


def test_a_class_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    write_digits(tmp_path, (0,), 2)
    (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    with pytest.raises(ModelError, match=r"caf\\xe9 has a name that is not UTF-8: rename it"):
        list_pictures(tmp_path)


@pytest.mark.parametrize(
    ("count", "named"),
    [(5, "digit0, digit1, digit2, digit3, digit4"), (6, "digit0, digit1, digit2, digit3, digit4, …")],
)
def test_learning_begins_with_the_names_of_its_classes(tmp_path: Path, count: int, named: str) -> None:
    """Whoever points at the wrong folder sees so before anything is trained."""
    said: list[str] = []
    listing = list_pictures(write_digits(tmp_path, tuple(range(count)), 4))
    lesson_of(listing, (1, 8, 8), "digits", Options(), Watch(say=said.append))
    assert (
        said[-1]
        == f"{count} classes ({named}): {2 * count} pictures to learn from, {count} to select by, {count} to test"
    )


def test_small_and_uneven_classes_are_named(tmp_path: Path) -> None:
    write_digits(tmp_path, (0,), 24)
    write_digits(tmp_path, (1,), 5)
    said = notes(tmp_path)
    assert "few pictures to learn from: digit1 (5)" in said
    assert "uneven classes: digit0 has 24 pictures, digit1 has 5" in said
    with pytest.raises(ModelError, match="few"):
        notes(tmp_path, strict=True)
    write_digits(tmp_path, (2,), 1)
    with pytest.raises(ModelError, match=r"'digit2' has 1 readable picture"):
        notes(tmp_path)


def test_the_held_out_part_follows_from_the_seed() -> None:
    labels = torch.tensor([0] * 20 + [1] * 3 + [2] * 2)
    aside = held_out(labels, 0.2, 7)
    assert [int(aside[labels == c].sum()) for c in range(3)] == [4, 1, 1]
    assert torch.equal(aside, held_out(labels, 0.2, 7))
    assert not torch.equal(aside, held_out(labels, 0.2, 8))
    assert int(held_out(labels, 0.99, 0)[labels == 1].sum()) == 2  # never all


def test_a_lesson_normalizes_by_what_it_learns_from(tmp_path: Path) -> None:
    for name, value in (("dark", 40), ("light", 200)):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("L", (8, 8), value + number).save(tmp_path / name / f"{number}.png")
    decoded = read_pictures(list_pictures(tmp_path), GRAY)
    made = lesson("tones", decoded, share=0.2, seed=0, flip=False, shift=0)
    images, _ = made.task.train.batch(torch.arange(len(made.task.train)))
    normalized = made.task.prepare.test(images)
    assert abs(float(normalized.mean())) < 1e-3
    assert abs(float(normalized.std(correction=0)) - 1) < 1e-3
    assert made.data.held_out == 4
    assert made.data.counts == (10, 10)
    assert statistics(torch.full((2, 1, 4, 4), 9, dtype=torch.uint8), torch.arange(2))[1] == (round(1 / 255, 6),)


def test_what_lies_in_hidden_folders_is_not_learned(tmp_path: Path) -> None:
    write_digits(tmp_path, (0, 1), 3)
    (tmp_path / "digit0" / ".ipynb_checkpoints").mkdir()
    shutil.copy(tmp_path / "digit0" / "000.png", tmp_path / "digit0" / ".ipynb_checkpoints" / "000-checkpoint.png")
    assert list_pictures(tmp_path).labels == (0, 0, 0, 1, 1, 1)


def test_classes_are_found_however_the_names_of_their_folders_are_composed(tmp_path: Path) -> None:
    whole, apart = unicodedata.normalize("NFC", "ros\u00e9"), unicodedata.normalize("NFD", "ros\u00e9")
    write_digits(tmp_path / "a", (0, 1), 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "digit0").rename(tmp_path / "a" / whole)
    (tmp_path / "b" / "digit0").rename(tmp_path / "b" / apart)
    classes = ("digit1", whole)
    assert list_pictures(tmp_path / "a").classes == list_pictures(tmp_path / "b").classes == classes
    for known in (classes, ("digit1", apart)):  # whichever was written down
        listing = list_pictures(tmp_path / "b", known)
        assert (listing.classes, listing.labels) == (known, (0, 0, 0, 1, 1, 1))
        assert listing.files[3].parent.name == apart


@pytest.mark.skipif(sys.platform == "darwin", reason="there the two names are one")
def test_two_folders_of_one_class_are_told(tmp_path: Path) -> None:
    write_digits(tmp_path, (0, 1), 3)
    (tmp_path / "digit0").rename(tmp_path / "ros\u00e9")
    (tmp_path / "digit1").rename(tmp_path / "rose\u0301")
    with pytest.raises(ModelError, match=r"two class folders that read 'ros\u00e9'.*'rose\\u0301'.*into one"):
        list_pictures(tmp_path)


def test_a_folder_that_cannot_be_read_is_not_left_out_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_digits(tmp_path, (0, 1), 3)
    (tmp_path / "digit0" / "more").mkdir()
    scandir = os.scandir

    def forbidden(path: str) -> object:
        if str(path).endswith("more"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", forbidden)
    with pytest.raises(ModelError, match=r"digit0.more cannot be read \(permission denied\); let it be read"):
        list_pictures(tmp_path)


def test_the_same_picture_under_two_classes_is_named(tmp_path: Path) -> None:
    write_digits(tmp_path, (0, 1), 12)
    assert "two classes" not in notes(tmp_path)
    shutil.copy(tmp_path / "digit0" / "003.png", tmp_path / "digit1" / "also.png")
    assert "the same picture under two classes, 1 time: " in notes(tmp_path)
    assert f"{tmp_path}/digit0/003.png = {tmp_path}/digit1/also.png" in notes(tmp_path)
    with pytest.raises(ModelError, match=r"two classes.*strict was asked for"):
        notes(tmp_path, strict=True)


def test_how_many_may_be_unreadable_is_a_choice(tmp_path: Path) -> None:
    write_digits(tmp_path, (0, 1), 12)
    for number in range(6):
        (tmp_path / "digit0" / f"00{number}.png").write_bytes(b"broken")
    decoded = read_pictures(list_pictures(tmp_path), GRAY)
    with pytest.raises(ModelError, match=r"6 of 24 pictures .*--unreadable 0.5 would allow half.*; and 1 more$"):
        check(decoded, strict=False)
    assert "6 of 24 pictures cannot be read and are skipped" in check(decoded, strict=False, unreadable=0.25)


@pytest.mark.parametrize("ending", ["heic", "HEIF", "jxl"])
def test_a_format_that_needs_a_plugin_says_which(tmp_path: Path, ending: str) -> None:
    write_digits(tmp_path, (0, 1), 24)
    (tmp_path / "digit0" / f"photo.{ending}").write_bytes(b"\0\0\0\x18ftypheic" + bytes(64))
    package = "pillow-jxl-plugin" if ending == "jxl" else "pillow-heif"
    assert f"needs a plugin: pip install {package}" in notes(tmp_path)
