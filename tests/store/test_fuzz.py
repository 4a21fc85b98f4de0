"""Random damage that knows the format: whatever a model.json, task.json or update says, nothing crashes."""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import SEED, many
from tests.store.forgeries import forged, taken_apart
from tests.store.helpers import tree
from zeroforget.files.hashes import sha256
from zeroforget.files.json_fields import sealed
from zeroforget.store import ModelError, open_model
from zeroforget.store.folder import Folder
from zeroforget.store.update import MAGIC, receive
from zeroforget.store.verify import verify
from zeroforget.store.writing import Watch

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e300, 1e-300),
    *("", "x", "../../etc", "\x00", "é" * 2000, "features", "0" * 64, [], {}, [[]], [0], [0, 0, 0], {"": ""}),
    *(
        [1e9] * 3,
        [1, 512, 512],
        ["a"] * 5,
        {"a": {"b": {"c": []}}},
        {"width": 1e9},
        {"width": 15.0},
        "vgg16",
        "resnet50",
    ),
]


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] * bool(at) + [place for key, one in inner for place in paths(one, (*at, key))]


def mutated(values: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """One to three fields changed, removed, doubled or swapped."""
    out = copy.deepcopy(values)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = paths(out)
        place = draw.choice(places)
        target: Any = out
        for key in place[:-1]:
            target = target[key]
        old, way = target[place[-1]], draw.randrange(6)
        if way == 0 and isinstance(target, dict):
            del target[place[-1]]
        elif way == 1 and isinstance(target, dict):
            target[draw.choice(("more", "", "seal2"))] = old
        elif way == 2 and isinstance(old, (int, float)):
            target[place[-1]] = old * draw.choice((-1, 0, 2, 0.5, 1000)) + draw.choice((0, 1, 1e-9))
        elif way == 3 and isinstance(old, list):
            target[place[-1]] = old * 2 if draw.random() < 0.5 else old[:-1]
        elif way == 4 and isinstance(old, str) and old:
            spot = draw.randrange(len(old))
            target[place[-1]] = old[:spot] + draw.choice("aZ0-\n\u2028") + old[spot + 1 :]
        else:
            target[place[-1]] = copy.deepcopy(draw.choice(ODD))
    return out


def broken(content: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or inserted."""
    spot, way = draw.randrange(len(content)), draw.randrange(4)
    if way == 0:
        return content[:spot] + bytes([draw.randrange(256)]) + content[spot + 1 :]
    if way == 1:
        return content[:spot]
    if way == 2:
        return content[:spot] + draw.randbytes(draw.randrange(1, 40)) + content[spot:]
    return content[:spot] + content[draw.randrange(len(content)) :]


def resealed(content: bytes, draw: random.Random) -> bytes:
    """A sealed file with other values and a seal that fits them."""
    values = json.loads(content)
    values.pop("seal")
    try:
        return sealed(mutated(values, draw))
    except (ValueError, TypeError):  # what JSON cannot hold
        return broken(content, draw)


def fuzz_model(path: Path, tries: int, seed: int) -> int:
    """How many tries a model was still usable after; anything but ModelError is a failure."""
    draw, usable = random.Random(seed), 0
    files = [path / "model.json", *sorted(path.glob("tasks/*/task.json"))]
    whole = {file: file.read_bytes() for file in files}
    for number in range(tries):
        file = draw.choice(files)
        file.write_bytes(resealed(whole[file], draw) if draw.random() < 0.8 else broken(whole[file], draw))
        if file.name == "model.json" and draw.random() < 0.8:
            rechained(files[1], sha256(file.read_bytes()))
        try:
            model = open_model(path)
            model.network()
            model.predict(b"")
            usable += 1
        except ModelError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}, try {number}: {file} {file.read_bytes()!r}") from error
        verify_quietly(path, f"seed {seed}, try {number}")
        for file, content in whole.items():
            file.write_bytes(content)
    assert verify(Folder(path))
    return usable


def rechained(task: Path, before: str) -> None:
    """Make a task follow what it is told to: a forger's work, without which a changed model.json is found at once."""
    values = json.loads(task.read_bytes())
    values.pop("seal")
    task.write_bytes(sealed(values | {"before": before}))


def verify_quietly(path: Path, where: str) -> None:
    try:
        verify(Folder(path))
    except ModelError:
        pass
    except Exception as error:
        raise AssertionError(where) from error


def fuzz_updates(path: Path, update: Path, tries: int, seed: int) -> None:
    """Updates with damage of every kind leave a model as it was."""
    draw = random.Random(seed)
    whole = update.read_bytes()
    start = len(MAGIC) + 8
    length = int.from_bytes(whole[len(MAGIC) : start], "big")
    head, bad = open_model(path).head, update.with_suffix(".bad")
    for number in range(tries):
        if draw.random() < 0.7:
            header = resealed(whole[start : start + length], draw)
            bad.write_bytes(MAGIC + len(header).to_bytes(8, "big") + header + whole[start + length :])
        else:
            bad.write_bytes(broken(whole, draw))
        if bad.read_bytes() == whole:
            continue
        try:
            receive(Folder(path), bad, Watch())
        except ModelError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}, try {number}") from error
        if open_model(path).head != head:  # what changed did not matter; the model must be whole all the same
            assert verify(Folder(path))
            open_model(path).undo()
        assert open_model(path).head == head


MOST_MORE = 100 * 2**20
"""Bytes that all small forgeries together may take at their most, beside what true ones take."""
MOST_SECONDS = 5.0
"""Of the processor, for one forgery: generous, since a machine may be slow; usual ones take a few hundredths."""


def forge_updates(path: Path, updates: list[Path], tries: int, seed: int) -> dict[str, float]:
    """Lies with hashes that fit them: refused and without a trace, or harmless. What the dearest cost comes back."""
    draw, sources = random.Random(seed), [update.read_bytes() for update in updates]
    fresh, bad = path.with_name("fresh"), path.with_name("bad.zfu")
    before = tree(path)
    for source in updates:  # what true ones take is not counted
        open_model(fresh).receive(source) if taken_apart(source.read_bytes()).model else None
        shutil.rmtree(fresh, ignore_errors=True)
    began, slowest, taken = peak(), 0.0, 0
    for number in range(tries):
        where = f"seed {seed}, try {number}"
        parts = taken_apart(draw.choice(sources))
        try:
            bad.write_bytes(forged(parts, draw, mutated).whole())
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            continue  # what cannot be written cannot be sent
        place = fresh if parts.model is not None else path
        clock = time.process_time()
        try:
            receive(Folder(place), bad, Watch())
        except ModelError:
            assert tree(path) == before, where
            assert not fresh.exists(), where
        except Exception as error:
            raise AssertionError(where) from error
        else:  # a task's word for what nobody can prove, such as its accuracy
            taken += 1
            assert verify(Folder(place)), where
            open_model(place).undo() if place == path else None
            assert tree(path) == before, where
        shutil.rmtree(fresh, ignore_errors=True)
        slowest = max(slowest, time.process_time() - clock)
        assert slowest < MOST_SECONDS, where
        assert peak() - began < MOST_MORE, where
    return {"tries": tries, "taken": taken, "slowest_s": slowest, "more_MiB": (peak() - began) / 2**20}


def peak() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.fixture
def newest_only(trained: Path, tmp_path: Path) -> Path:
    """A model of one task: there, a lie in task.json with a fresh seal breaks no chain, so that it is believed."""
    path = shutil.copytree(trained, tmp_path / "model")
    open_model(path).undo()
    return path


def test_some_odd_models(newest_only: Path) -> None:
    assert fuzz_model(newest_only, 150, seed=0) > 1  # some changes do not matter, so the depths are reached


def test_some_odd_updates(newest_only: Path, trained: Path, tmp_path: Path) -> None:
    open_model(trained).ship(tmp_path / "u.zfu", since="low")
    fuzz_updates(newest_only, tmp_path / "u.zfu", 100, seed=0)


@pytest.fixture
def updates(trained: Path, tmp_path: Path) -> list[Path]:
    """The update that brings the second task, and the whole model."""
    open_model(trained).ship(tmp_path / "u.zfu", since="low")
    open_model(trained).ship(tmp_path / "all.zfu")
    return [tmp_path / "u.zfu", tmp_path / "all.zfu"]


def test_some_forged_updates(newest_only: Path, updates: list[Path]) -> None:
    forge_updates(newest_only, updates, 150, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_odd_models(newest_only: Path, seed: int) -> None:
    fuzz_model(newest_only, many(1000), seed + SEED)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_odd_updates(newest_only: Path, trained: Path, tmp_path: Path, seed: int) -> None:
    open_model(trained).ship(tmp_path / "u.zfu", since="low")
    fuzz_updates(newest_only, tmp_path / "u.zfu", many(2000), seed + SEED)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_forged_updates(newest_only: Path, updates: list[Path], seed: int) -> None:
    print(forge_updates(newest_only, updates, many(2500), seed + SEED))
