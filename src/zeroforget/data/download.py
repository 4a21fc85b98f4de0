"""Fetches official archives: resumes what broke off, verifies what came, unpacks it, and leaves nothing half done."""

from __future__ import annotations

import http.client
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from zeroforget.data.extract import unpack, unpack_nested
from zeroforget.data.sources import Archive, Source
from zeroforget.data.values import DataError, OnRead
from zeroforget.files.atomic import replace
from zeroforget.files.hashes import hash_of_file
from zeroforget.files.locks import locked_if_possible

ATTEMPTS = 5
PAUSE_S = 1.0
TIMEOUT_S = 30.0
BLOCK = 1 << 18
BROKEN = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


def download(
    entry: Source, root: Path, progress: OnRead | None = None, keep: bool = False, insecure: bool = False
) -> Path:
    """Bring a data set under `root` and return its folder. Archives already there are used, and never deleted; those
    fetched are deleted once unpacked unless `keep`. `insecure`: also over plain http if no checksum is known. What an
    earlier call finished is not done again."""
    folder = root / entry.folders[0].partition("/")[0]
    folder.mkdir(parents=True, exist_ok=True)
    with locked_if_possible(root / f".{entry.name}.lock") as alone:
        if alone:  # what a killed process left half unpacked
            for left in (*folder.glob(".unpacking-*"), *folder.glob("*/.unpacking-*")):
                shutil.rmtree(left, ignore_errors=True)
        for archive in entry.archives:
            if not (folder / archive.gives).exists():
                _obtain(entry, archive, folder, progress, keep, insecure)
    return folder


def _obtain(entry: Source, archive: Archive, folder: Path, progress: OnRead | None, keep: bool, insecure: bool) -> None:
    path = folder / archive.file
    fetched = not path.exists()
    if fetched:
        if not archive.url:
            raise DataError(f"{path} is missing; {entry.by_hand}, put the file there and call this again")
        fetch([archive.url, *filter(None, [archive.mirror])], path, archive.checksum, progress, insecure)
    elif archive.checksum:
        verify(path, archive.checksum, progress)
    if archive.unpack:
        _unpacked(archive, path, folder, progress)
        if fetched and not keep:
            path.unlink()


def _unpacked(archive: Archive, path: Path, folder: Path, progress: OnRead | None) -> None:
    target = folder / archive.into
    if archive.nested:
        unpack_nested(path, target, progress)
    else:
        unpack(path, target, progress)
    if not (folder / archive.gives).exists():
        raise DataError(
            f"{path} was unpacked, but {folder / archive.gives} is not there; its layout is not the official"
        )


def fetch(
    urls: Sequence[str],
    path: Path,
    checksum: str | None,
    progress: OnRead | None = None,
    insecure: bool = False,
) -> None:
    """Download to a file from the first address that answers; the file appears only when it is whole and verified.

    Over plain http anybody on the way may put another file in its place: that needs a checksum, or `insecure`.
    """
    if not checksum and not insecure:
        plain = [url for url in urls if not _is_safe(url)]
        urls = [url for url in urls if _is_safe(url)]
        if not urls:
            raise DataError(
                f"{path.name} comes from {plain[0]} over plain http, and no checksum of it is known: anybody on the "
                f"way could put another in its place. Put {path} there yourself, or take it as it comes with --insecure"
            )
    part = path.with_name(path.name + ".part")
    reasons = []
    for url in urls:
        try:
            _persist(url, part, progress)
            break
        except BROKEN as error:
            reasons.append(f"{url}: {error}")
    else:
        raise DataError(f"cannot download {path.name} ({'; '.join(reasons)}); try again later, what has come is kept")
    try:
        if checksum:
            verify(part, checksum, progress)
    except DataError:
        part.unlink()
        raise
    finally:
        _tag(part).unlink(missing_ok=True)
    replace(part, path)


def _is_safe(url: str) -> bool:
    """Whether nobody on the way can change what comes: over https, from a file, or from this very machine."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme != "http" or parts.hostname in {"127.0.0.1", "localhost", "::1"}


def _persist(url: str, part: Path, progress: OnRead | None) -> None:
    """Try again where the line broke, from where it broke. Attempts count only while nothing new comes."""
    left = ATTEMPTS
    while True:
        before = _size(part)
        try:
            return _transfer(url, part, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and before:
                if error.headers.get("Content-Range") == f"bytes */{before}":
                    return None  # all of it had come before
                part.unlink()
            elif error.code not in (408, 429, 500, 502, 503, 504):
                raise
            failure: Exception = error
        except BROKEN as error:
            failure = error
        left = ATTEMPTS if _size(part) > before else left - 1
        if left == 0:
            raise failure
        time.sleep(PAUSE_S)


def _transfer(url: str, part: Path, progress: OnRead | None) -> None:
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "zeroforget"})
    tag = _tag(part)
    if have and tag.exists():  # only a server that told what it sent can tell whether the rest belongs to it
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", tag.read_text())
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        resumed = answer.status == http.client.PARTIAL_CONTENT
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else 0
        mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        if mark and not mark.startswith("W/"):
            tag.write_text(mark)
        else:
            tag.unlink(missing_ok=True)
        with part.open("ab" if resumed else "wb") as file:
            while block := answer.read(BLOCK):
                file.write(block)
                have += len(block)
                if progress:
                    progress(f"downloading {part.stem}", have, total)
    if total and have != total:
        raise http.client.IncompleteRead(b"", total - have)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag(part: Path) -> Path:
    return part.with_name(part.name + ".tag")


def verify(path: Path, checksum: str, progress: OnRead | None = None) -> None:
    """Compare a file with a checksum written as `md5:...`, `sha1:...` or `sha256:...`."""
    algorithm, _, expected = checksum.partition(":")
    total = path.stat().st_size

    def told(done: int) -> None:
        if progress:
            progress(f"verifying {path.name.removesuffix('.part')}", done, total)

    found = hash_of_file(path, algorithm, told)
    if found != expected:
        raise DataError(f"{path} is damaged: its {algorithm} is {found}, not {expected}; delete it and download again")
