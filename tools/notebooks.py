"""The notebooks in `examples`, run without Jupyter: `python -m tools.notebooks examples/grow.ipynb`."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(path: Path) -> list[tuple[str, str]]:
    """Each cell's kind, "markdown" or "code", and its text."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]


def is_stripped(path: Path) -> bool:
    """Whether no cell holds an output or says that it was run."""
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def strip(path: Path) -> bool:
    """Take outputs and counts out of a notebook's file; whether there were any."""
    if is_stripped(path):
        return False
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return True


def executed(path: Path) -> Iterator[tuple[str, str, str]]:
    """Each cell's kind, its text and what it printed, run one after another in the current folder.

    As in Jupyter, the cells are the module `__main__`, and the value of a last expression is shown.
    """
    module, before = ModuleType("__main__"), sys.modules["__main__"]
    for number, (kind, text) in enumerate(cells(path)):
        printed = io.StringIO()
        if kind == "code":
            sys.modules["__main__"] = module
            try:
                with contextlib.redirect_stdout(printed):
                    _run(text, vars(module), f"{path.name}[{number}]")
            finally:
                sys.modules["__main__"] = before
        yield kind, text, printed.getvalue()


def _run(text: str, names: dict[str, Any], place: str) -> None:
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)  # for a traceback's lines
    tree = ast.parse(text, place)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), place, "eval"), names)
        if value is not None:
            print(value if hasattr(value, "_repr_html_") else repr(value))  # which a notebook shows as a table


def main() -> None:
    """Print the notebooks that are named as Markdown, with their real output or (`--text`) without; or `--strip` them,
    which fails where there was something to strip, as a hook before a commit should."""
    names = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--strip" in sys.argv:
        sys.exit(sum(strip(Path(name)) for name in names) > 0)
    without = "--text" in sys.argv
    for name in names:
        shown = ((*cell, "") for cell in cells(Path(name))) if without else executed(Path(name))
        for kind, text, printed in shown:
            print(text if kind == "markdown" else f"```python\n{text}\n```", end="\n\n")
            if printed:
                print(f"```text\n{printed.rstrip()}\n```", end="\n\n")


if __name__ == "__main__":
    main()
