"""Finding methods: a module of this package that holds a `Method` with a `name` is a method; so is anyone's class given
as `package.module:Class`. The signature of its `__init__` is its configuration."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zeroforget.methods.base import Method
from zeroforget.nets.registry import nearest

Factory = Callable[..., Method]


def _own() -> dict[str, tuple[type[Method], dict[str, Any]]]:
    """Name → class and the options that the name fixes (`tfm-nofn` is TFM with fn=False)."""
    found: dict[str, tuple[type[Method], dict[str, Any]]] = {}
    import zeroforget.methods as package

    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
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
    if path.endswith(".py"):
        meant = path.removesuffix(".py").replace("/", ".")
        raise ValueError(f"cannot find '{name}': give the module, not its file, such as {meant}:{attribute}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and not f"{path}.".startswith(f"{error.name}."):
            raise ValueError(f"'{path}' was found, but imports '{error.name}', which is not installed") from error
        raise ValueError(f"cannot find '{name}': {error}; give it as package.module:{kind}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"cannot find '{name}': '{path}' has no '{attribute}'{nearest(attribute, vars(module))}")
    return getattr(module, attribute)


def code(name: str) -> str | None:
    """A short name for the file with the code of a method of one's own; None for ours, and where there is no file."""
    if ":" not in name:
        return None
    try:
        file = inspect.getsourcefile(_foreign(name))
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except (TypeError, OSError):
        return None


def options(cls: type[Method]) -> dict[str, inspect.Parameter]:
    """A method's options: what its `__init__` takes by name alone or has a default for."""
    return keywords(cls)


def keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The options of a function, or of a class's `__init__`: what comes after `*`, and what has a default."""
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if _is_option(parameter)}


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
