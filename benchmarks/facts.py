"""What every result says of its making."""

from __future__ import annotations

import os
import subprocess


def commit() -> str:
    """What is checked out; a copy without git is told by ZEROFORGET_COMMIT."""
    if told := os.environ.get("ZEROFORGET_COMMIT"):
        return told
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
