"""What `zeroforget scenarios` and `zeroforget data` print, run as a user runs them."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.data import helpers
from zeroforget.cli import app
from zeroforget.data.sources import SOURCES, Source


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFORGET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ZEROFORGET_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "120")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_scenarios_say_what_is_ready(tmp_path: Path) -> None:
    helpers.flowers(tmp_path / "data" / "flowers")
    rows = {line.split()[0]: line.split()[1:] for line in run("scenarios").splitlines() if "/" in line.split(" ")[0]}
    assert rows["digits/5"] == ["5", "10", "1,442", "355", "ready"]
    assert rows["flowers/4"] == ["4", "102", "2,040", "6,149", "ready"]
    assert rows["tiny-imagenet/large-first"] == ["10", "200", "100,000", "10,000", "needs", "tiny-imagenet"]
    assert rows["imagenet/10"][:4] == ["10", "1,000", "1,281,167", "50,000"]
    assert "multi 6 705 32,205 30,189 needs scenes, birds, cars, aircraft, actions" in " ".join(
        run("scenarios").split()
    )


def test_data_root_is_an_option(tmp_path: Path) -> None:
    helpers.mnist(tmp_path / "elsewhere" / "mnist")
    assert re.search(r"^mnist +10 +60,000 +10,000 +no", run("data"), re.MULTILINE)
    assert re.search(r"^mnist .* yes ", run("data", "--data-root", str(tmp_path / "elsewhere")), re.MULTILINE)


def test_status_of_a_data_set(tmp_path: Path) -> None:
    output = run("data", "flowers")
    assert "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/102flowers.tgz" in output
    assert "md5:52808999861908f626f3c1f4e79d11fa" in output
    assert "lacks jpg, imagelabels.mat, setid.mat" in output
    helpers.flowers(tmp_path / "data" / "flowers")
    assert f"on this disk: {tmp_path / 'data' / 'flowers'}" in run("data", "flowers")
    assert f"not on this disk: {tmp_path / 'x' / 'flowers'} lacks" in run(
        "data", "flowers", "--data-root", str(tmp_path / "x")
    )
    assert "no checksum known" in run("data", "actions")
    assert "ready" in run("data", "digits", "--download")


def test_prepare_decodes_and_counts(tmp_path: Path) -> None:
    helpers.flowers(tmp_path / "data" / "flowers")
    output = run("data", "flowers", "--prepare")
    assert "flowers: 4 classes, 12 training and 12 test images" in output
    assert "this copy differs" in output
    assert len(list((tmp_path / "cache").glob("flowers-*/images.npy"))) == 1
    assert "differs" not in run("data", "digits", "--prepare")


def test_a_damaged_image_is_named_on_one_line(tmp_path: Path) -> None:
    root = tmp_path / ("a long name " * 9)
    helpers.flowers(root / "flowers")
    damaged = root / "flowers" / "jpg" / "image_00003.jpg"
    damaged.write_bytes(b"x")
    told = CliRunner().invoke(app, ["data", "flowers", "--prepare", "--data-root", str(root)])
    assert isinstance(told.exception, ValueError)
    assert f"{damaged} cannot be decoded" in told.stderr


def test_download_fetches_verifies_and_is_done_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.mnist(tmp_path / "site")
    handler = partial(QuietHandler, directory=str(tmp_path / "site"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    archives = tuple(
        replace(archive, url=f"{address}/{archive.file}", mirror="", checksum=_md5(tmp_path / "site" / archive.file))
        for archive in SOURCES["mnist"].archives
    )
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], archives=archives))
    try:
        assert f"mnist: ready in {tmp_path / 'data' / 'mnist'}" in run("data", "mnist", "--download")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "mnist: ready" in run("data", "mnist", "--download")
    assert "mnist: 10 classes, 60 training and 20 test images" in run("data", "mnist", "--prepare")
    assert "officially it has 10 classes, 60,000 and 10,000 images: this copy differs" in run(
        "data", "mnist", "--prepare"
    )


def test_what_lies_elsewhere_is_not_fetched_and_archives_are_kept_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Path, bool]] = []

    def download(entry: Source, root: Path, progress: object, keep: bool, insecure: bool) -> None:
        assert not insecure
        asked.append((entry.name, root, keep))
        helpers.mnist(root / "mnist")

    monkeypatch.setattr("zeroforget.data.download.download", download)
    monkeypatch.setenv("ZEROFORGET_DATA", f"{tmp_path / 'first'}:{tmp_path / 'second'}")
    helpers.mnist(tmp_path / "second" / "mnist")
    assert f"mnist: ready in {tmp_path / 'second' / 'mnist'}" in run("data", "mnist", "--download")
    assert asked == []
    shutil.rmtree(tmp_path / "second")
    run("data", "mnist", "--download", "--keep")
    assert asked == [("mnist", tmp_path / "first", True)]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def _md5(path: Path) -> str:
    return f"md5:{hashlib.md5(path.read_bytes()).hexdigest()}"


def test_mistakes_are_errors_of_the_user(tmp_path: Path) -> None:
    for arguments, message in (
        (["data", "flower"], "did you mean 'flowers'"),
        (["data", "--download"], "say which data set"),
        (["data", "flowers", "--prepare"], "is not on this disk"),
        (["data", "imagenet", "--download"], "ask for access"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, ValueError)
        assert message in str(result.exception)


def test_shards_are_packed_and_indexed_and_told(tmp_path: Path) -> None:
    for label, name in enumerate(("cats", "dogs")):
        for row in range(4):
            helpers.picture(tmp_path / "photos" / name / f"{row}.jpg", 10 * label + row)
    (tmp_path / "photos" / "cats" / "4.jpg").write_bytes(b"\xff\xd8\xff")
    out = tmp_path / "shards"
    told = run("data", "pack", str(tmp_path / "photos"), "--out", str(out), "--workers", "1")
    assert f"left out: {tmp_path / 'photos' / 'cats' / '4.jpg'} cannot be decoded" in told
    assert f"{out}: 8 pictures of 2 classes in 2 shards, 0.0 MB; learn from them as shards:{out}" in told
    (out / "index.json").unlink()
    (tmp_path / "names.txt").write_text("cats\ndogs\n")
    told = run("data", "index", str(out), "--classes", str(tmp_path / "names.txt"), "--workers", "1")
    assert "8 pictures of 2 classes in 2 shards" in told
