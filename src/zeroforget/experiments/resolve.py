"""What people write in an experiment: checked word for word, and scenarios, networks and functions found by name."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from zeroforget import nets
from zeroforget.data import Scenario, scenario
from zeroforget.data.loading import load
from zeroforget.data.scenarios import OWN, check_seed, missing, plan
from zeroforget.data.values import OnRead
from zeroforget.files.text import nearest
from zeroforget.methods.registry import called, imported, options


def known_key(key: str, known: Collection[str], where: str) -> None:
    """Raise ValueError unless the key is a known one."""
    if key not in known:
        raise ValueError(f"{where} has no key '{key}'{nearest(key, known)} (its keys: {', '.join(known) or 'none'})")


def arguments(function: Callable[..., Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The given keyword arguments, checked by name and type against the function's signature."""
    known = options(function)
    hints = _hints(function)
    checked: dict[str, Any] = {}
    for key, value in given.items():
        known_key(key, known, where)
        checked[key] = conform(value, hints.get(key, Any), f"{where}: {key}")
    return checked


def can_be_called(function: Callable[..., Any], order: str, options: Mapping[str, Any], where: str) -> None:
    """Raise ValueError unless the function takes what comes in this `order` ("net, example", say) and these options."""
    places = order.split(", ") if order else []
    try:
        inspect.signature(function).bind(*places, **options)
    except TypeError as error:
        wanted = f"({', '.join([*places, '*, options'])})"
        raise ValueError(f"{where} cannot be called with {wanted}: {error}") from None


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in reversed(called(function)):
        with suppress(NameError, TypeError):  # a name that is imported for type checkers only
            found |= get_type_hints(one)
    return found


def conform(value: Any, hint: Any, where: str) -> Any:
    """The value as the type wants it (an integer where a float is asked, a list as a tuple), or ValueError."""
    try:
        return _conform(value, hint)
    except TypeError:
        raise ValueError(f"{where} must be {_told(hint)}, not {value!r}") from None


def _told(hint: Any) -> str:
    """A type in words; what a file cannot say (nothing) is left out."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(repr(value) for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_told(arg) for arg in args if arg is not types.NoneType)
    if origin in (tuple, list, Sequence):
        return f"a list of {_told(args[0])}" if origin is not tuple or args[1:] == (...,) else f"a list of {len(args)}"
    if origin in (dict, Mapping) or hint is dict:
        return "a table"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _conform(value: Any, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _any_of(value, args)
    if origin is Literal:
        if value not in args:
            raise TypeError
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        raise TypeError
    if hint in (bool, int, float, str):
        return _instance(value, hint)
    if hint is None or hint is types.NoneType:
        return _instance(value, types.NoneType)
    if origin in (tuple, list, Sequence):
        return _sequence(value, origin, args)
    if origin in (dict, Mapping) or hint is dict:
        inner = args[1] if args else Any
        return {str(k): _conform(v, inner) for k, v in _instance(value, dict).items()}
    return value  # a type that has no form in TOML: its owner checks it


def _any_of(value: Any, hints: Sequence[Any]) -> Any:
    if any(type(value) is hint for hint in hints):
        return value
    for hint in hints:
        try:
            return _conform(value, hint)
        except TypeError:
            continue
    raise TypeError


def _sequence(value: Any, origin: Any, args: Sequence[Any]) -> Any:
    items = list(_instance(value, (list, tuple)))
    kinds = [args[0]] * len(items) if origin is not tuple or args[1:] == (...,) else list(args)
    if len(kinds) != len(items):
        raise TypeError
    whole = [_conform(item, kind) for item, kind in zip(items, kinds, strict=True)]
    return tuple(whole) if origin is tuple else whole


def _instance(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


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
