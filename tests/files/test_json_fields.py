"""Sealed JSON: any changed byte shows. Fields: a mistake names the file and the field."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from zeroforget.files.hashes import hash_of_file, sha256
from zeroforget.files.json_fields import FieldError, Fields, read_bytes, sealed, unsealed

VALUES = {"name": "birds", "count": 3, "inner": {"share": 0.5}, "list": [{"a": 1}]}


def test_what_is_sealed_comes_back() -> None:
    assert unsealed(sealed(VALUES), "a.json") == VALUES


def test_every_changed_byte_shows() -> None:
    content = sealed(VALUES)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        with pytest.raises(FieldError):
            unsealed(bytes(changed), "a.json")
    for other in (content + b" ", content[:-1], content.replace(b"\n ", b"\n  "), b"[]", b"", b"\xff", b"[" * 100_000):
        with pytest.raises(FieldError) as error:
            unsealed(other, "a.json")
        assert (error.value.where, bool(error.value.why)) == ("a.json", True)


def test_a_check_comes_before_the_seal() -> None:
    def check(values: dict[str, object]) -> None:
        raise KeyError(values["name"])

    with pytest.raises(KeyError, match="fish"):
        unsealed(sealed(VALUES).replace(b"birds", b"fish"), "a.json", check)


def test_mistakes_name_the_field() -> None:
    fields = Fields(VALUES, "a.json")
    assert (fields.text("name"), fields.integer("count", 0, 9)) == ("birds", 3)
    assert fields.group("inner").number("share", 0, 1) == 0.5
    for ask, said in (
        (lambda: fields.integer("count", 4, 9), "a.json: field 'count' must be a whole number from 4 to 9"),
        (lambda: fields.text("missing"), "a.json: field 'missing' is missing"),
        (lambda: fields.group("inner").number("share", 2, 3), "field 'inner.share' must be a number from 2 to 3"),
        (lambda: fields.group("name"), "field 'name' must be an object"),
        (lambda: fields.groups("list", least=2, most=3), "field 'list' must be a list of 2 to 3 entries"),
        (lambda: fields.done(), "field 'list' is not one that this version knows"),
    ):
        with pytest.raises(FieldError, match=said):
            ask()
        fields.left = {"list"}
    assert [one.integer("a", 0, 1) for one in fields.groups("list", least=1, most=1)] == [1]


def test_a_file_is_read_up_to_a_length(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(FieldError, match="longer than the 4 bytes"):
        read_bytes(tmp_path / "a", 4)
    with pytest.raises(FieldError, match="it is missing"):
        read_bytes(tmp_path / "b", 4)
    with pytest.raises(FieldError, match="it is not a file"):
        read_bytes(tmp_path, 4)


def test_hashes(tmp_path: Path) -> None:
    content, told = bytes(range(256)) * 20_000, list[int]()
    (tmp_path / "a").write_bytes(content)
    assert hash_of_file(tmp_path / "a", told=told.append) == sha256(content) == hashlib.sha256(content).hexdigest()
    assert told[-1] == len(content)
    assert hash_of_file(tmp_path / "a", "md5") == hashlib.md5(content).hexdigest()
