"""Pictures in shards: tar files as WebDataset writes them, and an index that says what lies where.

The index keeps the order in which a data set is listed, so a scenario cut from shards has the tasks, the splits and the
pixels of the same data in a folder. Of each image it holds 21 bytes, which are mapped into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeroforget._version import __version__
from zeroforget.data.decode import Item, decode_chunk
from zeroforget.data.stream import TRIES, Shard, Store, decoders, kept, local, read
from zeroforget.data.tars import MOST_PICTURE, name_at
from zeroforget.data.values import Collection, DataError, Images, Preparation, Treatment
from zeroforget.files.atomic import write_bytes
from zeroforget.files.hashes import hash_of_file, sha256
from zeroforget.files.json_fields import MOST_BYTES, FieldError, Fields, sealed, unsealed

INDEX, ROWS = "index.json", "index.rows"
FORMAT = 1
MOST_SHARDS, MOST_IMAGES, MOST_SIDE = 10**6, 2**33, 4096
PARTS = ("train", "val", "test")
COLUMNS: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in (("start", "<i8"), ("size", "<i4"), ("label", "<i4"), ("shard", "<i4"), ("part", "u1"))
}
"""Of each image: its first byte in its shard, how many there are, its class, its shard, its part."""
WIDTH = sum(kind.itemsize for kind in COLUMNS.values())


@dataclass(frozen=True, eq=False)
class Rows:
    """What the index knows of each image, a column each."""

    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int32]
    label: npt.NDArray[np.int32]
    shard: npt.NDArray[np.int32]
    part: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.start)

    @staticmethod
    def of(columns: Mapping[str, Any]) -> Rows:
        """Out of anything that numpy makes arrays of."""
        return Rows(**{name: np.ascontiguousarray(columns[name], kind) for name, kind in COLUMNS.items()})

    @staticmethod
    def mapped(path: Path, count: int) -> Rows:
        """From their file, nothing read before it is used."""
        raw = np.memmap(path, np.uint8, "c", shape=(count * WIDTH,))
        columns, place = {}, 0
        for name, kind in COLUMNS.items():
            columns[name] = raw[place : place + count * kind.itemsize].view(kind)
            place += count * kind.itemsize
        return Rows(**columns)

    def chosen(self, rows: npt.NDArray[Any]) -> Rows:
        """Some of them."""
        return Rows(*(getattr(self, name)[rows] for name in COLUMNS))

    def text(self) -> bytes:
        """Their file's bytes: column by column."""
        return b"".join(getattr(self, name).tobytes() for name in COLUMNS)


@dataclass(frozen=True, eq=False)
class Index:
    """What lies in a set of shards, and how its pictures are treated.

    `fixed`: the pictures were brought to their size when they were packed. `left_out`: pictures that could not be used,
    and why. `drawn`: the test images are a share that was drawn, since the data name none.
    """

    name: str
    classes: tuple[str, ...]
    codes: tuple[str, ...]
    channels: int
    treatment: Treatment
    fixed: bool
    prepare: Preparation
    shards: tuple[Shard, ...]
    rows: Rows
    left_out: tuple[tuple[str, str], ...] = ()
    drawn: bool = False

    def write(self, folder: Path) -> None:
        """Into the folder of the shards; the index itself last."""
        text = self.rows.text()
        write_bytes(folder / ROWS, text)
        fit = {"size": self.treatment.size, "trim": self.treatment.trim, "fit": self.treatment.fit}
        values = {
            "format": FORMAT,
            "program": f"zeroforget {__version__}",
            "name": self.name,
            "images": len(self.rows),
            "channels": self.channels,
            "classes": list(self.classes),
            "codes": list(self.codes),
            "treatment": fit | {"fixed": self.fixed},
            "prepare": asdict(self.prepare),
            "rows": sha256(text),
            "drawn": self.drawn,
            "left_out": [list(each) for each in self.left_out],
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_bytes(folder / INDEX, sealed(values))


def open_index(address: str) -> Index:
    """The index of the shards at an address, checked; DataError names what is wrong and the remedy."""
    try:
        content = read(address, INDEX, MOST_BYTES)
    except DataError as error:
        folder = local(address)
        if folder is None or (folder / INDEX).exists():
            raise
        if not folder.is_dir():
            raise DataError(f"{folder.absolute()} is missing; name a folder of shards") from error
        what = "holds tar files but no index" if any(folder.glob("*.tar")) else "holds no shards"
        make = f"`zeroforget data index {folder}` makes one" if any(folder.glob("*.tar")) else "pack them"
        raise DataError(f"{folder} {what} ({INDEX} is missing); {make}") from error
    try:
        values = unsealed(content, f"{address}/{INDEX}", _this_format(address))
        return _index(address, Fields(values, f"{address}/{INDEX}"))
    except DataError:
        raise
    except (ValueError, TypeError) as error:
        raise DataError(f"{error}; index the shards anew") from error


def _this_format(address: str) -> Any:
    def check(values: dict[str, Any]) -> None:
        if values.get("format") != FORMAT:
            raise FieldError(
                f"{address}/{INDEX}", f"its format is {values.get('format')!r}; this version reads {FORMAT}"
            )

    return check


def _index(address: str, fields: Fields) -> Index:
    treated, prepared = fields.group("treatment"), fields.group("prepare")
    fixed, codes = treated.any("fixed") is True, fields.texts("codes", least=0, most=2**24)
    shards = tuple(
        Shard(
            _plain_name(each.text("file", most=300), each),
            each.integer("bytes", 0, 2**50),
            each.hash("sha256"),
            each.integer("images", 0, 2**31),
        )
        for each in fields.groups("shards", least=1, most=MOST_SHARDS)
    )
    size = treated.integer("size", 1, MOST_SIDE)
    treatment = Treatment(size, trim=treated.integer("trim", 0, MOST_SIDE), fit=treated.text("fit"))
    if treatment.fit not in {"stretch", "cover"}:
        raise treated.wrong("fit", "must be 'stretch' or 'cover'")
    rows = _rows(address, fields.integer("images", 1, MOST_IMAGES), fields.hash("rows"))
    classes = fields.texts("classes", least=2, most=2**24)
    _check(rows, shards, len(classes), fields)
    left_out = tuple((str(a), str(b)) for a, b in fields.any("left_out"))
    name, channels = fields.text("name"), fields.integer("channels", 1, 3)
    drawn = fields.any("drawn") is True
    return Index(
        name, classes, codes, channels, treatment, fixed, _prepare(prepared), shards, rows, left_out, drawn
    )  # fmt: skip


def _prepare(fields: Fields) -> Preparation:
    mean, std = (fields.numbers(key, least=1, most=3) for key in ("mean", "std"))
    crop = None if fields.any("crop") is None else fields.integer("crop", 1, MOST_SIDE)
    return Preparation(mean, std, crop, fields.integer("pad", 0, MOST_SIDE), fields.any("flip") is True)


def _plain_name(name: str, fields: Fields) -> str:
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
        raise fields.wrong("file", f"is {name!r}, which is no name of a file beside the index")
    return name


def _rows(address: str, count: int, digest: str) -> Rows:
    """The file of rows: where it lies, or a copy of it on this disk."""
    folder = local(address)
    path = kept() / f"{digest}.rows" if folder is None else folder / ROWS
    if folder is None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, read(address, ROWS, count * WIDTH))
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} is missing; it belongs to {INDEX}") from error
    if size != count * WIDTH or hash_of_file(path) != digest:
        raise DataError(f"{path} is not what was written (its sha256 differs from {INDEX}'s); index the shards anew")
    return Rows.mapped(path, count)


def _check(rows: Rows, shards: Sequence[Shard], classes: int, fields: Fields) -> None:
    """No row leads anywhere but into a shard."""
    lengths = np.array([shard.bytes for shard in shards], np.int64)
    for start in range(0, len(rows), 2**20):
        part = slice(start, start + 2**20)
        label, shard, size, first = rows.label[part], rows.shard[part], rows.size[part], rows.start[part]
        right = (label >= 0) & (label < classes) & (shard >= 0) & (shard < len(shards)) & (rows.part[part] < len(PARTS))
        right &= (size > 0) & (size <= MOST_PICTURE) & (first >= 0)
        right[right] &= first[right] + size[right] <= lengths[shard[right]]
        if not right.all():
            raise fields.wrong("rows", f"leads outside of the shards at image {start + int(np.argmin(right))}")


class InShards(Images):
    """The images of an index as bytes of one shape, decoded by processes beside this one."""

    def __init__(self, index: Index, address: str, shape: tuple[int, int, int], treatment: Treatment) -> None:
        self.index, self.address, self.treatment = index, address, treatment
        self.shape = (len(index.rows), *shape)
        self._manner = [*shape], treatment.trim, treatment.fit
        self._store = Store(address, index.shards)
        self._store.check()

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """The images in these rows, decoded."""
        out = torch.empty((len(rows), *self.shape[1:]), dtype=torch.uint8)
        self.read(rows, out)
        return out

    def read(self, rows: Tensor, out: Tensor) -> None:
        """Decode the images in these rows into a tensor."""
        chosen, known = rows.cpu().numpy(), self.index.rows
        shards, starts, sizes = (column[chosen].tolist() for column in (known.shard, known.start, known.size))
        for left in reversed(range(TRIES)):
            with self._store.paths(sorted(set(shards))) as paths:
                items: list[Item] = [
                    (paths[shard], None, (start, size))
                    for shard, start, size in zip(shards, starts, sizes, strict=True)
                ]
                damaged = decoders().fill(out.numpy(), items, self._manner)
                if not damaged:
                    return
                if left == 0 or any(why != "is missing" for _, why in damaged):
                    raise DataError(self._said(items))
        raise AssertionError

    def _said(self, items: Sequence[Item]) -> str:
        one = np.empty((1, *self.shape[1:]), np.uint8)
        for item in items:
            if bad := decode_chunk(one, 0, [item], self._manner):
                return f"{name_at(item[0], item[2][0])} in {item[0]} {bad[0][1]}" if len(item) > 2 else bad[0][1]
        return f"a shard at {self.address} went away while it was read; is {kept()} large enough?"

    def shards(self, rows: Tensor | None) -> npt.NDArray[np.int32]:
        """In which shard each of these lies."""
        found = self.index.rows.shard
        return found if rows is None else found[rows.cpu().numpy()]

    def identity(self, rows: Tensor) -> bytes:
        """Of the shards' checksums and the places in them: nothing is decoded."""
        known = self.index.rows.chosen(rows.numpy())
        sums = repr([self.shape[1:], self.treatment, *(shard.sha256 for shard in self.index.shards)])
        return bytes.fromhex(sha256(sums.encode() + known.shard.tobytes() + known.start.tobytes()))

    def expect(self, rows: Tensor) -> None:
        """Remote shards are fetched in this order, some before they are needed."""
        if local(self.address) is None:
            shards, first = np.unique(self.shards(rows), return_index=True)
            self._store.expect(shards[np.argsort(first)].tolist())

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.address, self.shape[1:], self.treatment)


def _again(address: str, shape: tuple[int, int, int], treatment: Treatment) -> InShards:
    return InShards(open_index(address), address, shape, treatment)


def load_shards(address: str, size: int) -> Collection:
    """The shards at an address as a data set; `size` is for those that hold people's own pictures as they are."""
    index = open_index(address)
    own = index.treatment if index.fixed or index.treatment.fit == "stretch" else Treatment(size, fit="cover")
    images = InShards(index, address, (index.channels, own.size, own.size), own)
    labels, part = torch.from_numpy(index.rows.label), index.rows.part
    val = torch.from_numpy(part == PARTS.index("val"))
    return Collection(
        index.name,
        index.classes,
        images,
        labels,
        torch.from_numpy(part == PARTS.index("test")),
        index.prepare,
        index.codes,
        val if bool(val.any()) else None,
    )
