"""Names that are fetched when they are first used, and where a user's own modules are looked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any


class MethodFrom:
    """A method whose code lives in a package that knows more than its class does; it is loaded when it is wanted."""

    def __init__(self, home: str, name: str) -> None:
        self.home, self.name = home, name

    def __get__(self, instance: object | None, _owner: type) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(self.home), self.name)
        return function if instance is None else MethodType(function, instance)


def fetched(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names live in these modules; 'open_model as open' gives one another name."""
    where = {name.split(" as ")[-1]: (home, name.split(" as ")[0]) for home, names in homes.items() for name in names}

    def fetch(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        home, own = where[name]
        value = getattr(import_module(home), own)
        setattr(sys.modules[package], name, value)
        return value

    return fetch


def look_here() -> None:
    """Also find modules of the current folder, after all that is installed."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
