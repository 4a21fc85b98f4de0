"""Where the images of a step come from: from the device, if they all fit there, else from the host, batch by batch.

A step reads rows of a `window`. That is the split itself, on the device, or room for a few batches there, which are
gathered by threads, perhaps from a file on disk, and brought over while earlier ones are learned from. Either way a
step sees the same images in the same order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeroforget.data import Images, Split
from zeroforget.processes import Processes
from zeroforget.training.loaded import Loaded

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
