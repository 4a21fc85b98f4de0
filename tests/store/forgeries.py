"""Updates by somebody who knows the format: other values, names, tensors and ranks, and every hash that fits them."""

from __future__ import annotations

import json
import random
import struct
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import sealed
from zeroforget.store.folder import BORN, PROBE, SPREAD
from zeroforget.store.update import MAGIC

NAMES = [
    *("", " ", "x ", " x", ".", "..", "../up", "a/b", "a\\b", "con", "nul.txt", "@2", "low@2", "low", "LOW", "x@1@2"),
    *("a\x00b", "a\nb", "\x1b[2J", "\u202eexe", "\u2066x", "\ufeffx", "\U000e0041", "\ud800", "-rf", "=1+1", "x" * 65),
    *(unicodedata.normalize("NFD", "é" * 9), "\U00020000" * 60, "~", "$(id)", "<b>", "%s%n", "{0}", "١", "ſ"),
]
NETWORKS = ["lenet", "alexnet", "vgg16", "vgg16-tiny", "resnet18", "resnet50", "compact", "squeezenet", "", "timm/x"]
VALUES = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-45, 0.0, -0.0]
KINDS = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int64, torch.bool, torch.uint8]


@dataclass
class Parts:
    """An update taken apart: what its files say, and their tensors as bytes."""

    model: dict[str, Any] | None
    tasks: list[dict[str, Any]]
    files: list[dict[str, bytes]]
    header: dict[str, Any]

    def whole(self) -> bytes:
        """Put together, all hashes right."""
        head = self.header | {}
        contents = []
        before = self.tasks[0].get("before", "")
        if self.model is not None:
            contents.append(sealed(self.model))
            before = head["model"] = head["base"] = sha256(contents[0])
        told = []
        for values, files in zip(self.tasks, self.files, strict=True):
            listed = values.get("files")
            if isinstance(listed, dict):
                values["files"] = listed | {
                    name: {"bytes": len(content), "sha256": sha256(content)} for name, content in files.items()
                }
            text = sealed(values | {"before": before})
            before = sha256(text)
            told.append({"name": values.get("name", ""), "hash": before})
            contents += [text, *files.values()]
        head["tasks"] = told
        head["files"] = [{"bytes": len(one), "sha256": sha256(one)} for one in contents]
        text = sealed(head)
        return b"".join([MAGIC, len(text).to_bytes(8, "big"), text, *contents])


def taken_apart(content: bytes) -> Parts:
    """The parts of an update."""
    start = len(MAGIC) + 8
    end = start + int.from_bytes(content[len(MAGIC) : start], "big")
    header = json.loads(content[start:end])
    pieces = []
    for one in header["files"]:
        pieces.append(content[end : end + one["bytes"]])
        end += one["bytes"]
    model = json.loads(pieces.pop(0)) if header["whole"] else None
    tasks = [json.loads(text) for text in pieces[::4]]
    files = [dict(zip((BORN, PROBE, SPREAD), pieces[at + 1 : at + 4], strict=True)) for at in range(0, len(pieces), 4)]
    for values in (header, model, *tasks):
        if values is not None:
            values.pop("seal")
    return Parts(model, tasks, files, header)


Mutation = Callable[[dict[str, Any], random.Random], dict[str, Any]]


def forged(parts: Parts, draw: random.Random, mutate: Mutation) -> Parts:
    """One to three lies, of whatever kind; `mutate` changes JSON values."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        at = draw.randrange(len(parts.tasks))
        way = draw.randrange(7)
        if way == 0:
            parts.tasks[at] = mutate(parts.tasks[at], draw)
        elif way == 1 and parts.model is not None:
            parts.model = mutate(parts.model, draw)
        elif way == 2:
            _rename(parts.tasks[at], draw)
        elif way == 3 and parts.model is not None:
            _another_network(parts, draw)
        elif way == 4:
            _another_size(parts.tasks[at], draw)
        else:
            name = draw.choice((BORN, BORN, PROBE, SPREAD))
            parts.files[at][name] = other_tensors(parts.files[at][name], draw)
            if name == PROBE and draw.random() < 0.7:
                _own_probe(parts, at)
    return parts


def _rename(task: dict[str, Any], draw: random.Random) -> None:
    if draw.random() < 0.5:
        task["name"] = draw.choice(NAMES)
    elif isinstance(task.get("classes"), list) and task["classes"]:
        task["classes"][draw.randrange(len(task["classes"]))] = draw.choice(NAMES)


def _another_network(parts: Parts, draw: random.Random) -> None:
    """Larger than the files could ever fill, or of pictures that are."""
    assert parts.model is not None
    backbone = parts.model.get("backbone")
    if not isinstance(backbone, dict):
        return
    side = draw.choice((1, 8, 33, 128, 512, 513, 2**20))
    backbone |= {"network": draw.choice(NETWORKS)} if draw.random() < 0.7 else {}
    backbone |= {"options": {"width": draw.choice((0.01, 0.1, 0.4, 1.0, 16.0, 1e-300))}} if draw.random() < 0.7 else {}
    if draw.random() < 0.7:
        backbone["shape"] = [draw.choice((1, 3)), side, side]
        for task in parts.tasks:
            if isinstance(task.get("preprocessing"), dict):
                mode = "RGB" if backbone["shape"][0] == 3 else "L"
                many = {name: [0.5] * backbone["shape"][0] for name in ("mean", "std")}
                task["preprocessing"] |= {"mode": mode, "size": [side, side], **many}


def _another_size(task: dict[str, Any], draw: random.Random) -> None:
    """Births, growth or ranks that the files do not have."""
    number = draw.choice((0, 1, 7, 4096, 2**20, 2**24, 1e9, -1, 0.5))
    if draw.random() < 0.4:
        task["rank"] = draw.choice((number, {"0": number}, {"": 1}))
        task["version"] = draw.choice((1, 2, 3))
    elif draw.random() < 0.6 and isinstance(task.get("born"), dict) and task["born"]:
        for axis in list(task["born"]) if draw.random() < 0.5 else [draw.choice(list(task["born"]))]:
            task["born"][axis] = number
        if draw.random() < 0.5:
            task["growth"] = dict(task["born"])
    else:
        task["growth"] = number


def _own_probe(parts: Parts, at: int) -> None:
    try:
        logits = load(parts.files[at][PROBE])["logits"]
        parts.tasks[at]["probe"] = sha256(logits.contiguous().numpy().tobytes())
    except Exception:  # no probe any more: that is the lie
        return


def other_tensors(content: bytes, draw: random.Random) -> bytes:
    """A file of tensors with other values, types, shapes or names, or with a header that lies."""
    if draw.random() < 0.25:
        return _other_header(content, draw)
    try:
        tensors = load(content)
    except Exception:  # it was changed before
        return content
    if not tensors:
        return content
    name, way = draw.choice(sorted(tensors)), draw.randrange(9)
    value = tensors[name]
    if way == 0 and value.is_floating_point() and value.numel():
        value.flatten()[draw.randrange(value.numel())] = draw.choice(VALUES)
    elif way == 1:
        tensors[name] = value.to(draw.choice(KINDS))
    elif way == 2:
        tensors[name] = _reshaped(value, draw)
    elif way == 3:
        del tensors[name]
    elif way == 4:
        tensors[draw.choice(("", "x", "born/../x", "rank/0.weight:up", "head/weight", "own/0/bias", "\u202e"))] = value
        tensors.pop(name if draw.random() < 0.5 else sorted(tensors)[0])
    elif way == 5:
        other = draw.choice(sorted(tensors))
        tensors[name], tensors[other] = tensors[other], value
    elif way == 6 and value.numel():
        tensors[name] = (value.double() * draw.choice((-1, 1.0000001, 1e20, 0))).to(value.dtype)
    elif way == 7 and value.dtype == torch.int16 and value.numel():
        value.flatten()[draw.randrange(value.numel())] = draw.choice((-(2**15), 2**15 - 1, -1, 999))
    else:
        tensors["more"] = torch.zeros(draw.choice((0, 1, 5000)))
    return save({key: one.contiguous().clone() for key, one in tensors.items()})


def _reshaped(value: Tensor, draw: random.Random) -> Tensor:
    twice = value.repeat(2, *[1] * (value.dim() - 1)) if value.dim() else value
    choices = [value[None], value.flatten(), value.flatten()[:0], twice]
    return draw.choice(choices).contiguous()


def _other_header(content: bytes, draw: random.Random) -> bytes:
    """The header of the tensors' file, whose sizes and places it makes up."""
    size = struct.unpack("<Q", content[:8])[0]
    try:
        header = json.loads(content[8 : 8 + size])
    except ValueError:
        return content
    if not isinstance(header, dict) or not header:
        return content  # it was changed before
    name = draw.choice(sorted(header))
    about = header[name] if isinstance(header[name], dict) else {}
    way = draw.randrange(7)
    if way == 0:
        return struct.pack("<Q", draw.choice((0, 1, 2**20, 2**31, 2**63))) + content[8:]
    if way == 1 and "shape" in about:
        about["shape"] = draw.choice(([2**62, 2], [0, 2**60], [-1], [1] * 4000, [2**32, 2**32], ["a"], None))
    elif way == 2 and "data_offsets" in about:
        begin, end = about["data_offsets"]
        about["data_offsets"] = draw.choice(([end, begin], [0, 2**62], [begin, end + 1], [-1, 3], [begin], [0, 0]))
    elif way == 3 and "dtype" in about:
        about["dtype"] = draw.choice(("F4", "F64", "BOOL", "", "U128", 7, "C64", "F8_E5M2"))
    elif way == 4:
        header["__metadata__"] = draw.choice(({"a": "b" * 10**5}, {"a": 1}, [], "x", {"": "\ud83d"}))
    elif way == 5:
        header[name] = draw.choice(([], {}, None, 5))
    else:
        header = draw.choice(([], {}, {"a": {"b": {}}}, 5))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def read_parts(path: Path) -> Parts:
    """The parts of an update's file."""
    return taken_apart(path.read_bytes())
