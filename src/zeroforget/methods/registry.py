"""Finding methods: a module of this package that holds a `Method` with a `name` is a method; so is anyone's class given
as `package.module:Class`. The signature of its `__init__` is its configuration."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.files.hashes import sha256
from zeroforget.files.imports import look_here
from zeroforget.files.text import nearest
from zeroforget.methods.base import Method

Factory = Callable[..., Method]


def _own() -> dict[str, tuple[type[Method], dict[str, Any]]]:
    """Name → class and the options that the name fixes (`tfm-nofn` is TFM with fn=False)."""
    found: dict[str, tuple[type[Method], dict[str, Any]]] = {}
    for module_info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"{__package__}.{module_info.name}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == module.__name__:
                for name, options in value.names().items():
                    found[name] = (value, options)
    return found


def names() -> list[str]:
    """Every method of ours, in alphabetical order."""
    return sorted(_own())


def find(name: str) -> tuple[type[Method], dict[str, Any]]:
    """A method's class and the options that its name implies."""
    if ":" in name:
        return _foreign(name), {}
    own = _own()
    if name not in own:
        raise ValueError(f"no method '{name}'{nearest(name, own)} (zeroforget methods lists all)")
    return own[name]


def _foreign(name: str) -> type[Method]:
    value = imported(name, "Class")
    if not (inspect.isclass(value) and issubclass(value, Method)):
        raise ValueError(f"'{name}' is not a subclass of zeroforget.Method")
    return value


def imported(name: str, kind: str) -> Any:
    """What `package.module:Name` is the name of; the module may also lie in the current folder.

    A mistake inside the module is shown as Python shows it.
    """
    path, _, attribute = name.partition(":")
    if path.endswith(".py") or path.startswith(".") or "/" in path or "\\" in path:
        raise ValueError(f"cannot find '{name}': {_by_name(path, attribute)}")
    look_here()
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and not f"{path}.".startswith(f"{error.name}."):
            raise ValueError(f"'{path}' was found, but imports '{error.name}', which is not installed") from error
        what = _passed_over(path) or f"; give it as package.module:{kind}"
        raise ValueError(f"cannot find '{name}': {error}{what}") from error
    if not hasattr(module, attribute):
        what = f"'{path}' has no '{attribute}'{nearest(attribute, vars(module))}"
        place = next(iter(_places(module)), "a part of Python")
        raise ValueError(f"cannot find '{name}': {what} (it is {place}){_passed_over(path)}")
    return getattr(module, attribute)


def code(name: str) -> str | None:
    """A short name for the file with the code of a method of one's own; None for ours, and where there is no file."""
    if ":" not in name:
        return None
    try:
        file = inspect.getsourcefile(_foreign(name))
        return None if file is None else sha256(Path(file).read_bytes())[:16]
    except (TypeError, OSError):
        return None


def _by_name(path: str, attribute: str) -> str:
    """What to give in the place of a file's path, or of a name that is relative to another module's."""
    file = path.replace("\\", "/").removesuffix(".py")
    if "/" not in file:
        file = file.lstrip(".").replace(".", "/")
    here, place = Path.cwd(), Path(file).expanduser().resolve()
    parts = place.relative_to(here).parts if place.is_relative_to(here) else ()
    if parts and not any("." in part for part in parts):
        return f"give the module, not its file, such as {'.'.join(parts)}:{attribute}"
    return f"a module is looked for in the current folder; change to {place.parent} and give {place.name}:{attribute}"


def _passed_over(path: str) -> str:
    """What to do about a module in the current folder that was not taken, because another one has its name."""
    first, *rest = path.split(".")
    own = Path.cwd() / first
    if not rest and not (own / "__init__.py").is_file():
        own = own.with_name(f"{first}.py")
    file = own.joinpath(*rest[:-1], f"{rest[-1]}.py") if rest else own
    places = _places(sys.modules[first]) if first in sys.modules else []
    if not file.exists() or any(Path(place).resolve().is_relative_to(own) for place in places):
        return ""
    return f"; rename {own}: another module has that name"


def _places(module: ModuleType) -> list[str]:
    """Where a module lies; nowhere if it is built into Python."""
    file = getattr(module, "__file__", None)
    return [file] if file else list(getattr(module, "__path__", ()))


def options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The options of a function or of a class: what it takes by name alone or has a default for. Where a class's
    `__init__` passes others on (`**options`), those of the class that it extends are among them."""
    found: dict[str, inspect.Parameter] = {}
    for one in called(function):
        parameters = inspect.signature(one).parameters
        found |= {name: option for name, option in parameters.items() if _is_option(option) and name not in found}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return found


def called(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """What a call may come to: a function itself, or the `__init__` of a class and of those that it extends."""
    if not isinstance(function, type):
        return [function]
    return [vars(one)["__init__"] for one in function.__mro__ if "__init__" in vars(one)]


def told_options(cls: type[Method]) -> dict[str, str]:
    """What the docstrings say of each option, those of the classes that it extends included."""
    told: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        rest = inspect.cleandoc(one.__doc__ or "").partition("\nOptions:\n")[2]
        found = re.finditer(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", rest, re.M)
        told |= {match[1]: " ".join(match[2].split()) for match in found}
    return told


def _is_option(parameter: inspect.Parameter) -> bool:
    if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return parameter.default is not inspect.Parameter.empty
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY


def build(name: str, net: nn.Module, example: Tensor, **chosen: Any) -> Method:
    """Make a method by name; an option it does not have is an error that names the nearest one."""
    cls, implied = find(name)
    known = options(cls)
    for key in chosen:
        if key not in known:
            has = ", ".join(known) or "none"
            raise ValueError(f"method '{name}' has no option '{key}'{nearest(key, known)} (its options: {has})")
    made = cls(net, example, **(implied | chosen))
    if not hasattr(made, "specs"):
        raise ValueError(f"{cls.__name__}.__init__ must begin with super().__init__(net, example)")
    return made


def check(name: str, **chosen: Any) -> None:
    """ValueError for options that no network could make good; no network is built.

    The constructor is called with one that nobody may look at, so it gets as far as its own options go.
    """
    cls, implied = find(name)
    with suppress(_Looked):
        cls(_Unseen(), torch.zeros(2, 1, 8, 8), **(implied | chosen))


class _Looked(BaseException):
    """A constructor came to look at its network."""


class _Unseen(nn.Module):
    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return _Unseen
        raise _Looked
