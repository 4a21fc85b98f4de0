"""Signs that nobody sees never reach a terminal as they are."""

from __future__ import annotations

import json

import pytest

from zeroforget.files.text import has_hidden, safe_cell, visible, visible_json


@pytest.mark.parametrize(
    "sign", ["\x00", "\x07", "\x1b", "\r", "\n", "\x7f", "\x9b", "\u202e", "\u2066", "\u200f", "\u2028", "\udc80"]
)
def test_a_hidden_sign_is_escaped(sign: str) -> None:
    assert has_hidden(f"a{sign}b")
    shown = visible(f"a{sign}b")
    assert shown == f"a\\u{ord(sign):04x}b"
    assert visible(f"a{sign}b", keep=sign) == f"a{sign}b"


@pytest.mark.parametrize("text", ["plain", "Käse", "日本", "می\u200cخواهم", "क्\u200dष", "🙂", "a b\\n"])
def test_writing_of_any_language_stays(text: str) -> None:
    assert visible(text) == text
    assert not has_hidden(text)


def test_json_keeps_its_values_and_its_lines() -> None:
    values = {"a\x9b": ["\u202e", "\x7f", "\U000e0041", "é\n"]}
    text = visible_json(json.dumps(values, indent=1, ensure_ascii=False))
    assert json.loads(text) == values
    assert not has_hidden(text.replace("\n", ""))


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "=HYPERLINK(0)", "\uff1d1+1", "\uff20SUM(A1)"])
def test_a_cell_begins_no_formula(text: str) -> None:
    assert safe_cell(text) == f"'{text}"
    assert safe_cell(f"a{text}") == f"a{text}"


def test_nor_does_a_sign_before_it_hide_one() -> None:
    assert safe_cell("\t=1") == "\\u0009=1"
