"""Where the batches of a step come from: the device, the host, shards on disk, or batches that others make."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree

from zeroforget.data import Images, Preparation, Split
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
    """Batches of a loader, as a feed of the loop. `check` is asked about the targets of each batch.

    What a loader draws at random follows from the seed of the epoch, so a training that was interrupted goes on with
    the batches that it would have had.
    """

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


SHARE = 0.5
"""Of a device's free memory images may take so much; the rest is for the network."""
SLOTS = 8
"""So many batches are on their way at once, or a quarter of them all if those are fewer, but two."""
WINDOW = 16
"""The images of so many shards are shuffled together."""
LEG = 1000
"""Steps of an epoch over shards between two places to go on from."""
ALONE = Processes()
_WORKERS = 4
"""Threads that gather images."""


class _ByRows:
    """Images that can be taken in any order."""

    leg: int | None = None
    """An epoch is cut into parts of so many steps, after each of which it can be gone on with; None: it is one."""

    def __len__(self) -> int:
        raise NotImplementedError

    def placed(self, order: Tensor) -> Tensor:
        raise NotImplementedError

    def sizes(self, batch: int, processes: Processes) -> list[int]:
        """How many images each step sees in all processes together, `batch` being what was asked for."""
        return batch_sizes(len(self), batch, processes.world)

    def shuffled(self, draws: torch.Generator, sizes: list[int], processes: Processes) -> Tensor:
        """This process' part of an epoch's order, where `batches` wants it."""
        steps = torch.randperm(len(self), generator=draws).split(sizes)
        return self.placed(torch.cat([processes.part(rows) for rows in steps]))

    def in_order(self, processes: Processes) -> Tensor:
        """This process' part of all of them as they come, where `batches` wants it."""
        return self.placed(processes.part(torch.arange(len(self))))


class Resident(_ByRows):
    """A split that is where it is read."""

    def __init__(self, split: Split) -> None:
        self.window = split

    def __len__(self) -> int:
        return len(self.window)

    def placed(self, order: Tensor) -> Tensor:
        """An order of images, where `batches` wants it; a GPU is not waited for."""
        device = self.window.labels.device
        return order.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else order.to(device)

    def batches(self, order: Tensor, sizes: int | list[int]) -> Generator[Tensor]:
        """The rows of the window that each step reads, so many at a time."""
        yield from order.split(sizes)


class Streamed(_ByRows):
    """A split that stays on the host, for batches of at most `size`."""

    def __init__(self, split: Split, device: torch.device, size: int) -> None:
        rows = None if split.rows is None else split.rows.cpu()
        held = split.images if isinstance(split.images, Images) else split.images.detach().cpu()
        self.split = Split(held, split.labels.cpu(), rows)
        size, pinned = min(size, len(split)), device.type == "cuda"
        batches = -(-len(split) // size)
        slots = min(SLOTS, batches, max(2, batches // 4))
        shape, dtype = split.images.shape[1:], split.images.dtype
        images = torch.zeros((slots * size, *shape), dtype=dtype, device=device)
        self._room = images
        self.window = Split(images, torch.zeros(slots * size, dtype=torch.int64, device=device))
        self._places = torch.arange(slots * size, device=device).split(size)
        self._images = torch.empty((slots, size, *shape), dtype=dtype, pin_memory=pinned)
        self._labels = torch.empty((slots, size), dtype=torch.int64, pin_memory=pinned)
        self._brought: list[torch.cuda.Event | None] = [None] * slots
        self._read: list[torch.cuda.Event | None] = [None] * slots
        self._copies = torch.cuda.Stream(device) if pinned else None
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(device))

    def __len__(self) -> int:
        return len(self.split)

    def placed(self, order: Tensor) -> Tensor:
        """An order of images, where `batches` wants it."""
        return order

    def batches(self, order: Tensor, sizes: int | list[int]) -> Generator[Tensor]:
        """The rows of the window that each step reads; they are there for a step that is begun before the next one is
        asked for. The host is ahead of the device by as many steps as there are slots, twice at the most."""
        parts, slots = order.split(sizes), len(self._brought)
        workers = ThreadPoolExecutor(_WORKERS, "images")
        gathered: deque[Future[None]] = deque()

        def gather(number: int) -> None:
            slot = number % slots
            if (brought := self._brought[slot]) is not None:
                brought.synchronize()  # the host's memory may be written to again
            gathered.append(workers.submit(self.gather, parts[number], slot))

        try:
            for number in range(min(slots, len(parts))):
                gather(number)
            for number, part in enumerate(parts):
                slot = number % slots
                gathered.popleft().result()
                self._bring(slot, len(part))
                yield self._places[slot][: len(part)]
                self._read[slot] = self._now()
                if number + slots < len(parts):
                    gather(number + slots)
        finally:
            workers.shutdown(cancel_futures=True)

    def gather(self, index: Tensor, slot: int) -> None:
        """Put these images together, on the host; the GPU is left alone, where a step may be being recorded."""
        self._images[slot, : len(index)], self._labels[slot, : len(index)] = self.split.batch(index)

    def _bring(self, slot: int, count: int) -> None:
        """Copy them over, when nobody reads any more what lies there. What comes next waits for that."""
        start = slot * self._images.shape[1]
        images, labels = (part.narrow(0, start, count) for part in (self._room, self.window.labels))
        if self._copies is None:
            images.copy_(self._images[slot, :count])
            labels.copy_(self._labels[slot, :count])
            return
        if (read := self._read[slot]) is not None:
            self._copies.wait_event(read)
        with torch.cuda.stream(self._copies):
            images.copy_(self._images[slot, :count], non_blocking=True)
            labels.copy_(self._labels[slot, :count], non_blocking=True)
        self._brought[slot] = brought = self._copies.record_event()
        torch.cuda.current_stream(images.device).wait_event(brought)

    def _now(self) -> torch.cuda.Event | None:
        device = self.window.images.device
        return torch.cuda.current_stream(device).record_event() if self._copies is not None else None


class Sharded(Streamed):
    """A split whose images lie in shards, which are read a few at a time.

    The order of an epoch is drawn in two steps: of the shards, and of the images in each window of `WINDOW` shards.
    Where there are no more shards than that, it is the order of any other split.
    """

    leg = LEG

    def __init__(self, split: Split, device: torch.device, size: int) -> None:
        super().__init__(split, device, size)
        if device.type == "cpu":  # nobody reads a slot while it is written to, so there is nothing to bring over
            self._images, self._labels = (
                part.view(len(self._brought), -1, *part.shape[1:]) for part in (self._room, self.window.labels)
            )

    def _bring(self, slot: int, count: int) -> None:
        if self._room.device.type != "cpu":
            super()._bring(slot, count)

    def shuffled(self, draws: torch.Generator, sizes: list[int], processes: Processes) -> Tensor:
        """This process' part of an epoch's order: its own shards, where there are more than one window."""
        shards = torch.from_numpy(self._shards().astype("int64"))
        known, place = shards.unique(return_inverse=True)
        if len(known) <= WINDOW:
            return super().shuffled(draws, sizes, processes)
        turn = torch.randperm(len(known), generator=draws)
        by_shard = torch.argsort(turn[place], stable=True)
        counts = [sum(replace(processes, rank=rank).sizes(sizes)) for rank in range(processes.world)]
        mine = by_shard.split(counts)[processes.rank]
        begins = (turn[place][mine].diff() != 0).nonzero().squeeze(1) + 1
        windows = mine.tensor_split(begins[WINDOW - 1 :: WINDOW])
        return torch.cat([window[torch.randperm(len(window), generator=draws)] for window in windows])

    def batches(self, order: Tensor, sizes: int | list[int]) -> Generator[Tensor]:
        """As of any split; shards that are far away are fetched before they are needed."""
        self._images_there().expect(order if self.split.rows is None else self.split.rows[order])
        return super().batches(order, sizes)

    def gather(self, index: Tensor, slot: int) -> None:
        """Decoders write where the images are wanted."""
        rows = index if self.split.rows is None else self.split.rows.index_select(0, index)
        self._images_there().read(rows, self._images[slot, : len(index)])
        self._labels[slot, : len(index)] = self.split.labels.index_select(0, index)

    def _images_there(self) -> Images:
        assert isinstance(self.split.images, Images)
        return self.split.images

    def _shards(self) -> npt.NDArray[np.int32]:
        return self._images_there().shards(self.split.rows)


Feed = Resident | Streamed | Loaded


def prepared(
    feed: Feed, order: Tensor, sizes: int | list[int], prepare: Any, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images as they are judged, and their labels, batch by batch."""
    with closing(feed.batches(order, sizes)) as batches:
        for rows in batches:
            images, y = feed.window.batch(rows)
            yield prepare.test(moved(images, device)), moved(y, device)


def feeds(
    splits: tuple[Split | Loaded, Split | Loaded],
    sizes: tuple[int, int],
    device: torch.device,
    processes: Processes = ALONE,
) -> tuple[Feed, Feed]:
    """For training and validation, in batches of these sizes. Those for validation come to the device first."""
    train, val = splits
    if isinstance(train, Loaded) or isinstance(val, Loaded):
        assert isinstance(train, Loaded)
        assert isinstance(val, Loaded)
        return train, val
    most = max(processes.sizes(batch_sizes(len(train), sizes[0], processes.world)))
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    made, left = list[Feed](), budget(device)
    for split, size in ((val, sizes[1]), (train, most)):
        needed = _needed(split, device)
        if isinstance(split.images, Images):
            made.append(Sharded(split, device, size))
        elif needed <= left:
            made.append(Resident(_resident(split, device)))
            left -= needed
        else:
            made.append(Streamed(split, device, size))
    return made[1], made[0]


def batch_sizes(images: int, batch: int, processes: int = 1) -> list[int]:
    """How many images each step sees. One that is left over joins the batch before: alone it has no spread. Of a batch
    that several processes share each has two images at least."""
    whole, rest = divmod(images, batch)
    if 0 < rest < 2 * processes and whole:
        return [batch] * (whole - 1) + [batch + rest]
    return [batch] * whole + [rest] * (rest > 0)


def budget(device: torch.device) -> float:
    """How many bytes of images may come to the device."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return SHARE * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _needed(split: Split, device: torch.device) -> int:
    """How many bytes a split brings along."""
    if isinstance(split.images, Images) or split.images.device == device:
        return 0
    return len(split) * split.images[:1].numel() * split.images.element_size()


def _resident(split: Split, device: torch.device) -> Split:
    """The split's own images on the device, if that is not where they already are."""
    if split.images.device != device:
        return Split(split.all_images().to(device), split.labels.to(device))
    return Split(split.images, split.labels.to(device), None if split.rows is None else split.rows.to(device))
