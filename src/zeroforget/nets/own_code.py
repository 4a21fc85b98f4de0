"""Networks of a user's own code, named `package.module:function`: imported and called only when the user trusts it."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

CODE = "code"
"""Where a library's name would stand: 'code/package.module:function'."""
TRUST = "ZEROFORGET_TRUST"
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_trusted: set[str] = set()


class Untrusted(ValueError):
    """A network is built by code that nobody has named as trusted here."""


def trust(name: str) -> str:
    """From now on `package.module:function` may be imported and called in this process."""
    _trusted.add(_checked(name))
    return name


def build(network: str, **options: Any) -> nn.Module:
    """The network that 'code/package.module:function' makes of these options."""
    name = _checked(network.partition("/")[2])
    if name not in _trusted | set(os.environ.get(TRUST, "").split(",")):
        raise Untrusted(
            f"its network is built by '{name}', code of whoever made it, which runs only where you trust it: "
            f"zeroforget.open(folder, trust='{name}'), or on the command line {TRUST}={name}"
        )
    from torch import nn  # here, since a model's folder is read without it

    made = _found(name)(**options)
    if not isinstance(made, nn.Module):
        raise ValueError(f"'{name}' made {type(made).__name__}, not a torch module")
    if hasattr(made, "add_task"):
        raise ValueError(
            f"'{name}' makes a network that grows already; let it return the plain one that grow was given"
        )
    return made


def _checked(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("__main__:"):
        raise ValueError(
            f"code is named as package.module:function, in a module that another program can import, not {name!r}"
        )
    return name


def _found(name: str) -> Callable[..., object]:
    module, _, function = name.partition(":")
    try:
        made: Callable[..., object] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise Untrusted(f"its network is built by '{name}', which cannot be imported here ({error})") from error
    return made
