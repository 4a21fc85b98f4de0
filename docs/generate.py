"""Pages that the program itself tells: every public name, every command, every method's card."""

from __future__ import annotations

import ast
import dataclasses
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

NETWORK_METHODS = (
    "add_task", "drop_task", "newborn", "fit", "dense", "fingerprint", "save", "forward", "tasks", "widths", "births",
    "masks", "leaning", "overhead", "added_bytes", "plan", "left", "history",
)  # fmt: skip


def write(folder: Path, *, run: bool = False) -> None:
    """All of them, those that differ alone: a page that is as it was is not built anew.

    Notebooks show their output if they are run.
    """
    folder.mkdir(exist_ok=True)
    pages = {"api": api(), "commands": commands(), "cards": cards(), "toml": toml()}
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
    """Every name of `zeroforget.__all__`, and no other."""
    parts = ["# Python", "Every public name of the package. `help()` shows the same."]
    names = [name for name in zeroforget.__all__ if not name.startswith("__")]
    for kind, test in (("Functions", inspect.isroutine), ("Classes", inspect.isclass)):
        parts += [f"## {kind}"]
        for name in names:
            if test(getattr(zeroforget, name)):
                parts += [f"### {name}", _entry("zeroforget", name)]
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

    parts = ["# Commands", "What each command prints with `--help`."]
    for path, command in _commands(get_command(app), ("zeroforget",)):
        wide = {"terminal_width": 84, "max_content_width": 84}
        context: Any = command.context_class(command, info_name=" ".join(path), **wide)
        parts += [f"## {' '.join(path)}", f"```text\n{command.get_help(context)}\n```"]
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = command.list_commands(None) if hasattr(command, "commands") else ()
    yield path, command
    for name in below:
        yield from _commands(command.commands[name], (*path, name))


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


def toml() -> str:
    """Every key of an experiment's file, from the dataclasses that read it."""
    from zeroforget.experiments.search import SearchSettings
    from zeroforget.training import Regime

    head = """# Experiment files

Every key of an experiment's TOML file. [Run experiments](../experiments.md) shows how to use one.

| key | what it is |
|---|---|
| `about` | a sentence for people |
| `name` | the experiment's name; by default the file's |
| `scenario` | a name of `zeroforget scenarios`, a table (below), `package.module:function`, or a list of these |
| `network` | a name of `zeroforget networks`, a table with `name` and its options, or `package.module:function` |
| `methods` | a list of names, or a table for each: its options, and `method` if the table's name is a label |
| `seeds` | a list of whole numbers; `seeds = 3` is the one seed 3 |
| `vary` | what each seed draws beside start and batches: `"order"` of classes, `"split"` of validation images |
| `data_root` | where data sets lie, as seen from the file's folder |
| `regime`, `search` | tables, below |

## A scenario as a table

| key | what it is |
|---|---|
| `name` | a scenario of `zeroforget scenarios` to change, or a name for a new one |
| `data` | a data set, `folder:PATH`, or a list of several that are a task each |
| `tasks`, `sizes` or `groups` | how many equal tasks, how many classes each has, or lists of class names |
| `names` | the tasks' names |
| `shuffle` | `false` keeps the classes' own order |
| `seed` | which classes go together; 0 for all runs unless you say otherwise |
| `order`, `split` | seeds for the order of classes and for the validation images alone |
| `size` | pixels, for `folder:` data |
| `flip` | `true` flips training images left to right, half of the time |
| `pad` | pixels: training images are padded by them and cropped at random |
| `zoom` | training images are random parts of at least this share of the area |
| `erase` | pixels: a square of this size is blanked in each training image |
| `alter` | from 0 to 1: how strongly each training image is moved or recolored, in one of thirteen ways |"""
    parts = [head]
    for title, kind in (("[regime]", Regime), ("[search]", SearchSettings)):
        lines = [f"| `{name}` | {default} | {about} |" for name, (default, about) in _fields(kind)]
        parts.append(f"## {title}\n\n" + "\n".join(["| key | default | what it is |", "|---|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def _fields(kind: type[Any]) -> list[tuple[str, tuple[str, str]]]:
    """Each field of a dataclass: its default, and what stands below it in the source."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    told: dict[str, str] = {}
    for one, below in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            told[one.target.id] = " ".join(str(text).split())
    found = []
    for each in dataclasses.fields(kind):
        made = each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
        default = "–" if made is dataclasses.MISSING else f"`{list(made) if isinstance(made, tuple) else made}`"
        found.append((each.name, (default, told[each.name])))
    return found
