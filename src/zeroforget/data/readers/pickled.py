"""Reads the values out of a pickle without running it: an interpreter of the few opcodes that plain containers and one
numpy array of bytes need. Names of functions are looked at, never imported; anything else is refused."""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroforget.data.values import DataError

ALLOWED = {
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "numpy ndarray",
    "numpy dtype",
    "_codecs encode",
}
PUSHED = {
    *("INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("FLOAT", "BINFLOAT"),
}
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, type[Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
IGNORED = {"PROTO", "FRAME"}


@dataclass
class ArrayRecipe:
    """What the pickle would have called, written down and not called."""

    function: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass
class _Machine:
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def top(self, count: int) -> tuple[Any, ...]:
        taken = tuple(self.stack[-count:])
        del self.stack[-count:]
        return taken


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle file, its keys as text, its numpy arrays of bytes as arrays."""
    try:
        value = _interpret(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("it holds no dictionary")
        return {_text(key): array(item) if isinstance(item, ArrayRecipe) else item for key, item in value.items()}
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except DataError as error:
        raise DataError(f"{path} is refused: {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _text(key: Any) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)


def array(recipe: ArrayRecipe) -> npt.NDArray[np.uint8]:
    """The array of bytes that a pickled numpy array describes."""
    _, shape, dtype, fortran, raw = recipe.state
    if not recipe.function.endswith("_reconstruct") or dtype.arguments[0] not in ("u1", b"u1"):
        raise DataError("it holds something else than arrays of bytes")
    content = raw.encode("latin-1") if isinstance(raw, str) else raw
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def _interpret(raw: bytes) -> Any:
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name == "STOP":
            return machine.stack.pop()
        _step(machine, opcode.name, argument)
    raise ValueError("it breaks off")


def _step(machine: _Machine, name: str, argument: Any) -> None:
    stack, memo = machine.stack, machine.memo
    if name in PUSHED:
        stack.append(argument)
    elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
        memo[int(argument)] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[int(argument)])
    elif name == "MARK":
        machine.marks.append(len(stack))
    elif name in CONSTANTS:
        stack.append(CONSTANTS[name])
    elif name in EMPTY:
        stack.append(EMPTY[name]())
    elif name not in IGNORED and not _container(machine, name):
        _described(machine, name, argument)


def _container(machine: _Machine, name: str) -> bool:
    stack = machine.stack
    if name == "APPENDS":
        items = machine.since_mark()
        stack[-1].extend(items)
    elif name == "APPEND":
        item = stack.pop()
        stack[-1].append(item)
    elif name in ("SETITEMS", "DICT"):
        pairs = machine.since_mark()
        if name == "DICT":
            stack.append({})
        stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
    elif name == "SETITEM":
        key, value = machine.top(2)
        stack[-1][key] = value
    elif name == "LIST":
        stack.append(machine.since_mark())
    elif name == "TUPLE":
        stack.append(tuple(machine.since_mark()))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(machine.top(int(name[-1])))
    else:
        return False
    return True


def _described(machine: _Machine, name: str, argument: Any) -> None:
    if name in ("GLOBAL", "STACK_GLOBAL"):
        symbol = argument if name == "GLOBAL" else " ".join(machine.top(2))
        if symbol not in ALLOWED:
            raise DataError(f"it wants to run '{symbol}', which no data file needs; delete it and download it again")
        machine.stack.append(symbol)
    elif name == "REDUCE":
        function, arguments = machine.top(2)
        if function not in ALLOWED:
            raise DataError("it calls something that is not a known function")
        if function == "_codecs encode":  # how Python 3 writes bytes at protocol 2: as text and its encoding
            machine.stack.append(str(arguments[0]).encode("latin-1"))
        else:
            machine.stack.append(ArrayRecipe(function, arguments))
    elif name == "BUILD":
        state = machine.stack.pop()
        machine.stack[-1].state = state
    else:
        raise DataError(f"it uses the instruction {name}, which no data file needs; delete it and download it again")
