"""What a growing network tells of its tasks: how each came to be, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskRecord:
    """How a task came to be: the arguments of its `add_task`. Replayed in order they rebuild the structure."""

    name: str
    classes: int
    growth: float | Mapping[str, float]


@dataclass(frozen=True)
class GrowthOverhead:
    """Bits that zero forgetting costs beside the network and its heads."""

    masks: int
    """Two bits for each feature and task, in whole bytes for each axis."""
    feature_norms: int
    """Two floats for each normalized feature and task."""
    norms: int
    """Normalization layers' affine parameters and statistics, for each task after the first."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.masks + self.feature_norms + self.norms
