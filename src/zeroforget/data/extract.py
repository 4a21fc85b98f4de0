"""Unpacks archives and trusts none: nothing is written outside the folder, no link and no device is made, and the files
appear in their place only when all of them are there."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath
from tarfile import EOFHeaderError, HeaderError, ReadError  # type: ignore[attr-defined]
from typing import IO, Any, Self

from zeroforget.data.values import DataError, OnRead

EVERY = 500
_BLOCK = 2**20
MOST_BYTES = 2**40
"""What an archive may unpack to; ImageNet is 150 GB."""
MOST_FILES = 20_000_000
MOST_RATIO = 200
"""How many times its own size an archive may unpack to; pictures hardly shrink, and plain numbers ten times."""
ALWAYS = 2**26
"""So many bytes are few, whatever they come from."""
MOST_HEADER = 2**21
"""Of what stands before a file in a tar: a long name, notes, the holes of a sparse one. All of it is held in memory."""
_PACKED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open, b"]\0\0": lzma.open}
"""How compressed tars begin."""


def unpack(archive: Path, target: Path, progress: OnRead | None = None) -> None:
    """Unpack a tar (plain or compressed) or a zip into a folder, over what is there."""
    home = target if target.is_dir() else target.parent
    home.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=home))
    try:
        (aside / "all").mkdir()
        _contents(archive, aside / "all", progress)
        _place(aside / "all", target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def unpack_nested(archive: Path, target: Path, progress: OnRead | None = None) -> None:
    """Unpack an archive of archives, each into a folder of its own name (as ImageNet's training images come)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target.parent))
    try:
        (aside / "outer").mkdir()
        room = _Room(archive)
        _contents(archive, aside / "outer", progress)
        inner = sorted((aside / "outer").iterdir())
        for done, path in enumerate(inner, 1):
            (aside / "inner" / path.stem).mkdir(parents=True)
            _contents(path, aside / "inner" / path.stem, None, room)
            path.unlink()
            if progress:
                progress(f"unpacking {archive.name}", done, len(inner))
        _place(aside / "inner", target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class _Room:
    """What an archive may still unpack to. Sparse files, and files that are there again and again, cost it nothing to
    hold and a disk to unpack."""

    def __init__(self, archive: Path) -> None:
        self.archive, self.bytes, self.files = archive, 0, 0
        self.most = min(MOST_BYTES, max(ALWAYS, MOST_RATIO * archive.stat().st_size))

    def file(self) -> None:
        """Count one file or folder."""
        self.files += 1
        if self.files > MOST_FILES:
            raise DataError(f"{self.archive} is refused: it holds more than {MOST_FILES:,} files")

    def copy(self, source: IO[bytes], target: IO[bytes]) -> None:
        """Write a file, as far as there is room."""
        while block := source.read(_BLOCK):
            self.bytes += len(block)
            self.check(self.bytes)
            target.write(block)

    def check(self, size: int) -> None:
        """DataError if there is no room for so many bytes."""
        if size > self.most:
            raise DataError(
                f"{self.archive} is refused: it unpacks to more than {self.most:,} bytes, too many for its size"
            )


class _Bounded:
    """A tar that is read as it is unpacked, but no further than there is room, and no header longer than they are."""

    def __init__(self, file: IO[bytes], room: _Room) -> None:
        self.file, self.room, self.header = file, room, MOST_HEADER
        """What may still be read before the next file begins."""

    def read(self, size: int) -> bytes:
        """So many bytes from here on."""
        self.header -= size
        if self.header < 0:
            raise DataError(f"{self.room.archive} is refused: what stands before one of its files is too long")
        self.room.check(self.file.tell() + size)
        return self.file.read(size)

    def seek(self, place: int) -> int:
        """Go on from there; what lies between is unpacked, too."""
        self.room.check(place)
        return self.file.seek(place)

    def tell(self) -> int:
        """How much is read."""
        return self.file.tell()


def _contents(archive: Path, into: Path, progress: OnRead | None, room: _Room | None = None) -> None:
    """Unpack one archive, within a room of its own or that of the one it came from."""
    try:
        room = room or _Room(archive)
        (_from_zip if zipfile.is_zipfile(archive) else _from_tar)(archive, into, progress, room)
    except DataError:
        raise
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        remedy = "make room and call this again" if full else "delete it and download it again"
        raise DataError(f"{archive} cannot be unpacked: {error}; {remedy}") from error
    except Exception as error:  # locked, packed in another way, or whatever else Python's readers stumble over
        raise DataError(f"{archive} cannot be unpacked: {error}; unpack it by hand") from error


def safe_name(name: str, archive: Path) -> PurePosixPath:
    """A member's path, or an error if it would lead out of the folder it is unpacked in."""
    path = PurePosixPath(name)
    windows = PureWindowsPath(name)
    if path.is_absolute() or windows.drive or windows.root or ".." in path.parts or ".." in windows.parts:
        raise DataError(f"{archive} is refused: its member '{name}' leads outside the folder it is unpacked in")
    return path


class _Whole(tarfile.TarInfo):
    """tarfile takes a header cut short or overwritten for the end of the archive; only the mark of the end is one."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:
            raise
        except HeaderError as error:
            raise ReadError(f"{error} at byte {tarfile.offset}") from error


def _opened(archive: Path) -> IO[bytes]:
    """The tar itself, out of whatever it is packed in."""
    with archive.open("rb") as file:
        start = file.read(8)
    how = next((how for magic, how in _PACKED.items() if start.startswith(magic)), Path.open)
    packed: IO[bytes] = how(archive, "rb")
    return packed


def _from_tar(archive: Path, into: Path, progress: OnRead | None, room: _Room) -> None:
    size = archive.stat().st_size
    with _opened(archive) as packed:
        bounded = _Bounded(packed, room)
        with tarfile.open(fileobj=bounded, mode="r:", tarinfo=_Whole) as tar:  # type: ignore[call-overload]
            for count, member in enumerate(iter(tar.next, None)):
                tar.members.clear()  # it would keep them all
                bounded.header = MOST_BYTES
                _from_member(tar, member, into / safe_name(member.name, archive), room)
                bounded.header = MOST_HEADER
                if progress and count % EVERY == 0:
                    progress(f"unpacking {archive.name}", min(member.offset_data, size), size)


def _from_member(tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path, room: _Room) -> None:
    room.file()
    if member.isdir():
        place.mkdir(parents=True, exist_ok=True)
        return
    source = tar.extractfile(member) if member.isreg() else None
    if source is None:
        raise DataError(f"{room.archive} is refused: its member '{member.name}' is a link or a device, not a file")
    place.parent.mkdir(parents=True, exist_ok=True)
    with source, place.open("wb") as file:
        room.copy(source, file)


def _from_zip(archive: Path, into: Path, progress: OnRead | None, room: _Room) -> None:
    with zipfile.ZipFile(archive) as file:
        members = file.infolist()
        for count, member in enumerate(members):
            if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                # Python unpacks these without a bound: 100 bytes could become a hundred megabytes in memory.
                raise NotImplementedError(f"its member '{member.filename}' is packed by another method than zips are")
            place = into / safe_name(member.filename, archive)
            room.file()
            kind = member.external_attr >> 28  # of a Unix mode: 8 a file, 4 a folder, 10 a link
            if kind not in (0, 4, 8):
                raise DataError(
                    f"{archive} is refused: its member '{member.filename}' is a link or a device, not a file"
                )
            if member.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with file.open(member) as source, place.open("wb") as target:
                room.copy(source, target)
            if progress and count % EVERY == 0:
                progress(f"unpacking {archive.name}", count, len(members))


def _place(source: Path, target: Path) -> None:
    """A folder that is not there yet appears whole: whoever finds it may take the unpacking for done."""
    if target.is_dir():
        _merge(source, target)
    else:
        source.rename(target)


def _merge(source: Path, target: Path) -> None:
    """Move everything over: whole folders where the target has none, file by file where it has."""
    for path in sorted(source.iterdir()):
        place = target / path.name
        if place.is_dir() and path.is_dir():
            _merge(path, place)
        else:
            path.replace(place)
