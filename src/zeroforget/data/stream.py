"""Reading pictures out of shards while something learns from them: decoders beside, and remote shards kept on disk."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zeroforget.data.cache import cache_folder
from zeroforget.data.decode import Bytes, Damage, Item, Manner, ask, decode_chunk, worker
from zeroforget.data.values import DataError
from zeroforget.files.atomic import replacing
from zeroforget.files.hashes import Digest, hash_of_file, sha256

PIECE = 32
"""So many pictures are decoded by a worker at a time."""
FEW = 8
"""So many are decoded right here: to ask a worker would take as long."""
BOUND_VARIABLE = "ZEROFORGET_SHARD_CACHE"
BOUND_GB = 50.0
AHEAD = 32
"""So many remote shards are fetched before they are needed."""
TRIES = 3
_BLOCK = 2**22


# Decoders ------------------------------------------------------------------------------------------------------------


class _Decoder:
    """A process that decodes, and the memory that it decodes into."""

    def __init__(self) -> None:
        self.process = worker()
        self._held: dict[tuple[int, ...], tuple[str, Bytes, Any]] = {}

    def decode(self, out: Bytes, items: Sequence[Item], manner: Manner) -> list[Damage]:
        """Into `out`, through memory that both processes see."""
        path, array, _ = self._memory(out.shape[1:])
        damaged = ask(self.process, path, manner, 0, items)
        out[:] = array[: len(out)]
        return damaged

    def _memory(self, shape: tuple[int, ...]) -> tuple[str, Bytes, Any]:
        if shape not in self._held:
            if hasattr(os, "memfd_create"):  # has no name, and no bound but memory's
                file: Any = open(os.memfd_create("pictures"), "r+b")  # noqa: SIM115, PTH123
                path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            else:
                file = tempfile.NamedTemporaryFile(suffix=".npy")  # noqa: SIM115
                path = file.name
            array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(PIECE, *shape))
            self._held[shape] = path, array, file
        return self._held[shape]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        for *_, file in self._held.values():
            file.close()


class Decoders:
    """As many processes that decode as there are cores for this one; they begin when they are first needed."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.count = max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        self._threads = ThreadPoolExecutor(self.count, "decoders")
        self._idle: queue.SimpleQueue[_Decoder | None] = queue.SimpleQueue()
        self._all: list[_Decoder] = []
        for _ in range(self.count):
            self._idle.put(None)
        atexit.register(self.end)

    def fill(self, out: Bytes, items: Sequence[Item], manner: Manner) -> list[Damage]:
        """Decode all items into the rows of `out`; what cannot be decoded is told."""
        if len(items) <= FEW:
            return decode_chunk(out, 0, items, manner)
        size = min(PIECE, -(-len(items) // self.count))
        starts = range(0, len(items), size)
        pieces = [
            self._threads.submit(self._piece, out[start : start + size], items[start : start + size], manner)
            for start in starts
        ]
        return [damage for piece in pieces for damage in piece.result()]

    def _piece(self, out: Bytes, items: Sequence[Item], manner: Manner) -> list[Damage]:
        decoder = self._idle.get()
        try:
            if decoder is None:
                decoder = _Decoder()
                self._all.append(decoder)
            return decoder.decode(out, items, manner)
        except OSError:  # it died; another one takes its place
            if decoder is not None:
                decoder.end()
                self._all.remove(decoder)
                decoder = None
            raise
        finally:
            self._idle.put(decoder)

    def end(self) -> None:
        """End the processes."""
        self._threads.shutdown(cancel_futures=True)
        for decoder in self._all:
            decoder.end()
        self._all.clear()


_decoders: dict[int, Decoders] = {}
_making = threading.Lock()


def decoders() -> Decoders:
    """Those of this process."""
    with _making:
        if os.getpid() not in _decoders:
            _decoders[os.getpid()] = Decoders()
        return _decoders[os.getpid()]


# Where shards lie ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """A tar file of pictures, as the index knows it."""

    file: str
    bytes: int
    sha256: str
    images: int


def local(address: str | os.PathLike[str]) -> Path | None:
    """The folder that an address names on this machine; None for another protocol."""
    text = os.fspath(address).removeprefix("file://")
    return None if "://" in text else Path(text).expanduser()


@contextlib.contextmanager
def _reached(address: str) -> Iterator[None]:
    """Around what fsspec does: whatever goes wrong is told with the address."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{address} is missing") from error
    except (OSError, ImportError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{address} cannot be read: {error}") from error


def read(address: str, file: str, most: int) -> bytes:
    """A file at an address, of at most so many bytes."""
    if (folder := local(address)) is not None:
        with _reached(str(folder / file)), (folder / file).open("rb") as opened:
            content = opened.read(most + 1)
    else:
        with _reached(f"{address}/{file}"):
            import fsspec

            system, root = fsspec.core.url_to_fs(address)
            with system.open(f"{root}/{file}", "rb") as opened:
                content = opened.read(most + 1)
    if len(content) > most:
        raise DataError(f"{address}/{file} is longer than {most} bytes")
    return content


def kept() -> Path:
    """The folder of what came from elsewhere, by its sha256."""
    return cache_folder() / "shards"


def bound() -> float:
    """So many bytes of shards from elsewhere are kept."""
    text = os.environ.get(BOUND_VARIABLE, "")
    try:
        return (float(text) if text else BOUND_GB) * 1e9
    except ValueError:
        raise DataError(f"{BOUND_VARIABLE} is '{text}'; it should be a number of gigabytes, such as 50") from None


def fetch(address: str, shard: Shard) -> Path:
    """A file from elsewhere, on this disk; DataError unless its sha256 is the index's."""
    place = kept() / f"{shard.sha256}.tar"
    with contextlib.suppress(FileNotFoundError):
        os.utime(place)  # it was used now
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    digest, done = Digest(), 0
    with replacing(place, aside):
        with _reached(f"{address}/{shard.file}"):
            import fsspec

            system, root = fsspec.core.url_to_fs(address)
            with system.open(f"{root}/{shard.file}", "rb") as remote, aside.open("wb") as file:
                while (block := remote.read(_BLOCK)) and done <= shard.bytes:
                    done += file.write(block)
                    digest.update(block)
        if digest.hexdigest() != shard.sha256:
            raise changed(f"{address}/{shard.file}", shard, done)
    return place


def changed(path: str, shard: Shard, size: int) -> DataError:
    """Said of a shard that is not what it was."""
    why = "its sha256 differs" if size == shard.bytes else f"it has {size} bytes, not {shard.bytes}"
    return DataError(f"{path} is not the shard that the index speaks of ({why}); bring it back, or index it anew")


@dataclass(eq=False)
class Store:
    """The shards of one index, wherever they lie."""

    address: str
    shards: Sequence[Shard]
    _known: set[int] = field(default_factory=set)
    _used: Counter[int] = field(default_factory=Counter)
    _order: dict[int, int] = field(default_factory=dict)
    _coming: dict[int, Future[Path]] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)
    _threads: ThreadPoolExecutor | None = None

    def check(self) -> None:
        """DataError if a shard on this machine is missing, or has another size."""
        if (folder := local(self.address)) is None:
            return
        for shard in self.shards:
            with _reached(str(folder / shard.file)):
                size = (folder / shard.file).stat().st_size
            if size != shard.bytes:
                raise changed(str(folder / shard.file), shard, size)

    @contextlib.contextmanager
    def paths(self, numbers: Sequence[int]) -> Iterator[dict[int, str]]:
        """Shard → its file on this disk, which stays there inside."""
        with self._lock:
            self._used.update(numbers)
        try:
            yield {number: str(self._path(number)) for number in numbers}
        finally:
            with self._lock:
                self._used.subtract(numbers)

    def expect(self, numbers: Sequence[int]) -> None:
        """Shards in the order in which they are going to be needed."""
        with self._lock:
            self._order = {number: place for place, number in enumerate(numbers)}

    def _path(self, number: int) -> Path:
        shard = self.shards[number]
        if (folder := local(self.address)) is not None:
            self._verify(folder / shard.file, number)
            return folder / shard.file
        with self._lock:
            wanted = [number]
            if (place := self._order.get(number)) is not None:
                wanted += list(self._order)[place + 1 : place + AHEAD]
            if self._threads is None:
                self._threads = ThreadPoolExecutor(4, "shards")
                weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
            for each in wanted:
                if each not in self._coming:
                    self._coming[each] = self._threads.submit(self._fetch, each)
            coming = self._coming[number]
        try:
            path = coming.result()
        except BaseException:
            with self._lock:
                self._coming.pop(number, None)
            raise
        if not path.exists():  # it made room for another one
            path = self._fetch(number)
        return path

    def _fetch(self, number: int) -> Path:
        path = fetch(self.address, self.shards[number])
        self._make_room(number)
        return path

    def _make_room(self, number: int) -> None:
        """Remove what was not used for longest, beyond the bound."""
        with self._lock:
            needed = {self.shards[each].sha256 for each, users in self._used.items() if users > 0}
        needed.add(self.shards[number].sha256)
        found = []
        for file in kept().glob("*.tar"):
            with contextlib.suppress(OSError):
                state = file.stat()
                found.append((state.st_mtime, state.st_size, file))
        left = sum(size for _, size, _ in found) - bound()
        for _, size, file in sorted(found):
            if left <= 0:
                break
            if file.stem not in needed:
                file.unlink(missing_ok=True)
                left -= size

    def _verify(self, path: Path, number: int) -> None:
        """A shard's sha256, once; what was found is noted beside the cache, with its size and time of change."""
        if number in self._known:
            return
        shard = self.shards[number]
        with _reached(str(path)):
            state = path.stat()
            key = sha256(f"{path.resolve()} {state.st_size} {state.st_mtime_ns} {shard.sha256}".encode())
            note = kept() / "verified" / key[:32]
            if not note.exists():
                if state.st_size != shard.bytes or hash_of_file(path) != shard.sha256:
                    raise changed(str(path), shard, state.st_size)
                with contextlib.suppress(OSError):
                    note.parent.mkdir(parents=True, exist_ok=True)
                    note.touch()
        self._known.add(number)
