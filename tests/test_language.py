"""The benchmark of a small language model runs from its texts to its table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import language_docs
from benchmarks.language import QUICK, run
from benchmarks.language_text import LANGUAGES, OTHERS, TOPICS, WINDOW, fortunes, read


def sayings(file: Path, letters: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n%\n".join(f"{letters} {number}\n  {letters}" * 9 for number in range(20)) + "\n%\n")


def test_it_runs_from_texts_to_a_table_and_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "usr" / "share" / "games" / "fortunes"
    for number, name in enumerate((*TOPICS, *OTHERS, *(f"{language}/all" for language in LANGUAGES[1:]))):
        sayings(root / name, "abcdefghijklmnopqrstuvwxyz"[number] * 4)
    (root / "de" / "all.dat").write_bytes(b"\0")
    texts = read(tmp_path)
    x, y = texts[0].batch("train", 2, torch.Generator().manual_seed(0))
    assert torch.equal(x[:, 1:], y.view(2, WINDOW)[:, :-1])
    size = replace(QUICK, width=8, first_steps=1, steps=1, trial_steps=1, tests=8, batch=2)
    out = tmp_path / "language.json"
    run(texts, size, out, minutes=0.0)
    assert json.loads(out.read_text())["contestants"] == []
    found = run(texts, size, out)
    names = [each["name"].partition(" (")[0] for each in found["contestants"]]
    assert names == [
        *("growth 0 %", "growth 5 %", "rank 8", "growth 5 % + rank 8", "fine-tuning a copy"),
        *["adapters"] * 2,
    ]
    assert found["adopted"]["equal"]
    assert all(task["first_equal"] for each in found["contestants"] for task in each["tasks"])
    page = tmp_path / "page.md"
    page.write_text("<!-- language -->\n<!-- end -->\n")
    language_docs.write(page, out)
    assert page.read_text().count("| yes |") == len(names)


def test_a_saying_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "some").write_text("one\n\ttwo\n%\n_\bthree\n%\n")
    assert fortunes(tmp_path / "some") == ["one two", "three"]
