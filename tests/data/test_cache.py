"""Images are decoded once, into a file that is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data import helpers
from zeroforget.data import DataError, cache, load, load_folder
from zeroforget.data import decode as decode_module
from zeroforget.data.cache import decoded, fingerprint
from zeroforget.data.decode import decode, decode_all
from zeroforget.data.readers.folders import read_folder
from zeroforget.data.values import Treatment
from zeroforget.files.locks import locked_if_possible


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for label in range(3):
        for place in range(6):
            helpers.picture(folder / f"class{label}" / f"{place}.jpg", 10 * label + place)
    return folder


def entries(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache").iterdir() if path.is_dir())


def test_the_second_time_nothing_is_decoded(photos: Path, tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    first = load_folder(photos, 32, lambda *told: heard.append(told))
    assert heard == [("decoding photos", 18, 18)]
    again = load_folder(photos, 32, lambda *told: heard.append(told))
    assert len(heard) == 1
    assert torch.equal(first.images, again.images)
    assert len(entries(tmp_path)) == 1


def test_images_stay_on_disk_and_cannot_be_changed_there(photos: Path, tmp_path: Path) -> None:
    images = load_folder(photos, 32).images
    path = entries(tmp_path)[0] / "images.npy"
    before = path.read_bytes()
    images[0] = 0
    images[1:3] += 1
    assert path.read_bytes() == before
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(path) in maps.read_text()


def test_a_changed_file_or_treatment_is_decoded_anew(photos: Path, tmp_path: Path) -> None:
    load_folder(photos, 32)
    load_folder(photos, 16)
    assert len(entries(tmp_path)) == 2
    helpers.picture(photos / "class0" / "0.jpg", 99)
    changed = load_folder(photos, 32).images
    assert len(entries(tmp_path)) == 3
    expected = torch.tensor(helpers.colour(99)).float()
    assert (changed[0].float().mean((1, 2)) - expected).abs().max() <= 4


def test_the_fingerprint_sees_names_sizes_times_boxes_and_treatment(photos: Path) -> None:
    listing = read_folder(photos)
    seen = {fingerprint(listing, Treatment(32)), fingerprint(listing, Treatment(32, trim=1))}
    os.utime(photos / "class1" / "2.jpg", ns=(1, 1))
    seen.add(fingerprint(listing, Treatment(32)))
    (photos / "class2" / "5.jpg").rename(photos / "class2" / "6.jpg")
    seen.add(fingerprint(read_folder(photos), Treatment(32)))
    assert len(seen) == 4
    now = photos / "class0" / "0.jpg"
    for content, nanoseconds in ((b"x", 7), (b"x", 8), (b"xy", 8)):  # a change within a second; one of the size alone
        now.write_bytes(content)
        os.utime(now, ns=(1, nanoseconds))
        seen.add(fingerprint(read_folder(photos), Treatment(32)))
    assert len(seen) == 7
    boxed = [replace(listing, files=listing.files[:1], boxes=np.full((1, 4), edge)) for edge in (1.0, 2.0)]
    assert len({fingerprint(one, Treatment(32, boxes=True)) for one in boxed}) == 2
    assert len({fingerprint(one, Treatment(32)) for one in boxed}) == 1
    with pytest.raises(DataError, match=r"5\.jpg is missing"):
        fingerprint(listing, Treatment(32))


def test_folders_that_differ_only_in_what_their_pictures_show_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, grey in (("here", 10), ("there", 200)):
        path = tmp_path / place / "photos" / "a" / "0.bmp"
        path.parent.mkdir(parents=True)
        Image.new("L", (8, 8), grey).save(path)
        os.utime(path, ns=(1, 1))
    for place, grey in (("here", 10), ("there", 200)):
        assert (load_folder(tmp_path / place / "photos", 8).images == grey).all()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "photos")
    monkeypatch.chdir(tmp_path / "there")
    for same in ("photos", tmp_path / "link"):  # the same folder by other names
        assert (load_folder(same, 8, name="photos").images == 200).all()
    assert len(entries(tmp_path)) == 2


def test_an_official_data_set_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    helpers.flowers(tmp_path / "one" / "flowers", 4)
    shutil.copytree(tmp_path / "one", tmp_path / "two")  # with the times of its files
    images = [load("flowers", tmp_path / place).images for place in ("one", "two")]
    assert torch.equal(*images)
    assert len(entries(tmp_path)) == 1


def test_all_damaged_images_are_named_and_nothing_is_kept(photos: Path, tmp_path: Path) -> None:
    for name in ("class0/3.jpg", "class2/1.jpg"):
        (photos / name).write_bytes((photos / name).read_bytes()[:300])
    heard: list[str] = []
    with pytest.raises(DataError, match=r"2 image\(s\) of 'photos' cannot be used: .*class0/3\.jpg .*class2/1\.jpg "):
        load_folder(photos, 32, lambda what, done, total: heard.append(what))
    assert sum("cannot be decoded" in what for what in heard) == 2
    assert entries(tmp_path) == []


def test_of_many_damaged_images_ten_are_named(tmp_path: Path) -> None:
    for place in range(12):
        helpers.picture(tmp_path / "bad" / "a" / f"{place:02d}.jpg", place).write_bytes(b"x")
    with pytest.raises(DataError, match=r"12 image\(s\) .*09\.jpg [^;]*; and 2 more;") as told:
        load_folder(tmp_path / "bad", 8)
    assert "10.jpg" not in str(told.value)


def test_an_entry_may_be_read_by_others(photos: Path, tmp_path: Path) -> None:
    load_folder(photos, 8)
    assert entries(tmp_path)[0].stat().st_mode & 0o777 == 0o755


def test_every_image_is_cut_to_its_own_box(photos: Path) -> None:
    for place, edge in enumerate((5, 20)):
        canvas = Image.new("RGB", (40, 40))
        canvas.paste((255, 255, 255), (edge, 0, edge + 10, 10))
        canvas.save(photos / "class0" / f"{place}.png")
    files = tuple(f"class0/{place}.png" for place in range(2))
    boxes = np.array([[5.4, -0.4, 14.6, 10.4], [19.6, -3, 30.4, 9.6]])
    listing = replace(read_folder(photos), files=files, boxes=boxes)
    assert (decoded("boxes", listing, Treatment(8, boxes=True)) == 255).all()


def test_no_room_is_said_before_the_work(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(DataError, match=r"GB, but .* has 0\.0 GB left; make room or set ZEROFORGET_CACHE"):
        load_folder(photos, 32)


def test_many_processes_decode_what_one_does(tmp_path: Path) -> None:
    for number in range(40):
        helpers.picture(tmp_path / "many" / f"{number}.jpg", number, (20 + number, 30))
    items = [
        (str(tmp_path / "many" / f"{number % 40}.jpg"), (0, 0, 10, 10) if number % 2 else None) for number in range(600)
    ]
    items[5] = (str(tmp_path / "none.jpg"), None)
    told: list[int] = []
    results = []
    for workers in (1, 3):
        path = tmp_path / f"{workers}.npy"
        np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(600, 3, 16, 16))
        damaged = decode_all(str(path), items, (16, 0, "stretch"), workers, lambda done, bad: told.append(done))
        assert damaged == [(str(tmp_path / "none.jpg"), "is missing")]
        results.append(np.load(path))
    assert np.array_equal(*results)
    assert np.array_equal(results[1][7], decode(*items[7][:1], 16, items[7][1]))
    assert told[-1] == 600


def test_a_folder_of_nonsense_is_given_up_early(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.jpg").write_bytes(b"x")
    np.lib.format.open_memmap(tmp_path / "a.npy", mode="w+", dtype=np.uint8, shape=(3000, 3, 8, 8))
    items = [(str(tmp_path / "bad" / "x.jpg"), None)] * 3000
    for workers in (1, 2):
        assert (
            len(decode_all(str(tmp_path / "a.npy"), items, (8, 0, "stretch"), workers, lambda done, bad: None)) < 1000
        )


def test_a_box_off_the_image_is_reported(tmp_path: Path) -> None:
    path = helpers.picture(tmp_path / "a.jpg", 1, (10, 10))
    with pytest.raises(ValueError, match="empty"):
        decode(str(path), 8, (20, 20, 30, 30))
    assert np.array_equal(decode(str(path), 8, (-5, -5, 300, 300)), decode(str(path), 8))


def test_a_worker_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = helpers.picture(tmp_path / "a.jpg", 1, (10, 10))
    np.lib.format.open_memmap(tmp_path / "a.npy", mode="w+", dtype=np.uint8, shape=(600, 3, 8, 8))
    dying = [sys.executable, "-c", "import sys; sys.stdin.readline()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    monkeypatch.setattr(decode_module, "worker", lambda: subprocess.Popen(dying, **pipes))
    with pytest.raises(OSError, match="a process that decodes images died; is there enough memory"):
        decode_all(str(tmp_path / "a.npy"), [(str(path), None)] * 600, (8, 0, "stretch"), 2, lambda done, bad: None)


def test_an_interrupt_from_the_keyboard_does_not_reach_a_worker() -> None:
    with decode_module.worker() as worker:
        assert os.getsid(worker.pid) == worker.pid
        worker.stdin.close()
        assert worker.wait(30) == 0


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked_if_possible(tmp_path / "lock") as alone:
        assert alone

    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without)
    with locked_if_possible(tmp_path / "lock") as alone:
        assert not alone


RACER = """
import sys
from pathlib import Path
from zeroforget.data.cache import decoded
from zeroforget.data.values import Treatment
from zeroforget.data.readers.folders import read_folder
listing, heard = read_folder(Path(sys.argv[1])), []
print("ready", flush=True)
sys.stdin.readline()
treatment = Treatment(32, fit="cover")
images = decoded("photos", listing, treatment, lambda *told: heard.append(told), official=False)
print(int(images.long().sum()), len(heard))
"""


def test_two_processes_at_once_share_one_entry(photos: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(photos)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:  # both stand at the line
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate()[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert answers[0][0] == answers[1][0] == str(int(load_folder(photos, 32).images.long().sum()))
    assert sorted(heard for _, heard in answers) == ["0", "1"]  # one decoded, the other waited for it
    assert len(entries(tmp_path)) == 1


def test_without_locks_the_first_to_finish_wins(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks: another process finishes the same entry while this one is still at it."""
    monkeypatch.setattr(cache, "locked_if_possible", lambda path: contextlib.nullcontext(False))
    listing, rounds = read_folder(photos), []

    def meanwhile(*told: object) -> None:
        if not rounds:
            rounds.append(told)
            rounds.append(decoded("photos", listing, Treatment(32)))

    images = decoded("photos", listing, Treatment(32), meanwhile)
    assert torch.equal(images, rounds[1])
    assert len(entries(tmp_path)) == 1


def test_a_killed_process_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "big"
    for number in range(60):
        helpers.picture(folder / f"class{number % 2}" / f"{number}.jpg", number, (900, 700))
    script = (
        "import sys; from zeroforget.data import decode, load_folder\n"
        "decode.CHUNK = 20\n"
        "load_folder(sys.argv[1], 400, lambda *told: (print(*told, flush=True), sys.stdin.readline()))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], **pipes) as process:
        assert process.stdout.readline() == "decoding big 20 60\n"  # it waits to be told to go on
        process.kill()
    kept = tmp_path / "cache"
    assert len(list(kept.glob("*.part-*/images.npy"))) == 1
    assert not [path for path in kept.glob("big-*") if path.is_dir() and ".part-" not in path.name]
    images = load_folder(folder, 400).images
    assert images.shape == (60, 3, 400, 400)
    assert [path.name for path in kept.iterdir() if ".part-" in path.name] == []


def test_digits_need_no_cache(tmp_path: Path) -> None:
    assert len(load("digits")) == 1797
    assert not (tmp_path / "cache").exists()


def test_photographs_in_a_folder_stand_upright(tmp_path: Path) -> None:
    """Left half black; the camera notes that it was turned by a quarter."""
    canvas = Image.new("RGB", (32, 32), (255, 255, 255))
    canvas.paste((0, 0, 0), (0, 0, 16, 32))
    note = Image.Exif()
    note[0x0112] = 6
    (tmp_path / "turned" / "a").mkdir(parents=True)
    canvas.save(tmp_path / "turned" / "a" / "0.jpg", quality=100, exif=note)
    upright = load_folder(tmp_path / "turned", 32).images[0].float()
    assert upright[:, :8].mean() < 5
    assert upright[:, -8:].mean() > 250
    plain = decode(str(tmp_path / "turned" / "a" / "0.jpg"), 32)
    assert plain[:, :, :8].mean() < 5


def test_a_flipped_byte_is_noticed_named_and_not_used(photos: Path, tmp_path: Path) -> None:
    first = load_folder(photos, 32).images.clone()
    file = entries(tmp_path)[0] / "images.npy"
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    heard: list[str] = []
    again = load_folder(photos, 32, lambda what, done, total: heard.append(what)).images
    assert f"{file.parent} is damaged (its sha256 differs) and is not used" in heard[0]
    assert torch.equal(again, first)
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize("name", ["images.npy", "about.json"])
def test_a_pipe_in_an_entry_is_damage_and_nothing_waits_for_it(photos: Path, tmp_path: Path, name: str) -> None:
    first = load_folder(photos, 32).images.clone()
    (entries(tmp_path)[0] / name).unlink()
    os.mkfifo(entries(tmp_path)[0] / name)
    assert torch.equal(load_folder(photos, 32).images, first)


def test_an_entry_that_was_written_without_a_checksum_is_used(photos: Path, tmp_path: Path) -> None:
    load_folder(photos, 32)
    about = entries(tmp_path)[0] / "about.json"
    values = json.loads(about.read_bytes())
    del values["sha256"]
    about.write_text(json.dumps(values))
    heard: list[str] = []
    load_folder(photos, 32, lambda what, done, total: heard.append(what))
    assert heard == []
