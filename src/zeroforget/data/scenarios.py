"""Scenarios by name: which data sets they come from and how their classes become tasks."""

from __future__ import annotations

from os import PathLike

from zeroforget.data.readers.digits import read_digits
from zeroforget.data.splits import cut, equal_sizes, grouped
from zeroforget.data.values import Scenario


def scenario(name: str, seed: int = 0, root: str | PathLike[str] | None = None) -> Scenario:
    """The tasks of a named scenario; `root` is where data sets are kept on this disk."""
    if name != "digits/5":
        raise ValueError(f"no scenario '{name}'; `zeroforget scenarios` lists all")
    collection = read_digits()
    groups = grouped(10, equal_sizes(10, 5), None)
    tasks = cut(collection, groups, [f"digits-{index + 1}" for index in range(5)], seed)
    return Scenario(name, collection.shape, tasks)
