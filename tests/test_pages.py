"""The pages are written in short sentences, and what they show works as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from zeroforget.cli import app as cli_app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if path.parent.name != "generated" and path.name != "CHANGELOG.md"
)
LONGEST, SHORT = 40, 25
ENDS = re.compile(r"(?<=[.!?:])[*_)\]\"]* +(?=[A-Z*_`\[(\"0-9])")


def sentences(text: str) -> list[str]:
    """Those of a page's prose: no code, no table, nothing that a program wrote; each item of a list by itself."""
    text = re.sub(
        r"^```.*?^```|^(?: {4}.*\n)+|<!-- (?!end).*?<!-- end -->", "\n\n", text, flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"^\|.*$|^#+ .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`code`", text))
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [one for part in parts for one in ENDS.split(part) if one.split()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_long_and_most_are_short(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    lengths = [len(one.split()) for one in found]
    long = [f"{len(one.split())} words: {one}" for one in found if len(one.split()) > LONGEST]
    assert not long, "\n".join(long)
    assert sum(length <= SHORT for length in lengths) >= 0.8 * len(lengths), "too many sentences of more than 25 words"


def test_a_long_sentence_is_found_wherever_it_stands() -> None:
    long = " ".join(["Word"] * 41)
    page = f"# A\n\nShort. {long}.\n\n```sh\n{long}\n```\n\n| {long} |\n\n- Item.\n- `{long}` is code.\n"
    assert sentences(page) == ["Short.", f"{long}.", "Item.", "`code` is code."]


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_every_extra_is_told() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| ", page.partition("| extra |")[2].partition("\n## ")[0], re.MULTILINE)) == {
        *extras.keys() - {"dev"}
    }


def test_results_name_no_folder_of_the_machine_that_made_them() -> None:
    for path in (ROOT / "results").glob("*.json"):
        assert not re.search(r'[ "=]/[a-z]+/', path.read_text(encoding="utf-8")), path.name


RUN_ELSEWHERE = {
    "README.md": "test_package.py",
    "CONTRIBUTING.md": "a part of a class",
    "docs/data.md": "data/test_docs.py",
    "docs/experiments.md": "experiments/test_docs.py",
    "docs/own-method.md": "experiments/test_docs.py",
    "docs/tutorial.md": "cli/tutorial.py",
}
"""Pages whose Python other tests run, since it needs a model, a run or pictures."""


def pages_with_python() -> list[Path]:
    return [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", pages_with_python(), ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_a_page_runs_and_prints_what_stands_below_it(page: Path, tmp_path: Path) -> None:
    if str(page.relative_to(ROOT)) in RUN_ELSEWHERE:
        return
    for code, _, shown in re.findall(
        r"^```python\n(.*?)^```\n(\n```text\n(.*?)^```)?", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == shown


FORMATS = ("zeroforget model", "zeroforget task", "zeroforget update", "zeroforget signed update")
"""What files begin with."""


def commands() -> list[tuple[str, str]]:
    """Every call of our program on a page, in a block or in a line: the page's name and the words."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
        blocks = "\n".join(re.findall(r"^```(?:sh|console)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
        lines = re.findall(r"^(?:\$ )?(zeroforget [a-z].*)$", blocks, re.MULTILINE)
        lines += re.findall(r"`(zeroforget [a-z][^`\n]*)`", text)
        found += [(page.name, line.partition(" #")[0]) for line in lines]
    return found


def test_commands_on_the_pages_exist_with_their_options() -> None:
    app: Any = get_command(cli_app)
    found = commands()
    assert len(found) > 50
    for page, line in found:
        words = [word.strip(",.;:()") for word in line.split()[1:]]
        here = app
        while words and words[0] in getattr(here, "commands", {}):
            here = here.commands[words.pop(0)]
        if here is app:
            assert line in FORMATS or words[0] == "COMMAND", f"{page}: no command in '{line}'"
            continue
        here = getattr(here, "commands", {}).get("show", here)  # `data flowers` is short for `data show flowers`
        known = {name for each in here.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
        unknown = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
        assert not unknown, f"{page}: '{line}' has no {unknown}"
