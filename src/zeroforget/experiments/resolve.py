"""Scenarios and networks by name: ours, or anyone's function given as `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from zeroforget import nets
from zeroforget.data import Scenario, scenario
from zeroforget.data.collection import OnRead
from zeroforget.data.loading import load
from zeroforget.data.scenarios import OWN, check_seed, missing, plan
from zeroforget.experiments.checking import arguments, can_be_called, conform
from zeroforget.methods.registry import imported

SEEDS = ("seed", "order", "split")
"""What a scenario draws by: all of it, or which classes go together, and which images are kept for validation."""


@dataclass(frozen=True)
class NamedPart:
    """A name and options for what it names."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"name": self.name, **self.options}

    def __str__(self) -> str:
        more = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({more})" if more else self.name


def check_scenario(part: NamedPart, where: str) -> None:
    """Raise ValueError for a scenario, or an option of one, that is not there."""
    if ":" in part.name and not part.name.startswith(OWN):
        function = _foreign(part.name)
        arguments(function, part.options, where)
        root = {"root": None} if _takes_root(function) else {}
        can_be_called(function, "", root | part.options, f"{where}: '{part.name}'")
        return
    for key in SEEDS:
        check_seed(conform(part.options.get(key, 0), int, f"{where}: {key}"))
    plan(_wanted(part))


def make_scenario(part: NamedPart, root: Path | None = None, progress: OnRead | None = None) -> Scenario:
    """The scenario with its data; `progress` hears how far decoding is."""
    if ":" not in part.name or part.name.startswith(OWN):
        return scenario(_wanted(part), root=root, progress=progress, **_seeds(part))
    function = _foreign(part.name)
    place = {"root": root} if _takes_root(function) else {}
    made = function(**place | part.options)
    if not isinstance(made, Scenario):
        raise ValueError(f"'{part.name}' returned {type(made).__name__}; a scenario function returns a Scenario")
    return made


def check_data(part: NamedPart, root: Path | None) -> None:
    """Raise DataError if a data set of a scenario is not on this disk; a function of one's own says so by itself."""
    if ":" not in part.name:
        for name in missing(_wanted(part), root):
            load(name, root)


def _takes_root(function: Callable[..., Any]) -> bool:
    return "root" in inspect.signature(function).parameters


def _seeds(part: NamedPart) -> dict[str, int]:
    return {key: part.options[key] for key in SEEDS if key in part.options}


def _wanted(part: NamedPart) -> str | dict[str, Any]:
    """A scenario's name, or the keys of a plan of one's own (data, tasks, sizes, groups, ...)."""
    keys = {key: value for key, value in part.options.items() if key not in SEEDS}
    return {"name": part.name, **keys} if keys else part.name


def check_network(part: NamedPart, where: str) -> None:
    """Raise ValueError for a network or an option that is not there."""
    function = _foreign(part.name) if ":" in part.name else nets.find(part.name).factory
    arguments(function, part.options, where)
    can_be_called(function, "shape", part.options, f"{where}: '{part.name}'")


def make_network(part: NamedPart, shape: tuple[int, int, int]) -> nn.Module:
    """A fresh feature extractor for inputs of this shape (channels, height, width), without a head."""
    if ":" not in part.name:
        return nets.build(part.name, shape, **part.options)
    made = _foreign(part.name)(shape, **part.options)
    if not isinstance(made, nn.Module):
        raise ValueError(f"'{part.name}' returned {type(made).__name__}; a network function returns an nn.Module")
    return made


def _foreign(name: str) -> Callable[..., Any]:
    value = imported(name, "function")
    if not callable(value):
        raise ValueError(f"'{name}' is not a function")
    function: Callable[..., Any] = value
    return function
