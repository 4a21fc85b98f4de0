"""The command `zeroforget`: a thin face over the package. Modules import torch only inside their commands, so that
`--help` answers at once."""

from __future__ import annotations

import codecs
import importlib
import io
import json
import pkgutil
import sys
import warnings

from zeroforget.cli.app import app, complain, errors

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def main() -> None:
    """Run a command; a mistake of the user's is one plain sentence and exit code 2, not a stack trace."""
    try:
        _print_anything()
        warnings.filterwarnings("ignore", module="PIL")  # of odd metadata; what cannot be used is told by us
        app()
    except (ValueError, OSError) as error:
        complain("[bold red]error:[/]", _sentence(error))
        sys.exit(2)
    except KeyboardInterrupt:
        errors().print("stopped")
        sys.exit(130)


def _print_anything() -> None:
    """What the output's encoding lacks, and names of files that are no text, are written as JSON writes them."""
    codecs.register_error("zeroforget", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors, stream.encoding) != ("surrogateescape", "utf-8"):
            stream.reconfigure(errors="zeroforget")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _sentence(error: Exception) -> str:
    """What is wrong, without the system's number for it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    why = error.strerror[:1].lower() + error.strerror[1:]
    return why if error.filename is None else f"{error.filename}: {why}"


__all__ = ["app", "main"]
