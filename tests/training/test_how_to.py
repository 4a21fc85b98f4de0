"""The how-to page's Python runs and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "how-to.md").read_text(encoding="utf-8")
BLOCKS = re.findall(
    r"^## (.*?)\n(?:(?!^## ).)*?```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
)


@pytest.mark.parametrize(("code", "shown"), [block[1:] for block in BLOCKS], ids=[block[0] for block in BLOCKS])
def test_the_lines_of_python_run_and_print_what_the_page_shows(
    code: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "how-to.md", "exec"), {"__name__": "how_to"})
    assert out.getvalue().strip() == shown.strip()
