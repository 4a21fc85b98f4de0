"""Where a user's own modules are looked for."""

from __future__ import annotations

import sys
from pathlib import Path


def look_here() -> None:
    """Also find modules of the current folder, after all that is installed."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
