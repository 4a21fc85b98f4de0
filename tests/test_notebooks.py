"""The notebooks in `examples` run from the first cell to the last, and hold no output in git."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tools.notebooks import NOTEBOOKS, executed, is_stripped, strip

SHOWN = {
    "adopt": "repairs",
    "grow": "numbers for the first task alone",
    "method": "tfm: 2 of 2 earlier tasks unchanged",
    "photos": "shapes {'class': 'circle'",
    "sound": "instrument: the same bits",
    "table": "tumour: the same bits",
    "text": "next letter: the same bits",
}
"""What each prints, among other things."""


def test_each_notebook_is_known_and_listed() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(SHOWN)
    page = (NOTEBOOKS[0].parents[1] / "docs" / "notebooks.md").read_text()
    assert all(f"generated/{path.stem}.md" in page for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_stripped(path), f"strip the outputs of {path.name} before it is committed"
    if path.stem == "photos":
        pytest.importorskip("uvicorn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    main, generator = sys.modules["__main__"], torch.get_rng_state()
    printed = [output for _, _, output in executed(path)]
    torch.set_rng_state(generator)
    assert sys.modules["__main__"] is main
    assert SHOWN[path.stem] in "".join(printed)


def test_a_cell_that_fails_is_not_passed_over(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["x = 1\n", "assert x == 2"], "outputs": [], "execution_count": None}
    (tmp_path / "wrong.ipynb").write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(AssertionError):
        list(executed(tmp_path / "wrong.ipynb"))
    (tmp_path / "wrong.ipynb").write_text(json.dumps({"cells": [cell | {"execution_count": 1}]}))
    assert not is_stripped(tmp_path / "wrong.ipynb")
    assert strip(tmp_path / "wrong.ipynb")
    assert is_stripped(tmp_path / "wrong.ipynb")
    assert not strip(tmp_path / "wrong.ipynb")


def test_a_notebook_that_is_stripped_keeps_its_bytes(tmp_path: Path) -> None:
    """So what a person sees of a change is what they changed."""
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        copy = tmp_path / path.name
        next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")["execution_count"] = 3
        copy.write_text(json.dumps(notebook))
        assert strip(copy)
        assert copy.read_text() == path.read_text()
