"""How carefully a user's own modules are treated when their axes are found; told here to those who load no torch."""

from __future__ import annotations

from enum import IntEnum


class Care(IntEnum):
    """How carefully to treat the modules of a class whose code has sizes baked in."""

    NAMED = 0
    """Adapt the numbers that they remember, by names that speak of sizes."""
    ALL = 1
    """Adapt every number that fits."""
    TIED = 2
    """Let all that has the same size there grow together."""
    TIED_ALL = 3
    """Both."""
    WHOLE = 4
    """Do not add to what their views make (heads)."""
    STILL = 5
    """Leave all features that they handle as they are."""
