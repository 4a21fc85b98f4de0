"""How much to grow: shares of the full network turned into features, how far that may go, and what each task costs.

The paper's rule for choosing among growths that were tried is here too (`smallest_within`).
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from zeroforget.axes.find import Axes
from zeroforget.axes.labels import Label, label_size, spans

Growth = float | Mapping[str, float] | None
"""A share of every axis; or for each its number of features or its share; None is the usual."""
Count = Callable[[Mapping[str, float]], float]
"""The number of weights of a network whose axes have these widths."""

_SLACK = 1e-9  # 0.55 + 9 * 0.05 is not 1 in binary
_ROUNDED = 1e-6  # so much beyond what is left is a share written with few digits


@dataclass(frozen=True)
class TaskRecord:
    """How a task came to be: the arguments of its `add_task`. Replayed in order they rebuild the structure."""

    name: str
    classes: int
    growth: float | Mapping[str, float]
    rank: float | Mapping[str, float] = 0
    names: tuple[str, ...] = ()
    """Of the classes, if they have been told."""


def as_classes(classes: int | Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """How many classes, and their names if these are given."""
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        if (count := whole(classes)) is None or count < 2:
            raise ValueError(
                f"classes is the number of a task's classes, at least 2, not {classes!r}; or their names, such as "
                "['robin', 'wren']. One output, for regression, is one name"
            )
        return count, ()
    names = tuple(classes)
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(f"classes names each class once, such as ['robin', 'wren'], not {classes!r}")
    return len(names), names


@dataclass(frozen=True)
class GrowthOverhead:
    """Bits that zero forgetting costs beside the network and its heads."""

    masks: int
    """Two bits for each feature and task, in whole bytes for each axis."""
    feature_norms: int
    """Two floats for each normalized feature and task."""
    norms: int
    """Normalization layers' affine parameters and statistics, for each task after the first."""
    rank_births: int = 0
    """Sixteen bits for each number of a rank birth."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.masks + self.feature_norms + self.norms + self.rank_births


def suited_to(device: str) -> int:
    """Of what number widths are to be multiples on a device: products of 8 keep the matrix units of a GPU busy."""
    return 8 if device.startswith("cuda") else 1


@dataclass(frozen=True)
class GrowthLimits:
    """The full width of every axis, how far beyond or below it the network may go, and in which steps."""

    full: Mapping[str, int]
    count: Count
    limit: float | None = None
    unit: str = "features"
    align: int = 1
    spans: Mapping[str, int] | None = None
    """Axis → how many channels of the layers each of its features stands for (a head, a group); 1 if it is not here."""

    def __post_init__(self) -> None:
        if self.unit not in {"features", "weights"}:
            raise ValueError(f"unit is 'features' or 'weights', not '{self.unit}'")
        if (whole(self.align) or 0) < 1:
            raise ValueError(f"align is a whole number of features, at least 1, not {self.align!r}")
        if self.limit is not None and not (is_share(self.limit) and self.limit > 0):
            raise ValueError(f"limit is a share of the full width, above 0 (none is no limit), not {self.limit!r}")

    def most(self, axis: str) -> int | None:
        """The most features an axis may have."""
        return None if self.limit is None else max(1, round(self.full[axis] * self.limit))

    def width(self, axis: str, share: float) -> int:
        """The features of an axis at a share of its full width: rounded, aligned, at least one, within the limit.

        Aligned are the channels that they stand for: of heads with 16 channels each, any number is at a multiple of 8.
        Up to the share 1 they are no more than the full width, be that aligned or not: the given network has no more.
        """
        full = self.full[axis]
        n = max(1, round(full * share + _SLACK))
        step = self.align // math.gcd(self.align, (self.spans or {}).get(axis, 1))
        n = -(-n // step) * step
        if share <= 1 + _ROUNDED:
            n = min(n, full)
        most = self.most(axis)
        return n if most is None else min(n, most)

    def left(self, shares: Mapping[str, float]) -> float:
        """How much growth is left, in the unit of these limits; infinite without a limit."""
        if self.limit is None:
            return float("inf")
        if self.unit == "features":
            return max((self.limit - s for s in shares.values()), default=0.0)
        most = dict.fromkeys(self.full, self.limit)
        return (self._weights(most) - self._weights(shares)) / self._weights(dict.fromkeys(self.full, 1.0))

    def grow(self, shares: Mapping[str, float], growth: float) -> dict[str, float]:
        """The shares after growing by `growth` of the full network."""
        if self.unit == "features" or growth == 0 or not shares:
            return {axis: self._within(s + growth) for axis, s in shares.items()}
        # Weights grow roughly with the square of widths: find the one step for all axes that adds the wanted number.
        wanted = self._weights(shares) + growth * self._weights(dict.fromkeys(self.full, 1.0))
        low, high = 0.0, 1.0
        while self._weights(self.grow_features(shares, high)) < wanted * (1 - _SLACK) and high < 2**20:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            if self._weights(self.grow_features(shares, middle)) < wanted:
                low = middle
            else:
                high = middle
        return self.grow_features(shares, high)

    def grow_features(self, shares: Mapping[str, float], step: float) -> dict[str, float]:
        """Every axis moved up by the same share of its full width, as far as the limit lets it."""
        return {axis: self._within(s + step) for axis, s in shares.items()}

    def plan(
        self, shares: Mapping[str, float], widths: Mapping[str, int], growth: float
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Shares and widths after growing every axis by a share of the full network."""
        if not is_share(growth):
            raise ValueError(f"growth is a share of the full network, 0 or more, not {growth!r}")
        left = self.left(shares)
        if self.full and growth > left + _ROUNDED:  # where nothing can grow, a first task takes all there is
            raise ValueError(
                f"a growth of {growth:g} is beyond the limit: {max(left, 0):.4g} is left. Grow by at most "
                f"net.left(), or pass a larger limit to grow()"
            )
        after = self.grow(shares, growth)
        if growth == 0:
            return after, {axis: max(1, width) for axis, width in widths.items()}
        return after, {axis: max(self.width(axis, share), widths[axis]) for axis, share in after.items()}

    def plan_axes(
        self, shares: Mapping[str, float], widths: Mapping[str, int], growth: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Shares and widths after growing single axes: by a number of features (an int) or a share (a float)."""
        wider, after = dict(widths), dict(shares)
        for axis, wanted in growth.items():
            if axis not in wider:
                raise ValueError(f"no axis '{axis}' to grow; there are {', '.join(wider)}")
            if not is_share(wanted):
                raise ValueError(
                    f"axis '{axis}' grows by a whole number of features or a share (0.25) of them, 0 or more, "
                    f"not {wanted!r}"
                )
            if isinstance(wanted, int):
                after[axis] += wanted / self.full[axis]
                wider[axis] += wanted
            elif wanted > 0:
                after[axis] = self._within(shares[axis] + wanted)
                wider[axis] = max(self.width(axis, after[axis]), widths[axis])
            most = self.most(axis)
            share_beyond = isinstance(wanted, float) and shares[axis] + wanted > after[axis] + _ROUNDED
            if most is not None and (wider[axis] > most or share_beyond):
                raise ValueError(
                    f"axis '{axis}' may have {most} features and has {widths[axis]}; it cannot grow by {wanted}"
                )
        if empty := [axis for axis, width in wider.items() if width == 0]:
            raise ValueError(f"the first task must give every axis at least one feature; {empty[0]} has none")
        return after, wider

    def warn_if_idle(
        self, growth: float | Mapping[str, float], before: Mapping[str, int], after: Mapping[str, int]
    ) -> None:
        """Say so if a growth is above 0 and within the limit, and yet no axis gets one more feature."""
        wanted = growth if isinstance(growth, Mapping) else dict.fromkeys(after, growth)
        if isinstance(growth, float) and 0 < growth < 1 and not after:
            warnings.warn(
                f"growth={growth!r} adds nothing, for nothing in this network can grow: the task learns its head and "
                "its normalization alone",
                stacklevel=5,
            )
        elif before == after and any(n > _ROUNDED and self.most(axis) != after[axis] for axis, n in wanted.items()):
            warnings.warn(
                f"growth={growth!r} adds no feature to any axis, so the task learns its head and its normalization "
                "alone: widths are rounded, and what is rounded off counts with the next growth. Pass a larger growth, "
                "or growth=0 if none is meant",
                stacklevel=5,
            )

    def _within(self, share: float) -> float:
        return share if self.limit is None else min(share, self.limit)

    def _weights(self, shares: Mapping[str, float]) -> float:
        return self.count({axis: self.full[axis] * share for axis, share in shares.items()})


def limits_of(net: nn.Module, axes: Axes, limit: float | None, unit: str, align: int) -> GrowthLimits:
    """How far the axes of a plain network may grow."""
    tensors = [axes.tensors[name] for name, _ in net.named_parameters()]
    weights = [labels for name, labels in axes.tensors.items() if _computes(axes, name)]
    count = functools.partial(count_weights, tensors)
    return GrowthLimits(axes.sizes, count, limit, unit, align, common_spans(weights))


def _computes(axes: Axes, name: str) -> bool:
    """Whether features are computed with a tensor, or with what is made from it; else it is a gain or a table."""
    in_layer = any(not path or name.startswith(f"{path}.") for path in axes.layers)
    return axes.writes.get(name, 0 if in_layer else -1) >= 0


def whole(value: Any) -> int | None:
    """A whole number as an int, be it Python's, numpy's or torch's; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def number(value: Any) -> float | None:
    """A number as Python's own, an int if it is whole by its kind; None for what is none."""
    if isinstance(value, (bool, str)):
        return None
    try:
        return float(value) if (exact := whole(value)) is None else exact
    except (TypeError, ValueError):
        return None


def is_share(value: Any) -> bool:
    """Whether this is a number of 0 or more that is not infinite."""
    return (found := number(value)) is not None and 0 <= found < math.inf


def as_growth(growth: Any) -> Any:
    """A growth in Python's own numbers; what is none stays, to be named where it is refused."""
    if isinstance(growth, Mapping):
        return {axis: as_growth(wanted) for axis, wanted in growth.items()}
    return growth if (found := number(growth)) is None else found


def tapered(axes: Collection[str], first: float, last: float) -> dict[str, float]:
    """Shares that go evenly from the first axis to the last."""
    steps = max(1, len(axes) - 1)
    return {axis: first + (last - first) * k / steps for k, axis in enumerate(axes)}


def evenly(shares: Mapping[str, float], growth: float) -> dict[str, float]:
    """Growths that let every axis be full when the narrowest is, which grows by `growth` now."""
    left = 1.0 - min(shares.values())
    part = min(1.0, growth / left) if left > 0 else 0.0
    return {axis: max(0.0, 1.0 - share) * part for axis, share in shares.items()}


def count_weights(tensors: Sequence[Sequence[Label]], widths: Mapping[str, float]) -> float:
    """How many weights parameters with these labels have at these widths."""
    return sum(math.prod(label_size(label, widths) for label in labels) for labels in tensors)


def common_spans(tensors: Iterable[Sequence[Label]]) -> dict[str, int]:
    """Axis → how many elements its features stand for in every dimension of these tensors: a divisor of all of them."""
    found: dict[str, int] = {}
    for label in chain.from_iterable(tensors):
        for axis, n in spans(label).items():
            found[axis] = math.gcd(found.get(axis, 0), n)
    return found


def smallest_within(growths: Sequence[float], accuracies: Sequence[float], margin: float) -> int:
    """The paper's section 4.1: which is the smallest growth whose accuracy is within the margin of the best one."""
    best = max(accuracies)
    good = [i for i, accuracy in enumerate(accuracies) if accuracy >= best - margin - _SLACK]
    return min(good, key=lambda i: growths[i])
