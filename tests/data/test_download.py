"""Downloads against a real server on this machine that knows ranges, breaks off, refuses and lies on request."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from zeroforget.data import download as downloading
from zeroforget.data.download import download, fetch, verify
from zeroforget.data.loading import find
from zeroforget.data.sources import SOURCES, Archive, Source
from zeroforget.data.values import DataError, Pixels

BODY = bytes(range(256)) * 4000


@dataclass
class Site:
    files: dict[str, bytes]
    breaks: int = 0
    ranges: bool = True
    tag: str = '"one"'
    refuses: int = 0
    refusal: int = 503
    tells_size: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def site() -> Iterator[Site]:
    state = Site({"/a.bin": BODY})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted))
            if state.refuses:
                state.refuses -= 1
                self.send_error(state.refusal)
                return
            if self.path not in state.files:
                self.send_error(404)
                return
            body = state.files[self.path]
            start = 0
            if wanted and state.ranges and self.headers.get("If-Range") == state.tag:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    self.send_response(416)
                    if state.tells_size:
                        self.send_header("Content-Range", f"bytes */{len(body)}")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(body) - start))
            self.send_header("ETag", state.tag)
            self.end_headers()
            rest = body[start:]
            if state.breaks:
                state.breaks -= 1
                rest = rest[: len(rest) // 3]
            self.wfile.write(rest)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "PAUSE_S", 0.0)


def md5(body: bytes) -> str:
    return f"md5:{hashlib.md5(body).hexdigest()}"


def test_it_goes_on_where_the_line_broke(site: Site, tmp_path: Path) -> None:
    site.breaks = 2
    heard: list[tuple[str, int, int]] = []
    fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY), lambda *told: heard.append(told))
    assert (tmp_path / "a.bin").read_bytes() == BODY
    third = len(BODY) // 3
    assert [asked for _, asked in site.asked] == [None, f"bytes={third}-", f"bytes={third + (len(BODY) - third) // 3}-"]
    assert ("downloading a.bin", len(BODY), len(BODY)) in heard
    assert ("verifying a.bin", len(BODY), len(BODY)) in heard
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_another_call_resumes_what_an_earlier_one_left(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloading, "ATTEMPTS", 1)
    site.breaks = 1
    site.files["/b.bin"] = BODY

    class Enough(Exception):
        pass

    def stop(what: str, done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY), stop)
    kept = (tmp_path / "a.bin.part").stat().st_size
    assert 0 < kept < len(BODY)
    site.breaks = 0
    fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY))
    assert site.asked[-1][1] == f"bytes={kept}-"
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_a_file_that_changed_on_the_server_is_fetched_from_its_start(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(b"old" * 50)
    (tmp_path / "a.bin.part.tag").write_text('"older"')
    fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", None)
    assert (tmp_path / "a.bin").read_bytes() == BODY


def arrived(tmp_path: Path, body: bytes, tag: str) -> None:
    """What a process leaves that is killed while it downloads, or before it could verify what came."""
    (tmp_path / "a.bin.part").write_bytes(body)
    (tmp_path / "a.bin.part.tag").write_text(tag)


def test_what_had_come_as_a_whole_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    arrived(tmp_path, BODY, site.tag)
    fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY))
    assert [asked for _, asked in site.asked] == [f"bytes={len(BODY)}-"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("more", [b"", b"more than there is"])
def test_where_no_rest_is_to_be_had_it_begins_anew(site: Site, tmp_path: Path, more: bytes) -> None:
    arrived(tmp_path, BODY + more, site.tag)
    site.tells_size = bool(more)
    fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY))
    assert [asked for _, asked in site.asked] == [f"bytes={len(BODY + more)}-", None]


def test_a_weak_mark_does_not_tell_whether_the_rest_belongs_to_it(site: Site, tmp_path: Path) -> None:
    site.tag, site.breaks = 'W/"one"', 1
    fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY))
    assert [asked for _, asked in site.asked] == [None, None]


def test_attempts_count_only_while_nothing_comes(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "ATTEMPTS", 2)
    site.breaks = 4
    fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY))
    assert len(site.asked) == 5
    site.refuses = 2
    with pytest.raises(DataError, match=r"cannot download b\.bin .*503"):
        fetch([f"{site.url}/a.bin"], tmp_path / "b.bin", None)
    assert len(site.asked) == 7


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(site: Site, tmp_path: Path, status: int) -> None:
    site.refuses, site.refusal = 1, status
    fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY))
    assert len(site.asked) == 2


def test_a_server_without_ranges_sends_all_again(site: Site, tmp_path: Path) -> None:
    site.ranges, site.breaks = False, 1
    fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY))
    assert (tmp_path / "a.bin").read_bytes() == BODY


def test_a_busy_server_is_asked_again_and_a_mirror_after_a_missing_file(site: Site, tmp_path: Path) -> None:
    site.refuses = 2
    fetch([f"{site.url}/gone.bin", f"{site.url}/a.bin"], tmp_path / "a.bin", md5(BODY))
    assert [path for path, _ in site.asked] == ["/gone.bin", "/gone.bin", "/gone.bin", "/a.bin"]


def test_no_server_is_a_plain_error(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot download x\.bin .*404.*try again later"):
        fetch([f"{site.url}/x.bin"], tmp_path / "x.bin", None)
    assert not list(tmp_path.iterdir())


def test_a_wrong_checksum_leaves_no_file(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.bin\.part is damaged: its sha1 is .*download again"):
        fetch([f"{site.url}/a.bin"], tmp_path / "a.bin", f"sha1:{'0' * 40}")
    assert not list(tmp_path.iterdir())


def test_verify_knows_its_algorithms(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    verify(path, "md5:900150983cd24fb0d6963f7d28e17f72")
    verify(path, "sha1:a9993e364706816aba3e25717850c26c9cd0d89d")
    with pytest.raises(DataError, match="md5 is 900150983cd24fb0d6963f7d28e17f72"):
        verify(path, "md5:0")


def tar_of(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, body in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return buffer.getvalue()


def never(folder: Path) -> Pixels:
    raise AssertionError("not read here")


def test_a_data_set_of_several_archives_arrives_whole_and_only_once(site: Site, tmp_path: Path) -> None:
    packed = tar_of(jpg__a=b"a", jpg__b=b"b")
    split = zip_of({"lists/": b"", "lists/train.txt": b"a\n"})
    site.files |= {"/images.tgz": packed, "/lists.zip": split, "/labels.mat": b"mat"}
    entry = replace(
        SOURCES["flowers"],
        name="toy",
        read=never,
        folders=("toy",),
        needs=("jpg", "lists", "labels.mat"),
        archives=(
            Archive("images.tgz", f"{site.url}/images.tgz", md5(packed), "jpg"),
            Archive("lists.zip", f"{site.url}/lists.zip", None, "lists"),
            Archive("labels.mat", f"{site.url}/labels.mat", md5(b"mat"), "labels.mat", unpack=False),
        ),
    )
    assert find(entry, tmp_path) is None
    assert download(entry, tmp_path) == tmp_path / "toy"
    assert find(entry, tmp_path) == tmp_path / "toy"
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == ["jpg", "labels.mat", "lists"]
    assert (tmp_path / "toy" / "jpg" / "b").read_bytes() == b"b"
    before = len(site.asked)
    download(entry, tmp_path)
    assert len(site.asked) == before


def toy(*archives: Archive) -> Source:
    return replace(SOURCES["flowers"], name="toy", read=never, folders=("toy",), needs=("jpg",), archives=archives)


def test_what_was_fetched_may_be_kept_and_may_come_from_a_mirror(site: Site, tmp_path: Path) -> None:
    packed = tar_of(jpg__a=b"a")
    site.files["/mirror.tgz"] = packed
    archive = Archive("a.tgz", f"{site.url}/gone.tgz", md5(packed), "jpg", mirror=f"{site.url}/mirror.tgz")
    left = tmp_path / "toy" / ".unpacking-x"
    left.mkdir(parents=True)
    download(toy(archive), tmp_path, keep=True)
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == ["a.tgz", "jpg"]
    assert [path for path, _ in site.asked] == ["/gone.tgz", "/mirror.tgz"]


def test_an_archive_of_another_layout_is_told(site: Site, tmp_path: Path) -> None:
    site.files["/a.tgz"] = tar_of(pictures__a=b"a")
    with pytest.raises(DataError, match=r"was unpacked, but .*jpg is not there; its layout is not the official"):
        download(toy(Archive("a.tgz", f"{site.url}/a.tgz", None, "jpg")), tmp_path)


def test_a_folder_is_there_only_when_all_of_it_was_unpacked(tmp_path: Path) -> None:
    """Else the next call would take it for done."""
    whole = tar_of(**{f"{place}.JPEG": bytes(9000) for place in range(9)})
    path = tmp_path / "imagenet" / "val.tar"
    path.parent.mkdir()
    entry = replace(SOURCES["imagenet"], archives=(Archive("val.tar", "", None, "val", into="val"),))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be unpacked"):
        download(entry, tmp_path)
    assert [each.name for each in path.parent.iterdir()] == ["val.tar"]
    path.write_bytes(whole)
    download(entry, tmp_path)
    assert len(list((tmp_path / "imagenet" / "val").iterdir())) == 9


def test_archives_put_there_by_hand_are_verified_unpacked_and_kept(tmp_path: Path) -> None:
    inner = tar_of(n01440764_1=b"fish")
    outer = tar_of(**{"n01440764.tar": inner})
    folder = tmp_path / "imagenet"
    folder.mkdir()
    official = SOURCES["imagenet"]
    archive = Archive("train.tar", "", md5(outer), "train", into="train", nested=True)
    entry = replace(official, archives=(archive,))
    with pytest.raises(DataError, match=r"train\.tar is missing; ask for access at .*put the file there"):
        download(entry, tmp_path)
    (folder / "train.tar").write_bytes(outer + b"x")
    with pytest.raises(DataError, match="is damaged"):
        download(entry, tmp_path)
    (folder / "train.tar").write_bytes(outer)
    download(entry, tmp_path)
    assert (folder / "train" / "n01440764" / "n01440764_1").read_bytes() == b"fish"
    assert (folder / "train.tar").exists()


def test_plain_http_needs_a_checksum_or_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "ATTEMPTS", 1)
    monkeypatch.setattr(downloading, "PAUSE_S", 0.0)
    url = "http://nosuch.invalid/a.zip"
    with pytest.raises(DataError, match=r"over plain http, and no checksum of it is known.*--insecure"):
        fetch([url], tmp_path / "a.zip", None)
    assert not list(tmp_path.iterdir())
    for checksum, insecure in (("sha256:0", False), (None, True)):
        with pytest.raises(DataError, match=r"cannot download a\.zip"):  # it was tried
            fetch([url], tmp_path / "a.zip", checksum, insecure=insecure)
