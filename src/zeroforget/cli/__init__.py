"""The command `zeroforget`: a thin face over the package. Modules import torch only inside their commands, so that
`--help` answers at once."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from rich.markup import escape

from zeroforget.cli.app import app, errors

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def main() -> None:
    """Run a command; a mistake of the user's is one plain sentence and exit code 2, not a stack trace."""
    try:
        app()
    except (ValueError, OSError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("stopped")
        sys.exit(130)


__all__ = ["app", "main"]
