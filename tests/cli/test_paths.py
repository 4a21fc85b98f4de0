"""Paths as commands take them: an empty one, as a variable that is not set leaves it, is never the current folder."""

from __future__ import annotations

import inspect
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from PIL import Image

from zeroforget.cli import app, main

COMMANDS = [
    "predict model ''", "predict '' a.png", "predict model a.png ''", "learn model '' --task x", "learn '' . --task x",
    "learn model . --task x --weights ''", "adopt '' . --task x --network small --weights w.pt",
    "adopt model '' --task x --network small --weights w.pt", "adopt model . --task x --network small --weights ''",
    "adopt model . --task x --network small --weights w.pt --classes ''", "serve ''", "tasks ''", "verify ''",
    "export model --all -o ''", "ship model --all --output=", "receive model ''", "undo '' --yes", "run ''",
    "run a.toml --out ''", "run a.toml --data-root ''", "table ''", "table . -o ''", "archive '' -o a.json",
    "archive . -o ''", "report ''", "report . --out ''", "report . --figures ''", "scenarios --data-root ''",
    "data mnist --data-root ''",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_path_is_refused_in_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zeroforget", *shlex.split(command)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: a path is empty; name a file or a folder, or . for the current folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_every_path_of_every_command_is_looked_at() -> None:
    found = 0
    for command in app.registered_commands:
        assert command.callback is not None
        hints: dict[str, Any] = {
            name: parameter.annotation
            for name, parameter in inspect.signature(command.callback, eval_str=True).parameters.items()
        }
        for name in hints:
            if "Path" in str(hints[name]):
                found += 1
                (told,) = [each for each in get_args(hints[name])[1:] if hasattr(each, "parser")]
                assert told.parser is not None, f"{command.callback.__name__}: {name}"
    assert found > 25
