"""Archives that try to write elsewhere are refused, and nothing of them stays."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import random
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import SEED, many
from zeroforget.data import extract
from zeroforget.data.extract import unpack, unpack_nested
from zeroforget.data.values import DataError


def tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for member, body in members:
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return path


def plain(name: str) -> tarfile.TarInfo:
    return tarfile.TarInfo(name)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


EVIL_NAMES = ("../out", "a/../../out", "/tmp/zeroforget-out", "..\\out", "C:\\out", "C:out", "\\out", "a/..")


@pytest.mark.parametrize("name", EVIL_NAMES)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_paths_that_lead_outside_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / f"evil.{kind}"
    if kind == "tar":
        tar(path, (plain("good"), b"good"), (plain(name), b"evil"))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("good", "good")
            member = zipfile.ZipInfo("x")
            member.filename = name
            archive.writestr(member, "evil")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="leads outside"):
        unpack(path, tmp_path / "into")
    assert sorted(tmp_path.iterdir()) == before
    assert not Path("/tmp/zeroforget-out").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    path = tar(tmp_path / "evil.tar", (link("way", str(outside), kind), b""), (plain("way/file"), b"evil"))
    with pytest.raises(DataError, match="'way' is a link or a device"):
        unpack(path, tmp_path / "into")
    assert not list(outside.iterdir())
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_links_and_devices_in_a_zip_are_refused(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        member = zipfile.ZipInfo("way")
        member.external_attr = (kind | 0o777) << 16
        archive.writestr(member, "/etc")
    with pytest.raises(DataError, match="'way' is a link"):
        unpack(path, tmp_path / "into")


@pytest.mark.parametrize("name", ["cut.tar", "cut.zip", "cut.tgz"])
def test_a_broken_archive_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a", b"a" * 5000)
    else:
        with tarfile.open(path, "w:gz" if name.endswith("tgz") else "w") as archive:
            for letter in "abcdefgh":
                member = tarfile.TarInfo(letter)
                member.size = 5000
                archive.addfile(member, io.BytesIO(letter.encode() * 5000))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=f"{name} cannot be unpacked"):
        unpack(path, tmp_path / "into")
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_not_the_archives_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, open_ = tar(tmp_path / "good.tar", (plain("a"), b"a")), Path.open

    def full(self: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        if "w" in mode or "x" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_(self, mode, *given, **named)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DataError, match=r"good\.tar cannot be unpacked: .*No space left.*; make room") as told:
        unpack(path, tmp_path / "into")
    assert "delete" not in str(told.value)


@pytest.mark.parametrize("harm", [lambda raw: raw[:1536], lambda raw: raw[:1024] + b"x" * 512 + raw[1536:]])
def test_a_tar_that_ends_in_a_header_is_not_taken_for_whole(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    path = tar(tmp_path / "cut.tar", *((plain(name), b"x" * 500) for name in "abc"))
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(DataError, match=r"cut\.tar cannot be unpacked"):
        unpack(path, tmp_path / "into")


def test_an_inner_archive_takes_no_room_once_it_is_unpacked(tmp_path: Path) -> None:
    inner = [tar(tmp_path / f"{name}.tar", (plain("image"), b"x")) for name in "abc"]
    outer = tar(tmp_path / "outer.tar", *((plain(path.name), path.read_bytes()) for path in inner))
    left: list[int] = []
    unpack_nested(
        outer, tmp_path / "train", lambda what, done, total: left.append(len(list(tmp_path.glob(".un*/outer/*"))))
    )
    assert left[-3:] == [2, 1, 0]
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == ["a", "b", "c"]


def test_what_is_there_already_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "into"
    (target / "a").mkdir(parents=True)
    (target / "a" / "mine").write_text("mine")
    path = tar(tmp_path / "good.tar", (plain("a/new"), b"new"), (plain("b/new"), b"new"))
    unpack(path, target)
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert found == ["a/mine", "a/new", "b/new"]


def test_a_small_archive_does_not_become_a_large_folder(tmp_path: Path) -> None:
    """A sparse tar of ten kilobytes, and a zip whose members share their bytes."""
    sparse = plain("big")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**28)}
    with tarfile.open(tmp_path / "sparse.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        body = b"1\n268435455\n1\n".ljust(512, b"\0") + b"x"
        sparse.size = len(body)
        archive.addfile(sparse, io.BytesIO(body))
    assert (tmp_path / "sparse.tar").stat().st_size < 20_000
    with zipfile.ZipFile(tmp_path / "zeros.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for place in range(80):
            file.writestr(f"{place}", bytes(2**20))
    for name in ("sparse.tar", "zeros.zip"):
        with pytest.raises(DataError, match="is refused: it unpacks to more than"):
            unpack(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".unpacking-*"))


def test_archives_have_a_limit_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "MOST_FILES", 3)
    tar(tmp_path / "a.tar", *((plain(f"{place}"), b"") for place in range(4)))
    with pytest.raises(DataError, match="holds more than 3 files"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_what_stands_before_a_file_is_bounded(tmp_path: Path, kind: bytes) -> None:
    """A long name, or notes, are read into memory whole: 900 bytes of bz2 could make that gigabytes."""
    name = plain("long")
    name.type, name.size = kind, 2**23
    content = name.tobuf(tarfile.GNU_FORMAT) + bytes(2**23) + plain("x").tobuf() + bytes(1024)
    (tmp_path / "bomb.tar.bz2").write_bytes(bz2.compress(content))
    with pytest.raises(DataError, match="what stands before one of its files is too long"):
        unpack(tmp_path / "bomb.tar.bz2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_holes_of_a_sparse_file_are_bounded(tmp_path: Path) -> None:
    """Millions of them, in a kilobyte of gzip, would each be a number in memory."""
    sparse = plain("x")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "100"}
    sparse.size = 2**23
    content = sparse.tobuf(tarfile.PAX_FORMAT) + b"2000000\n" + b"0\n" * 2**22
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="what stands before one of its files is too long"):
        unpack(tmp_path / "bomb.tar.gz", tmp_path / "out")


def test_many_files_of_a_small_archive_take_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "ALWAYS", 2**18)
    (tmp_path / "bomb.tar.bz2").write_bytes(bz2.compress(plain("a").tobuf() * 600 + bytes(1024)))
    with pytest.raises(DataError, match="unpacks to more than 262,144 bytes"):
        unpack(tmp_path / "bomb.tar.bz2", tmp_path / "out")


def test_archives_in_an_archive_share_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "ALWAYS", 2**20)
    inner = tmp_path / "inner.tar.bz2"
    inner.write_bytes(bz2.compress(tar(tmp_path / "plain.tar", (plain("zeros"), bytes(2**19))).read_bytes()))
    outer = tar(tmp_path / "outer.tar", *((plain(f"{place}.tar"), inner.read_bytes()) for place in range(4)))
    with pytest.raises(DataError, match="unpacks to more than"):
        unpack_nested(outer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_of_a_method_that_knows_no_bound_is_refused(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as file:
        file.writestr("a", bytes(1000))
    with pytest.raises(DataError, match="is packed by another method than zips are; unpack it by hand"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.parametrize("packed", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_tars_are_read_out_of_whatever_they_are_packed_in(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    path = tar(tmp_path / "a.tar", *((plain(f"{'long' * 40}/{place}"), b"x" * place) for place in range(600)))
    path.write_bytes(packed(path.read_bytes()))
    unpack(path, tmp_path / "out")
    assert sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file()) == 600 * 599 // 2


def test_a_member_without_a_name_is_told_as_ours(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("name", b"x")
    content = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(content.replace(b"name", b"\0ame"))
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_some_odd_archives(tmp_path: Path) -> None:
    odd_archives(tmp_path, 200, seed=0)


@pytest.mark.soak
def test_many_odd_archives(tmp_path: Path) -> None:
    odd_archives(tmp_path, many(4000), seed=1 + SEED)


def odd_archives(base: Path, tries: int, seed: int) -> None:
    """Archives with damage of every kind: unpacked or refused in our words, and nothing is left elsewhere."""
    draw = random.Random(seed)
    members = [(plain(f"{'d' * place}/{place}"), bytes(place * 40)) for place in range(1, 60, 7)]
    packers: tuple[Callable[[bytes], bytes], ...] = (bytes, gzip.compress, bz2.compress, lzma.compress)
    whole = [packed(tar(base / "a.tar", *members).read_bytes()) for packed in packers]
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(base / "a.zip", "w", method) as file:
            for member, body in members:
                file.writestr(member.name, body)
        whole.append((base / "a.zip").read_bytes())
    (base / "here").mkdir()
    for number in range(tries):
        content = bytearray(draw.choice(whole))
        for _ in range(draw.choice((1, 2, 8))):
            spot, way = draw.randrange(max(1, len(content))), draw.randrange(3)
            if way == 0 and content:
                content[spot] = draw.choice((draw.randrange(256), 0, 255, 47, 46))
            elif way == 1:
                content[spot:spot] = draw.randbytes(draw.randrange(1, 30))
            else:
                del content[spot : spot + draw.choice((1, 30, 512))]
        (base / "here" / "odd").write_bytes(content)
        try:
            unpack(base / "here" / "odd", base / "here" / "out")
        except DataError:
            assert not (base / "here" / "out").exists()
        except Exception as error:
            raise AssertionError(f"seed {seed}, try {number}") from error
        shutil.rmtree(base / "here" / "out", ignore_errors=True)
        assert [place.name for place in (base / "here").iterdir()] == ["odd"], (seed, number)


def test_what_a_decoder_says_is_told_as_ours(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as archive:
        member = plain("a")
        member.size = 100_000
        archive.addfile(member, io.BytesIO(random.Random(0).randbytes(100_000)))
    content = bytearray((tmp_path / "a.tar.xz").read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / "a.tar.xz").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "locked.zip", "w") as file:
        file.writestr("a", b"secret")
    content = bytearray((tmp_path / "locked.zip").read_bytes())
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(content)
    strange = bytearray(content)
    strange[6] &= 254
    strange[strange.index(b"PK\x01\x02") + 8] &= 254
    strange[8] = strange[strange.index(b"PK\x01\x02") + 10] = 99
    (tmp_path / "strange.zip").write_bytes(strange)
    for name in ("a.tar.xz", "locked.zip", "strange.zip"):
        with pytest.raises(DataError, match="cannot be unpacked"):
            unpack(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists()
