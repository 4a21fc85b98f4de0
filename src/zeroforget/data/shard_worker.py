"""A process that writes or looks through whole shards, one at a time: `python -m zeroforget.data.shard_worker`.

Every picture is decoded once, so that what cannot be used is known before anybody learns from it.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from zeroforget.data.decode import ENDINGS, Bytes, answered, decode, needs, script
from zeroforget.data.tars import BadTar, Writer, length_of, samples
from zeroforget.files.atomic import sync_file
from zeroforget.files.hashes import Digest, blocks

Job = dict[str, Any]
"""`do`: "write" or "read"; the rest is the function's."""


class _Hashed:
    """A file to write to that knows the sha256 of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, Digest()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self._file.write(content)


def write(
    path: str, pictures: Sequence[Sequence[Any]], manner: Sequence[Any], form: str, quality: int, pixels: str | None
) -> Job:
    """Write a shard of pictures: rows of number, file (or row of the array `pixels`), label and box. `form`: "as is",
    or treated now and stored as "png" or "jpeg".

    Returns its length and sha256, where each picture lies, and which ones could not be used.
    """
    shape, trim, fit = manner
    array = None if pixels is None else np.load(pixels, mmap_mode="r")
    rows, bad = [], []
    with open(path, "wb") as file:  # noqa: PTH123
        hashed = _Hashed(file)
        tar = Writer(hashed)
        for number, source, label, box in pictures:
            try:
                if array is not None:
                    ending, content = _encoded(array[source], "png", quality)
                elif form == "as is":
                    content = Path(source).read_bytes()
                    decode(io.BytesIO(content), shape, box, trim, fit)
                    ending = _ending(source, content)
                else:
                    ending, content = _encoded(decode(source, shape, box, trim, fit), form, quality)
            except FileNotFoundError:
                bad.append([source, "is missing"])
            except Exception as error:  # decoders fail in many ways on damaged files
                bad.append([source, needs(source) or f"cannot be decoded: {error}"])
            else:
                rows.append([number, *tar.add(f"{number:010d}", ending, content, label)])
        length = tar.end()
    sync_file(Path(path))
    return {"bytes": length, "sha256": hashed.digest.hexdigest(), "rows": rows, "bad": bad}


def _encoded(pixels: Bytes, form: str, quality: int) -> tuple[str, bytes]:
    image = Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))
    file = io.BytesIO()
    if form == "png":
        image.save(file, "PNG")
        return ".png", file.getvalue()
    image.save(file, "JPEG", quality=quality, optimize=True)
    return ".jpg", file.getvalue()


def _ending(source: str, content: bytes) -> str:
    ending = os.path.splitext(source)[1].lower()  # noqa: PTH122
    if ending in ENDINGS:
        return ending
    with Image.open(io.BytesIO(content)) as image:
        return f".{(image.format or 'jpg').lower()}"


def read(path: str, manner: Sequence[Any]) -> Job:
    """Look through a shard that others wrote; what `write` returns, with labels instead of numbers."""
    shape, trim, fit = manner
    rows, bad = [], list[tuple[str, str]]()
    with open(path, "rb") as file:  # noqa: PTH123
        length = length_of(file)
        try:
            found = list(samples(file, length, bad))
        except BadTar as error:
            return {"damaged": f"{path} {error}"}
        for each in found:
            file.seek(each.start)
            try:
                decode(io.BytesIO(file.read(each.size)), shape, None, trim, fit)
            except Exception as error:  # decoders fail in many ways on damaged files
                bad.append((each.name, f"cannot be decoded: {error}"))
            else:
                rows.append([each.label, each.start, each.size])
        file.seek(0)
        digest = Digest()
        for block in blocks(file):
            digest.update(block)
    return {"bytes": length, "sha256": digest.hexdigest(), "rows": rows, "bad": [[f"{path}: {n}", w] for n, w in bad]}


DO: dict[str, Callable[..., Job]] = {"write": write, "read": read}


def done(job: Job) -> Job:
    """What a job finds, here and now."""
    return DO[job["do"]](**{key: value for key, value in job.items() if key != "do"})


def worker() -> subprocess.Popen[str]:
    """A process that does what `ask` asks it to; it ends with this one."""
    return script("-m", __spec__.name)


def ask(process: subprocess.Popen[str], job: Job) -> Job:
    """Let a worker do a job."""
    found: Job = answered(process, job)
    if "failed" in found:
        raise OSError(found["failed"])
    return found


def _serve() -> None:
    for line in sys.stdin:
        try:
            answer = done(json.loads(line))
        except OSError as error:  # the disk is full, say
            answer = {"failed": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
