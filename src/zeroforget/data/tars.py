"""Tar files of pictures with their labels, as WebDataset writes them: `key.jpg`, then `key.cls` with a number.

Whoever made a tar may have made it badly, or as a trap. So only regular members count, nothing is unpacked, names and
sizes are bounded, and a file that ends too early is refused.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Protocol

from zeroforget.data.decode import ENDINGS

BLOCK = tarfile.BLOCKSIZE
MOST_PICTURE = 2**28
"""Bytes of a picture; a longer one is left out."""
MOST_LABEL = 64
MOST_NAME = 2**16
"""Bytes of a name, and of the notes before a member."""
LABEL = ".cls"
_REGULAR = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
_LONG_NAME, _NOTES = {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}, {tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE}


class BadTar(ValueError):
    """A tar file is not one, or not whole."""


@dataclass(frozen=True)
class Member:
    """A regular file in a tar: where its bytes begin, and how many there are."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Sample:
    """A picture in a tar, and its label."""

    name: str
    start: int
    size: int
    label: int


def members(file: IO[bytes], length: int, skipped: list[tuple[str, str]] | None = None) -> Iterator[Member]:
    """The regular members of a tar file of this length, in order; BadTar if it is damaged or cut off. What is not
    regular (folders apart) is named in `skipped`."""
    place, name, size = 0, None, None
    while True:
        file.seek(place)
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise BadTar(f"is cut off: it ends after {length} bytes, without the empty block that ends a tar")
        if block == bytes(BLOCK):
            return
        try:
            head = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise BadTar(f"is no tar, or damaged at byte {place}: {error}") from None
        own = head.size if size is None else size
        start, place = place + BLOCK, place + BLOCK + -(-own // BLOCK) * BLOCK
        if own < 0 or start + own > length:
            raise BadTar(f"is cut off: '{head.name}' should have {own} bytes from byte {start} on")
        if head.type in _LONG_NAME or head.type in _NOTES:
            if own > MOST_NAME:
                raise BadTar(f"has notes of {own} bytes before a member at byte {start}; {MOST_NAME} are the most")
            notes = file.read(own)
            if head.type == tarfile.GNUTYPE_LONGNAME:
                name = notes.rstrip(b"\0").decode(errors="surrogateescape")
            elif head.type in _NOTES:
                name, size = _noted(notes, start)
            continue
        if head.type in _REGULAR:
            yield Member(head.name if name is None else name, start, own)
        elif head.type not in {tarfile.DIRTYPE, tarfile.XGLTYPE} and skipped is not None:
            skipped.append((head.name if name is None else name, "is a link or another thing that is no regular file"))
        name = size = None


def _noted(notes: bytes, place: int) -> tuple[str | None, int | None]:
    """The name and the size of the member that follows, where the notes before it tell them."""
    found: dict[bytes, bytes] = {}
    while notes:
        length, space, _ = notes.partition(b" ")
        if not (space and length.isdigit() and len(length) < int(length) <= len(notes)):
            raise BadTar(f"is damaged at byte {place}: what it notes of the next member cannot be read")
        key, _, value = notes[len(length) + 1 : int(length) - 1].partition(b"=")
        found[key], notes = value, notes[int(length) :]
    size = found.get(b"size", b"")
    if size and not size.isdigit():
        raise BadTar(f"is damaged at byte {place}: it notes a size that is no number")
    return found[b"path"].decode(errors="surrogateescape") if b"path" in found else None, int(size) if size else None


def samples(file: IO[bytes], length: int, left_out: list[tuple[str, str]]) -> Iterator[Sample]:
    """The pictures that have a label, in order. What has none, or is not as it should be, is named in `left_out`."""
    picture: Member | None = None
    label: int | None = None
    key = ""

    def done() -> Iterator[Sample]:
        if picture is not None and label is None:
            left_out.append((picture.name, f"has no {LABEL} beside it with the number of its class"))
        elif picture is not None and label is not None:
            yield Sample(picture.name, picture.start, picture.size, label)

    for member in members(file, length, left_out):
        own, ending = split_name(member.name)
        if own != key:
            yield from done()
            key, picture, label = own, None, None
        if ending == LABEL:
            label = _label(file, member, left_out)
        elif ending in ENDINGS and picture is not None:
            left_out.append((member.name, f"is a second picture beside {picture.name}"))
        elif ending in ENDINGS and not 0 < member.size <= MOST_PICTURE:
            left_out.append((member.name, f"has {member.size} bytes; a picture has 1 to {MOST_PICTURE}"))
        elif ending in ENDINGS:
            picture = member
    yield from done()


def split_name(name: str) -> tuple[str, str]:
    """A member's key and ending, as WebDataset splits them: at the first dot of the last part of the path."""
    folder, slash, base = name.rpartition("/")
    key, dot, ending = base.partition(".")
    return folder + slash + key, (dot + ending).lower()


def _label(file: IO[bytes], member: Member, left_out: list[tuple[str, str]]) -> int | None:
    text = b""
    if member.size <= MOST_LABEL:
        file.seek(member.start)
        text = file.read(member.size).strip()
    if text.isdigit() and int(text) < 2**31:
        return int(text)
    left_out.append((member.name, "holds no number of a class, from 0 on"))
    return None


class Writable(Protocol):
    """What bytes can be written to."""

    def write(self, content: bytes, /) -> int: ...


class Writer:
    """Writes a tar file of pictures and labels that is the same to the bit whenever, and by whom, it is written."""

    def __init__(self, file: Writable) -> None:
        self._file, self._place = file, 0

    def add(self, key: str, ending: str, picture: bytes, label: int) -> tuple[int, int]:
        """A picture and its label; returns where its bytes begin and how many there are."""
        start = self._member(f"{key}{ending}", picture)
        self._member(f"{key}{LABEL}", str(label).encode())
        return start, len(picture)

    def end(self) -> int:
        """End the tar; returns its length."""
        self._write(bytes(2 * BLOCK))
        return self._place

    def _member(self, name: str, content: bytes) -> int:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        self._write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        start = self._place
        self._write(content + bytes(-len(content) % BLOCK))
        return start

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._place += len(content)


def name_at(path: str, start: int) -> str:
    """The name of the member whose bytes begin there, for a message."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            file.seek(start - BLOCK)
            return tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "backslashreplace").name
    except (OSError, tarfile.HeaderError):
        return f"the picture at byte {start}"


def length_of(file: IO[bytes]) -> int:
    """How many bytes an opened file has."""
    return file.seek(0, io.SEEK_END)


__all__ = ["BadTar", "Member", "Sample", "Writer", "length_of", "members", "name_at", "samples", "split_name"]
