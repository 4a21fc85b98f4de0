"""Pickles are read, never run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import python2_batch
from zeroforget.data.readers.pickled import read_pickle
from zeroforget.data.values import DataError


def test_the_official_kind_of_batch(tmp_path: Path) -> None:
    data = np.arange(600, dtype=np.uint8).reshape(2, 300)
    path = tmp_path / "batch"
    path.write_bytes(python2_batch(data, labels=[3, 9], filenames=["a.png", "b.png"]))
    read = read_pickle(path)
    assert np.array_equal(read["data"], data)
    assert read["labels"] == [3, 9]
    assert read["filenames"] == ["a.png", "b.png"]
    # the real unpickler agrees that this is a pickle of that
    assert np.array_equal(pickle.loads(path.read_bytes(), encoding="latin1")["data"], data)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_saved_again_by_python_3(tmp_path: Path, protocol: int) -> None:
    data = np.random.RandomState(0).randint(0, 256, (300, 4)).astype(np.uint8)
    content = {b"data": data, "labels": list(range(300)), "name": "x", "none": None, "yes": True, "pair": (1, 2.5)}
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(content, protocol))
    read = read_pickle(path)
    assert np.array_equal(read["data"], data)
    assert read["labels"] == list(range(300))
    assert read["pair"] == (1, 2.5)


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def attacks(victim: Path) -> list[bytes]:
    write = f"open({str(victim)!r}, 'w').write('owned')"
    spelled = b"c__builtin__\neval\n(V" + write.encode() + b"\ntR."
    instance = b"(i__builtin__\neval\n(V" + write.encode() + b"\nt."
    objected = b"(c__builtin__\neval\nV" + write.encode() + b"\no."
    encoded = b"(V_codecs\nV_codecs\nl."
    return [
        *(pickle.dumps({"data": Evil(eval, write)}, protocol) for protocol in (0, 1, 2, 4, 5)),
        pickle.dumps(Evil(exec, write)),
        spelled,
        instance,
        objected,
        encoded,
        b"\x80\x02}U\x04datacposix\nsystem\nU\x04true\x85Rs.",
        b"\x80\x02}U\x04data\x82\x01s.",  # an extension's code
        b"\x80\x02}U\x04dataU\x01xQs.",  # a persistent id
        b"\x80\x02}U\x04data](K\x01K\x02eK\x05\x85Rs.",  # a call of what is no function
        b"",
        b"\x80\x02}",
        b"\x80\x02u.",
        b"nonsense",
    ]


@pytest.mark.parametrize("place", range(18))
def test_nothing_in_a_pickle_is_ever_run(tmp_path: Path, place: int) -> None:
    victim = tmp_path / "victim"
    cases = attacks(victim)
    assert len(cases) == 18
    path = tmp_path / "batch"
    path.write_bytes(cases[place])
    with pytest.raises(DataError, match=r"batch is (refused|damaged)"):
        read_pickle(path)
    assert not victim.exists()


def test_arrays_of_anything_but_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": np.zeros(3)}, 2))
    with pytest.raises(DataError):
        read_pickle(path)
