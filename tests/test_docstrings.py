"""What `help()` shows of each public name: what it is, its types, and an example that runs."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import zeroforget

NAMES = [name for name in zeroforget.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_public_name_has_an_example_that_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(zeroforget, name)) or ""
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert test.examples, f"help(zeroforget.{name}) shows no example"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isfunction(getattr(zeroforget, name))])
def test_functions_say_their_types(name: str) -> None:
    signature = inspect.signature(getattr(zeroforget, name))
    assert signature.return_annotation is not signature.empty
    assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())
