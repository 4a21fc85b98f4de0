"""How sure a measured share is."""

from __future__ import annotations

import math


def interval(share: float, count: int) -> tuple[float, float]:
    """What a share of so many pictures may be of all such pictures, with 95 % confidence (Wilson, 1927)."""
    if not count:
        return 0.0, 1.0
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    wide = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - wide), min(1.0, middle + wide)
