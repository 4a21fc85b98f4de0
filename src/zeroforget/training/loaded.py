"""Batches that others make: a DataLoader, or anything else that can be gone through again and again.

To the loop this is one more place where a step's inputs come from. What a loader draws at random follows from the seed
of the epoch, so a training that was interrupted goes on with the batches that it would have had.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from zeroforget.data import Preparation
from zeroforget.processes import Processes


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or all of them in tuples, lists and dictionaries, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return _pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def parted(batch: Any, labels: str) -> tuple[Any, Any]:
    """A batch as inputs and targets."""
    if isinstance(batch, Mapping):
        if labels not in batch:
            raise ValueError(
                f"the loader's batches are dictionaries of {', '.join(map(str, batch))}, and none is '{labels}': say "
                "which holds the targets, such as labels='target'"
            )
        return {key: _tensors(value) for key, value in batch.items() if key != labels}, _tensors(batch[labels])
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        *inputs, targets = map(_tensors, batch)
        return inputs[0] if len(inputs) == 1 else tuple(inputs), targets
    raise ValueError(
        f"a batch is (inputs, targets), several inputs and then targets, or a dictionary; got {type(batch).__name__}"
    )


def _tensors(value: Any) -> Any:
    return _pytree.tree_map_only(np.ndarray, torch.as_tensor, value)


@dataclass
class _Window:
    """The batch that is being learned from."""

    held: tuple[Any, Any] = (None, None)

    def batch(self, _rows: Tensor) -> tuple[Any, Any]:
        """All of it: inputs and targets."""
        return self.held


class Loaded:
    """Batches of a loader, as a feed of the loop. `check` is asked about the targets of each batch."""

    def __init__(
        self, loader: Iterable[Any], what: str, labels: str, check: Callable[[Any], None] = lambda targets: None
    ) -> None:
        if not isinstance(loader, Iterable) or isinstance(loader, (str, Mapping, Tensor)):
            raise ValueError(f"{what} is a DataLoader or another iterable of batches, not {type(loader).__name__}")
        if isinstance(loader, Iterator):
            raise ValueError(
                f"{what} can be gone through once, and every epoch needs all of it: pass a DataLoader or a list of "
                "batches, not an iterator"
            )
        self.loader, self.what, self.labels, self.check = loader, what, labels, check
        self.window = _Window()
        self.leg: int | None = None
        self.steps = _length(loader)
        self._seen = 0

    def __len__(self) -> int:
        """How many examples the last pass had."""
        return self._seen

    def sizes(self, _batch: int = 0, _processes: Processes | None = None) -> list[int]:
        """A zero for each step: how large its batch is shows when it comes."""
        if self.steps is None:
            with _drawing(self.loader, 0):
                self.steps = sum(1 for _ in self.loader)
        if not self.steps:
            raise ValueError(f"{self.what} gives no batch")
        return [0] * self.steps

    def shuffled(self, draws: torch.Generator, _sizes: list[int], _processes: Processes) -> Tensor:
        """A seed for the epoch, the same in each process: a loader finds its order, and its part, by itself."""
        return torch.randint(1, 2**62, (), generator=draws)

    def in_order(self, _processes: Processes) -> Tensor:
        """The same seed always."""
        return torch.tensor(0)

    def batches(self, order: Tensor, _sizes: int | list[int]) -> Generator[Tensor]:
        """The rows of the window that each step reads: all of them."""
        self._seen = 0
        with _drawing(self.loader, int(order)):
            for batch in self.loader:
                inputs, targets = parted(batch, self.labels)
                self.check(targets)
                self.window.held = inputs, targets
                count = _examples(targets)
                self._seen += count
                yield torch.arange(count)
        self.window.held = None, None
        if not self._seen:
            raise ValueError(f"{self.what} gives no batch; an iterator can be gone through once only")

    def inputs(self, most: int) -> Tensor | None:
        """Some inputs, of the first batches; None if they are no tensors."""
        found = list[Tensor]()
        with _drawing(self.loader, 0):
            for batch in self.loader:
                if not isinstance(x := parted(batch, self.labels)[0], Tensor):
                    return None
                found.append(x)
                if sum(map(len, found)) >= most:
                    break
        return torch.cat(found)[:most] if found else None


def _length(loader: Iterable[Any]) -> int | None:
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a DataLoader over an iterable dataset
        return None


def _examples(targets: Any) -> int:
    first = next((leaf for leaf in _pytree.tree_leaves(targets) if isinstance(leaf, Tensor)), None)
    if first is None:
        raise ValueError(f"a batch's targets are tensors, not {type(targets).__name__}")
    return len(first) if first.dim() else 1


@contextmanager
def _drawing(loader: Any, seed: int) -> Iterator[None]:
    """Inside, all that a loader may draw from starts at a seed: Python, NumPy, its own generators; torch too, but where
    an epoch is trained (the seed is not 0), whose noise is seeded already. Afterwards each of them is as it was. A
    sampler that wants to know the epoch is told of it by this number."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    for sampler in {id(each): each for each in samplers}.values():
        if callable(tell := getattr(sampler, "set_epoch", None)):
            tell(seed % 2**31)
    own = {id(found): found for each in (loader, *samplers) if (found := _generator(each)) is not None}
    before = [(generator, generator.get_state()) for generator in own.values()]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[], enabled=not seed):
        for generator in own.values():
            generator.manual_seed(seed)
        if not seed:
            torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for generator, state in before:
                generator.set_state(state)


def _generator(of: Any) -> torch.Generator | None:
    found = getattr(of, "generator", None)
    return found if isinstance(found, torch.Generator) else None


class AsGiven(Preparation):
    """Inputs go to the network as they come."""

    def train(self, images: Any, generator: torch.Generator | None = None) -> Any:
        """The same."""
        return images

    def test(self, images: Any) -> Any:
        """The same."""
        return images


@dataclass(frozen=True, eq=False)
class LoadedTask:
    """A task whose batches others make."""

    name: str
    train: Loaded
    val: Loaded
    prepare: Preparation = field(default_factory=AsGiven)

    @property
    def parts(self) -> tuple[Loaded, Loaded]:
        """What is learned from, and what chooses."""
        return self.train, self.val

    def check(self) -> None:
        """ValueError if there is nothing to learn from, or to choose by."""
        for part in self.parts:
            part.sizes()
