"""Pages that the program itself tells: every public name, every command, every method's card."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zeroforget

ROOT = Path(__file__).parent.parent

MODEL_CLASSES = ("Model", "TaskFacts", "Prediction", "Report", "ModelError")
"""Of `zeroforget.store`: what `zeroforget.open` gives, and what its methods give."""
NETWORK_METHODS = (
    "add_task", "drop_task", "newborn", "dense", "fingerprint", "forward", "tasks", "widths", "births", "masks",
    "overhead", "plan", "left", "history",
)  # fmt: skip


def write(folder: Path, *, run: bool = False) -> None:
    """All of them, those that differ alone: a page that is as it was is not built anew.

    Notebooks show their output if they are run.
    """
    folder.mkdir(exist_ok=True)
    pages = {"api": api(), "commands": commands(), "cards": cards()}
    pages |= {path.stem: notebook(path, run=run) for path in sorted((ROOT / "examples").glob("*.ipynb"))}
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def notebook(path: Path, *, run: bool) -> str:
    """A notebook as a page."""
    words = [sys.executable, "-m", "tools.notebooks", *([] if run else ["--text"]), str(path)]
    search = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            words, cwd=place, env=os.environ | {"PYTHONPATH": search}, check=True, stdout=subprocess.PIPE, text=True
        )
    where = f"This is the notebook `examples/{path.name}`."
    return done.stdout.replace("\n\n", f"\n\n{where}\n\n", 1)


def api() -> str:
    """Every name of `zeroforget.__all__`, and the classes that these give back."""
    parts = ["# Python", "Every public name of the package. `help()` shows the same."]
    names = [name for name in zeroforget.__all__ if not name.startswith("__")]
    for kind, test in (("Functions", inspect.isroutine), ("Classes", inspect.isclass)):
        parts += [f"## {kind}"]
        for name in names:
            if test(getattr(zeroforget, name)):
                parts += [f"### {name}", _entry("zeroforget", name)]
    parts += ["## A model in a folder", "`zeroforget.open` gives a `Model`; these are in `zeroforget.store`."]
    for name in MODEL_CLASSES:
        parts += [f"### {name}", _entry("zeroforget.store", name)]
    return "\n\n".join(parts) + "\n"


def _entry(module: str, name: str) -> str:
    what = getattr(importlib.import_module(module), name)
    if not inspect.isclass(what):
        return _rst(f".. autofunction:: {module}.{name}")
    home = what.__module__
    if issubclass(what, Exception):
        return _rst(f".. autoexception:: {home}.{what.__name__}")
    members = f"   :members: {', '.join(NETWORK_METHODS)}" if name == "GrowingNetwork" else "   :members:"
    return _rst(f".. autoclass:: {home}.{what.__name__}\n{members}")


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```"


def commands() -> str:
    """Each command's own `--help`, word for word."""
    from typer.main import get_command

    from zeroforget.cli import app

    parts = ["# Commands", "What each command prints with `--help`. `zeroforget` alone lists them."]
    for path, command in _commands(get_command(app), ("zeroforget",)):
        wide = {"terminal_width": 100, "max_content_width": 100}
        context: Any = command.context_class(command, info_name=" ".join(path), **wide)
        parts += [f"## {' '.join(path)}", f"```text\n{command.get_help(context)}\n```"]
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", {})
    if not below or len(path) > 1:
        yield path, command
    for name, one in below.items():
        yield from _commands(one, (*path, name))


def cards() -> str:
    """Each method: what it does, what it claims, its options with their defaults."""
    from zeroforget.cli.methods import describe
    from zeroforget.methods import registry

    about = "What `zeroforget methods NAME` prints. [Methods](../methods.md) compares them."
    parts = ["# Methods, card by card", about]
    for row in map(describe, registry.names()):
        claims = "old tasks keep every bit" if not row["forgets"] else "old tasks may change"
        facts = [f"family: {row['family']}", claims, f"overhead: {row['overhead']}"]
        facts += ["looks at past data"] if row["revisits_data"] else []
        facts += [f"trade-off: `{row['tradeoff']}`"] if row["tradeoff"] else []
        paragraphs = [" ".join(part.split()) for part in row["about"].split("\n\n")]
        parts += [f"## {row['name']}", "\n\n".join(paragraphs), "\n".join(f"- {fact}" for fact in facts)]
        if row["options"]:
            lines = [f"| `{name}` | `{one['default']}` | {one['about']} |" for name, one in row["options"].items()]
            parts += ["| option | default | |\n|---|---|---|\n" + "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
