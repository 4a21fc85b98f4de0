"""How long the campaigns of `make soak` are, and which cases they try."""

from __future__ import annotations

import os

SIZE = float(os.environ.get("ZEROFORGET_SOAK", "1"))
"""`ZEROFORGET_SOAK=0.1 make soak` tries a tenth of the cases, 10 ten times as many."""
SEED = 1000 * int(os.environ.get("ZEROFORGET_SOAK_SEED", "0"))
"""Another number tries other cases."""


def many(usual: int) -> int:
    """So many cases, by the chosen size."""
    return max(1, round(usual * SIZE))
