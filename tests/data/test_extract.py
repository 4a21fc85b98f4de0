"""Archives that try to write elsewhere are refused, and nothing of them stays."""

from __future__ import annotations

import errno
import io
import random
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroforget.data import extract
from zeroforget.data.collection import DataError
from zeroforget.data.extract import unpack, unpack_nested


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
