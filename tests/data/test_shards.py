"""Shards: the same pictures, splits and training as from a folder; packed, indexed, damaged, hostile, far away."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from zeroforget.data import DataError, Scenario, load, pack, scenario, shard_worker, shards, stream
from zeroforget.data import decode as decode_module
from zeroforget.data.pack import index_shards
from zeroforget.data.shards import InShards, open_index
from zeroforget.data.tars import BadTar, members
from zeroforget.files.json_fields import sealed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFORGET_CACHE", str(tmp_path / "cache"))


def draw(seed: int, size: tuple[int, int]) -> Image.Image:
    noise = np.random.RandomState(seed).randint(0, 256, (size[1] // 4, size[0] // 4, 3), np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def photos(folder: Path, each: int = 6) -> Path:
    """Three classes of JPEG and PNG, one of them turned, one transparent, in two shapes."""
    for label, name in enumerate(("cats", "dogs", "owls")):
        (folder / name).mkdir(parents=True)
        for row in range(each):
            image = draw(10 * label + row, (40, 24) if row % 2 else (24, 36))
            if row == 2:
                image.putalpha(128)
                image.save(folder / name / "two.png")
            elif row == 3:
                exif = Image.Exif()
                exif[0x0112] = 6
                image.save(folder / name / "three.jpg", quality=90, exif=exif)
            else:
                image.save(folder / name / f"{row}.jpg", quality=90)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return photos(tmp_path / "photos")


def packed(folder: Path, out: Path, **options: Any) -> str:
    pack.pack(str(folder), out, **{"per_shard": 4, "workers": 1} | options)
    return f"shards:{out}"


def same(one: Scenario, other: Scenario) -> None:
    assert one.shape == other.shape
    for mine, theirs in zip(one.tasks, other.tasks, strict=True):
        assert (mine.name, mine.classes, mine.prepare) == (theirs.name, theirs.classes, theirs.prepare)
        for part in ("train", "val", "test"):
            here, there = getattr(mine, part), getattr(theirs, part)
            index = torch.arange(len(here)).flip(0)
            assert len(here) == len(there)
            for x, y in zip(here.batch(index), there.batch(index), strict=True):
                assert x.dtype == y.dtype
                assert torch.equal(x, y)


def test_shards_give_the_tasks_splits_and_pixels_of_their_folder(folder: Path, tmp_path: Path) -> None:
    name = packed(folder, tmp_path / "photos-in-shards")
    options = {"name": "photos", "names": ["photos"], "size": 16}
    same(
        scenario({"data": f"folder:{folder}", **options}, seed=3),
        scenario({"data": name, **options}, seed=3),
    )
    assert len(open_index(str(tmp_path / "photos-in-shards")).shards) == 5
    assert not (tmp_path / "photos-in-shards" / pack.WORK).exists()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "digits"
    pack.pack("digits", out, per_shard=1000, workers=1)
    return out


def test_data_sets_without_files_are_packed_as_png_and_cut_into_tasks(digits: Path, tmp_path: Path) -> None:
    same(scenario("digits/5"), scenario({"name": "digits/5", "data": f"shards:{digits}", "tasks": 5, "shuffle": False}))
    assert len(scenario(f"shards:{digits}/5").tasks) == 5
    (tmp_path / "some" / "5").mkdir(parents=True)
    with pytest.raises(DataError, match="some/5 holds no shards"):
        scenario(f"shards:{tmp_path}/some/5")


def test_boxes_and_parts_for_validation_survive(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for part in ("train", "val", "test"):
        photos(tmp_path / "parts" / part, {"train": 5, "val": 1, "test": 2}[part])
    name = packed(tmp_path / "parts", tmp_path / "out")
    one, other = load(f"folder:{tmp_path / 'parts'}", size=16), load(name, size=16)
    assert one.val is not None
    assert other.val is not None
    for part in ("labels", "test", "val"):
        assert torch.equal(getattr(one, part), getattr(other, part).to(getattr(one, part).dtype))


def test_stored_at_its_size_a_picture_is_a_jpeg_that_need_not_be_changed(folder: Path, tmp_path: Path) -> None:
    found = load(packed(folder, tmp_path / "out", jpeg=95, size=16), size=99)
    assert found.shape == (3, 16, 16)
    plain = load(f"folder:{folder}", size=16)
    away = (found.images[:].int() - plain.images[:].int()).abs().float().mean()
    assert 0 < away < 12
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        assert {Path(name).suffix for name in tar.getnames()} == {".jpg", ".cls"}


def test_an_interrupted_packing_goes_on_to_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(folder, tmp_path / "whole")
    calls, real = [], shard_worker.done

    def dies(job: shard_worker.Job) -> shard_worker.Job:
        calls.append(job["path"])
        if len(calls) == 3:
            raise OSError("the disk is full")
        return real(job)

    monkeypatch.setattr(shard_worker, "done", dies)
    with pytest.raises(OSError, match="full"):
        packed(folder, tmp_path / "out")
    with pytest.raises(DataError, match="the beginning of another packing"):
        packed(folder, tmp_path / "out", per_shard=5)
    before = len(calls)
    packed(folder, tmp_path / "out")
    assert len(calls) - before == 3  # two of five were there
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    with pytest.raises(DataError, match="holds shards already"):
        packed(folder, tmp_path / "out")


def test_processes_pack_what_one_packs(folder: Path, tmp_path: Path) -> None:
    packed(folder, tmp_path / "one")
    packed(folder, tmp_path / "two", workers=2)
    for file in sorted((tmp_path / "one").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_one_bad_picture_costs_one_picture_and_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "cats" / "4.jpg").write_bytes((folder / "cats" / "4.jpg").read_bytes()[:200])
    packed(folder, tmp_path / "out")
    index = open_index(str(tmp_path / "out"))
    assert len(index.rows) == 17
    ((name, why),) = index.left_out
    assert name == str(folder / "cats" / "4.jpg")
    assert "cannot be decoded" in why


def test_images_are_decoded_by_processes_as_they_are_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = load(packed(folder, tmp_path / "out"), size=16).images
    assert isinstance(images, InShards)
    rows = torch.arange(18).flip(0)
    here = torch.cat([images.index_select(0, part) for part in rows.split(stream.FEW)])
    used = stream.Decoders()
    monkeypatch.setattr(shards, "decoders", lambda: used)
    try:
        assert torch.equal(images.index_select(0, rows), here)
        assert torch.equal(pickle.loads(pickle.dumps(images)).index_select(0, rows), here)
        assert used._all
        used._all[0].process.kill()
        with pytest.raises(OSError, match="died"):
            [images.index_select(0, rows) for _ in range(4)]
        assert torch.equal(images.index_select(0, rows), here)  # another one took its place
    finally:
        used.end()


# Mistakes ------------------------------------------------------------------------------------------------------------


def test_a_changed_shard_is_noticed(folder: Path, tmp_path: Path) -> None:
    name = packed(folder, tmp_path / "out")
    shard = tmp_path / "out" / "train-000001.tar"
    content = shard.read_bytes()
    shard.write_bytes(content[:700] + bytes([content[700] ^ 1]) + content[701:])
    with pytest.raises(DataError, match=r"train-000001.tar is not the shard .* sha256 differs"):
        load(name).images[:]
    shard.write_bytes(content[:-512])
    with pytest.raises(DataError, match=r"it has \d+ bytes, not \d+"):
        load(name)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-000001.tar is missing"):
        load(name)


def test_mistakes_with_the_index_are_told(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    name = packed(folder, out)
    text, rows = (out / "index.json").read_bytes(), (out / "index.rows").read_bytes()
    (out / "index.json").write_bytes(text.replace(b"cats", b"bats"))
    with pytest.raises(DataError, match="does not match its seal"):
        load(name)
    (out / "index.json").write_bytes(text)
    (out / "index.rows").write_bytes(rows[:-1] + b"\x07")
    with pytest.raises(DataError, match="sha256 differs"):
        load(name)
    (out / "index.json").unlink()
    with pytest.raises(DataError, match="data index"):
        load(name)
    with pytest.raises(DataError, match="is missing; name a folder of shards"):
        load(f"shards:{tmp_path / 'nothing'}")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("file", "../../secret.tar", "no name of a file beside the index"),
        ("file", "/etc/passwd", "no name of a file beside the index"),
        ("sha256", "x", "form of its kind"),
        ("bytes", 10, "leads outside of the shards"),
    ],
)
def test_an_index_that_is_made_as_a_trap_is_refused(
    folder: Path, tmp_path: Path, key: str, value: object, said: str
) -> None:
    name = packed(folder, tmp_path / "out")
    path = tmp_path / "out" / "index.json"
    values = json.loads(path.read_bytes())
    del values["seal"]
    values["shards"][0][key] = value
    path.write_bytes(sealed(values))
    with pytest.raises(DataError, match=said):
        load(name)


# Tars of others ------------------------------------------------------------------------------------------------------


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    draw(seed, (24, 24)).save(file, "JPEG")
    return file.getvalue()


def tar(path: Path, files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as out:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_tars_that_webdataset_wrote_are_indexed(tmp_path: Path, form: int) -> None:
    long = "" if form == tarfile.USTAR_FORMAT else "d" * 150
    for part, start in (("train-0", 0), ("train-1", 8), ("val-0", 16)):
        files = {}
        for row in range(start, start + 8):
            files[f"deep/{long}{row}.jpg"] = jpeg(row)
            files[f"deep/{long}{row}.cls"] = str(row % 2).encode()
            files[f"deep/{long}{row}.json"] = b"{}"
        tar(tmp_path / f"{part}.tar", files, form)
    index_shards(tmp_path, classes=["even", "odd"], workers=1)
    found = load(f"shards:{tmp_path}", size=24)
    assert found.classes == ("even", "odd")
    assert found.test.tolist() == [False] * 16 + [True] * 8
    assert found.labels.tolist() == [row % 2 for row in range(24)]
    pixels = np.asarray(Image.open(io.BytesIO(jpeg(9))).convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(found.images[torch.tensor([9])][0], pixels)


def test_what_is_no_picture_with_a_label_is_left_out_by_name(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "a.tar",
        {
            **{f"{row}{ending}": content for row in range(8) for ending, content in
               ((".jpg", jpeg(row)), (".cls", str(row % 2).encode()))},
            "lost.jpg": jpeg(0), "odd.jpg": jpeg(0), "odd.cls": b"-7", "bad.jpg": b"\xff\xd8\xffno", "bad.cls": b"1",
            "two.jpg": jpeg(0), "two.png": jpeg(1), "two.cls": b"1", "none.jpg": b"", "none.cls": b"1",
        },
    )  # fmt: skip
    with tarfile.open(path, "a") as out:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"trap{kind!r}.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            out.addfile(info)
    found = index_shards(tmp_path, workers=1).index
    assert len(found.rows) == 9
    told = {name.rpartition(": ")[2]: why for name, why in found.left_out}
    assert "has no .cls" in told["lost.jpg"]
    assert "no number of a class" in told["odd.cls"]
    assert "cannot be decoded" in told["bad.jpg"]
    assert "second picture" in told["two.png"]
    assert "0 bytes" in told["none.jpg"]
    assert sum("no regular file" in why for why in told.values()) == 4


def header(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo("0.jpg")
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cut off"),
        (header(100), "cut off"),
        (header(512) + bytes(512), "without the empty block"),
        (header(2**60), "should have"),
        (header(2**20, tarfile.XHDTYPE) + bytes(2**20 + 1024), "notes of 1048576 bytes"),
        (header(20, tarfile.XHDTYPE) + b"9999 size=1\n".ljust(512, b"\0"), "cannot be read"),
        (b"\x01" * 512, "no tar, or damaged"),
        (header(0, tarfile.GNUTYPE_LONGNAME)[:-600], "cut off"),
    ],
)
def test_damaged_and_hostile_tars_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(BadTar, match=said):
        list(members(io.BytesIO(content), len(content)))
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=said):
        index_shards(tmp_path, workers=1)


# Far away ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def far(folder: Path, tmp_path: Path) -> Iterator[str]:
    packed(folder, tmp_path / "out")
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path / 'out'}/", "/bucket/", recursive=True)
    yield "memory://bucket"
    memory.rm("/bucket", recursive=True)


def test_shards_far_away_are_kept_on_disk_under_a_bound(
    far: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = load(f"folder:{folder}", size=16)
    found = load(f"shards:{far}", size=16)
    assert isinstance(found.images, InShards)
    found.images.expect(torch.arange(18))
    assert torch.equal(found.images[:], near.images[:])
    sizes = [file.stat().st_size for file in stream.kept().glob("*.tar")]
    assert len(sizes) == 5
    monkeypatch.setenv(stream.BOUND_VARIABLE, str(1.5 * max(sizes) / 1e9))
    for file in stream.kept().glob("*.tar"):
        file.unlink()
    images = load(f"shards:{far}", size=16).images
    for row in range(18):
        assert torch.equal(images[torch.tensor([row])], near.images[torch.tensor([row])])
        assert sum(file.stat().st_size for file in stream.kept().glob("*.tar")) <= 2 * max(sizes)
    monkeypatch.setenv(stream.BOUND_VARIABLE, "much")
    with pytest.raises(DataError, match="number of gigabytes"):
        stream.bound()


def test_a_shard_far_away_that_changed_is_refused_and_not_kept(far: str, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    content = memory.cat_file("/bucket/train-000000.tar")
    for changed in (content[:-1] + b"\x01", content + b"more", content[:-512]):
        memory.pipe_file("/bucket/train-000000.tar", changed)
        with pytest.raises(DataError, match=r"memory://bucket/train-000000.tar is not the shard"):
            load(f"shards:{far}", size=16).images[:]
    assert not list(stream.kept().glob("*.part"))
    memory.pipe_file("/bucket/train-000000.tar", content)
    assert len(load(f"shards:{far}", size=16).images[:]) == 18
    with pytest.raises(DataError, match="cannot be read"):
        load("shards:nosuch://bucket")


# Size ----------------------------------------------------------------------------------------------------------------


def test_listing_an_image_takes_forty_bytes_at_the_most(digits: Path) -> None:
    """The index's columns, the collection's marks, and the rows and labels of the splits."""
    found = load(f"shards:{digits}")
    (task,) = scenario(f"shards:{digits}").tasks
    rows = open_index(str(digits)).rows
    held = sum(column.nbytes for column in vars(rows).values()) + found.test.nbytes
    held += sum(part.rows.nbytes + part.labels.nbytes for part in (task.train, task.val, task.test))
    assert held / len(rows) <= 40
    assert (digits / "index.rows").stat().st_size == 21 * len(rows)


# The quicker decoder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", ["stretch", "cover"])
def test_simplejpeg_gives_the_bits_of_pillow(fit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed; whatever it cannot do is Pillow's."""
    pytest.importorskip("simplejpeg")
    for seed, size in enumerate([(60, 41), (32, 32), (200, 90)]):
        for mode in ("RGB", "L", "CMYK"):
            for subsampling in (0, 1, 2):
                file = io.BytesIO()
                image = draw(seed, size).convert(mode)
                image.save(file, "JPEG", quality=85, **({} if mode == "L" else {"subsampling": subsampling}))
                box = (3, 4, 40, 30) if subsampling == 1 and fit == "stretch" else None
                swift = decode_module.decode(file, 32, box, fit=fit)
                with monkeypatch.context() as without:
                    without.setattr(decode_module, "_simplejpeg", lambda: None)
                    assert np.array_equal(swift, decode_module.decode(file, 32, box, fit=fit)), (
                        size,
                        mode,
                        subsampling,
                    )
    file = io.BytesIO(jpeg(0)[:300])
    with pytest.raises(OSError, match=r"(?i)truncated"):
        decode_module.decode(file, 32, fit=fit)
