"""Sizes that a user's modules remember as plain numbers (`num_heads`, `embed_dim`), matched to feature axes by value.

A match is only a guess: the wider network must run and show the same axes again before it is believed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from zeroforget.axes.labels import Label, Named, axis_names, label_size
from zeroforget.axes.plain_modules import is_layer, is_norm

_SIZES = re.compile(
    r"head|dim|feat|chan|chs|width|group|embed|inner|hidden|plane|shape|key|val|query|in_|out_|radix|split|flatten|model"
)
_PLACES = re.compile(
    r"kernel|window|patch|stride|grid|depth|layer|class|ratio|pad|reduc|prefix|token|resol|seq|dilat|img|image|area|shift|pool"
)
_COUNTS = re.compile(r"head|group|branch|split|num_")


def remembered(
    net: nn.Module,
    pools: Mapping[str, Iterable[Label]],
    sizes: Mapping[str, int],
    every: Callable[[nn.Module], bool],
) -> dict[tuple[str, str], tuple[Label, ...]]:
    """(module, attribute) → labels, for numbers equal to the size of something growing that the module handles.

    Attributes whose names speak of sizes are taken; in modules for which `every` is true, all others too.
    """
    found: dict[tuple[str, str], tuple[Label, ...]] = {}
    for path, module in net.named_modules():
        if is_layer(module) or is_norm(module) or isinstance(module, nn.Sequential):
            continue
        by_size: dict[int, list[Label]] = {}
        for label in pools.get(path, ()):
            if any(axis_names(label)):
                by_size.setdefault(label_size(label, sizes), []).append(label)
        for name, value in vars(module).items():
            if name.startswith("_") or not _is_size(value) or not (every(module) or _speaks(name)):
                continue
            labels = tuple(_best(name, n, by_size) for n in (value if isinstance(value, (tuple, list)) else [value]))
            if any(any(axis_names(label)) for label in labels):
                found[path, name] = labels
    return found


def _is_size(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return 0 < len(value) <= 8 and all((type(v) is int and v == 1) or _is_size(v) for v in value)
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _speaks(name: str) -> bool:
    return _SIZES.search(name.lower()) is not None and _PLACES.search(name.lower()) is None


def _best(name: str, value: int, by_size: Mapping[int, list[Label]]) -> Label:
    """Of several labels of that size: a plain axis for a count (heads), else what comes first."""
    fitting = by_size.get(value, [])
    counts = _COUNTS.search(name.lower()) is not None
    ranked = sorted(fitting, key=lambda label: isinstance(label, Named) != counts) if "attn" in name else fitting
    if counts:
        ranked = sorted(fitting, key=lambda label: not isinstance(label, Named))
    return ranked[0] if ranked else value
