"""What every copy of a network would share with the given one: functions, hooks and references are not copied."""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.find import CannotGrow
from zeroforget.axes.plain_modules import MODULE_ATTRIBUTES, hollow

_HOOKS = tuple(name for name in sorted(MODULE_ATTRIBUTES) if name.endswith("_hooks"))
_LIBRARIES = ("torch.", "builtins", "typing", "collections", "functools", "abc")


def refuse_shared(net: nn.Module) -> None:
    """Raise CannotGrow if a copy of the network would still read, or share with other copies, modules or tensors."""
    given = {id(part) for part in (*net.modules(), *net.parameters(), *net.buffers())}
    bare = _copied(net)
    own = {id(module) for module in bare.modules()}
    for path, module in bare.named_modules():
        place = f"module '{path}'" if path else "the network"
        for name, value in vars(module).items():
            if name in _HOOKS:
                found = next(filter(None, (_Search(given, own).find(hook) for hook in dict(value).values())), None)
                what = (
                    f"has a hook that holds on to {found}, as it would in any copy: let the hook read its own arguments"
                )
                remedy = " (module, inputs), or do its work in forward"
            elif name in MODULE_ATTRIBUTES or name == "_compiled_call_impl" or isinstance(module, nn.RNNBase):
                continue
            else:
                found = _Search(given, own).find(value)
                kind = "a weak reference" if isinstance(value, weakref.ref) else "a function"
                what = f"keeps '{name}', {kind} that holds on to {found}, as it would in any copy: "
                remedy = "make it a method, or a module of its own, and what it reads a part or a buffer of its module"
            if found:
                raise CannotGrow(f"{place} {what}{remedy}")
        if found := _Search(given, own).in_class(type(module)):
            raise CannotGrow(
                f"the code of {place} ({type(module).__name__}) reads {found} from outside, as it would in any copy: "
                "give it to the module as a part, a parameter or a buffer of its own"
            )


def _copied(net: nn.Module) -> nn.Module:
    try:
        return hollow(net)
    except (TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        for path, module in net.named_modules():
            for name, value in vars(module).items():
                if name not in MODULE_ATTRIBUTES and not _copies(value):
                    place = f"module '{path}'" if path else "the network"
                    raise CannotGrow(
                        f"{place} keeps '{name}', a {type(value).__name__}, which cannot be copied ({error}): make it "
                        "when it is needed, or keep it outside of the network"
                    ) from error
        raise


def _copies(value: Any) -> bool:
    if isinstance(value, (nn.Module, Tensor)):
        return True
    try:
        hollow(_Holding(value))
    except (TypeError, AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


class _Holding(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Search:
    """Looks through what a copy holds for parts of the given network, and for what all copies would share."""

    def __init__(self, given: set[int], own: set[int]) -> None:
        self.given, self.own = given, own
        self.seen: list[Any] = []  # they live on, so that an id is a name
        self.ids: set[int] = set()

    def find(self, value: Any, *, shared: bool = False) -> str | None:
        """What is wrong with a value, in words; `shared` says that it was reached through something not copied."""
        if id(value) in self.ids or isinstance(value, (str, bytes, int, float, complex, type(None), torch.dtype)):
            return None
        self.ids.add(id(value))
        self.seen.append(value)
        if isinstance(value, nn.Module):
            if id(value) in self.given:
                return "a module of the given network"
            if id(value) in self.own:
                return None
            return "a module that is no part of it" if shared and [*value.parameters(), *value.buffers()] else None
        if isinstance(value, Tensor):
            if id(value) in self.given:
                return "a tensor of the given network"
            return "a tensor that every copy would share" if shared and value.is_floating_point() else None
        shared |= isinstance(value, (types.FunctionType, weakref.ref)) or hasattr(type(value), "cache_info")
        if isinstance(value, types.FunctionType) and (found := self._names(value)):
            return found
        return next(filter(None, (self.find(v, shared=shared) for v in _held(value))), None)

    def in_class(self, kind: type) -> str | None:
        """Likewise, of the code of a user's own class."""
        for base in kind.__mro__:
            if base.__module__.startswith(_LIBRARIES):
                continue
            for value in vars(base).values():
                if isinstance(value, nn.Module) and self._learns(value):
                    return f"the {type(value).__name__} of its class"
                for function in _functions(value):
                    if found := self.find(function, shared=True):
                        return found
        return None

    def _names(self, function: types.FunctionType) -> str | None:
        """Networks and what learns among the global names that a function reads."""
        for code in _codes(function.__code__):
            for name in code.co_names:
                value = function.__globals__.get(name)
                if self._learns(value):
                    if _reads_global(code, name):
                        return f"the {type(value).__name__ if isinstance(value, nn.Module) else 'tensor'} '{name}'"
                elif (found := self._beside(value, function.__module__)) and _reads_global(code, name):
                    return f"{found} by '{name}'"
        return None

    def _beside(self, value: Any, module: str) -> str | None:
        """What a global table, or a function or a class of the same file, leads to."""
        if type(value) in (dict, list, tuple, set):
            held = value.values() if type(value) is dict else value
            learning = next((v for v in held if self._learns(v)), None)
        elif isinstance(value, type) and value.__module__ == module and not issubclass(value, nn.Module):
            learning = next((v for v in vars(value).values() if self._learns(v)), None)
        elif isinstance(value, types.FunctionType) and value.__module__ == module:
            return self.find(value, shared=True)
        else:
            return None
        return None if learning is None else f"the {type(learning).__name__}"

    def _learns(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return id(value) not in self.own and any(True for _ in value.parameters())
        return isinstance(value, Tensor) and (value.requires_grad or id(value) in self.given)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions behind a name of a class: a method, a property."""
    for one in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "func", "__wrapped__"))):
        if isinstance(one, types.FunctionType):
            yield one


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _reads_global(code: types.CodeType, name: str) -> bool:
    """Whether a name is that of a global, not of an attribute alone."""
    return any(i.argval == name and i.opname in {"LOAD_GLOBAL", "LOAD_NAME"} for i in dis.get_instructions(code))


def _held(value: Any) -> list[Any]:
    """What a value holds on to."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        kept = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
        return [*cells, *kept]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        return [wrapped]  # a function with a memory
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value]
    if isinstance(value, (type, types.ModuleType)) or type(value).__module__.startswith(_LIBRARIES):
        return []
    slots = [getattr(value, name, None) for base in type(value).__mro__ for name in _slots(base)]
    return [*getattr(value, "__dict__", {}).values(), *slots]


def _slots(kind: type) -> list[str]:
    found = vars(kind).get("__slots__", ())
    return [found] if isinstance(found, str) else list(found)
