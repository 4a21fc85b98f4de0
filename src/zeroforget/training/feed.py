"""Where the images of a step come from: from the device, if they all fit there, else from the host, batch by batch.

A step reads rows of a `window`. That is the split itself, on the device, or room for a few batches there, which are
gathered by threads, perhaps from a file on disk, and brought over while earlier ones are learned from. Either way a
step sees the same images in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from zeroforget.data import Split

SHARE = 0.5
"""Of a device's free memory images may take so much; the rest is for the network."""
_SLOTS = 8
"""So many batches are on their way at once."""
_WORKERS = 4


class Resident:
    """A split that is where it is read."""

    def __init__(self, split: Split) -> None:
        self.window = split

    def __len__(self) -> int:
        return len(self.window)

    def placed(self, order: Tensor) -> Tensor:
        """An order of images, where `batches` wants it; a GPU is not waited for."""
        device = self.window.labels.device
        return order.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else order.to(device)

    def batches(self, order: Tensor, sizes: Sequence[int]) -> Generator[Tensor]:
        """The rows of the window that each step reads."""
        yield from order.split(list(sizes))


class Streamed:
    """A split that stays on the host, for batches of at most `size`."""

    def __init__(self, split: Split, device: torch.device, size: int) -> None:
        self.split = split
        size, pinned = min(size, len(split)), device.type == "cuda"
        shape, room = split.images.shape[1:], _SLOTS * size
        images = torch.zeros((room, *shape), dtype=split.images.dtype, device=device)
        self.window = Split(images, torch.zeros(room, dtype=torch.int64, device=device))
        self._slots = torch.arange(room, device=device).split(size)
        self._images = torch.empty((_SLOTS, size, *shape), dtype=split.images.dtype, pin_memory=pinned)
        self._labels = torch.empty((_SLOTS, size), dtype=torch.int64, pin_memory=pinned)
        self._copies = torch.cuda.Stream(device) if pinned else None
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(device))

    def __len__(self) -> int:
        return len(self.split)

    def placed(self, order: Tensor) -> Tensor:
        """An order of images, where `batches` wants it."""
        return order

    def batches(self, order: Tensor, sizes: Sequence[int]) -> Generator[Tensor]:
        """The rows of the window that each step reads; they are there for a step that is begun before the next one is
        asked for."""
        parts = order.split(list(sizes))
        brought: list[torch.cuda.Event | None] = [None] * _SLOTS
        read: list[torch.cuda.Event | None] = [None] * _SLOTS
        workers = ThreadPoolExecutor(_WORKERS, "images")
        try:
            first = [workers.submit(self._gather, part, slot) for slot, part in enumerate(parts[:_SLOTS])]
            gathered: deque[Future[None]] = deque(first)
            for number, part in enumerate(parts):
                slot = number % _SLOTS
                gathered.popleft().result()
                brought[slot] = self._bring(slot, len(part), read[slot])
                yield self._slots[slot][: len(part)]
                read[slot] = self._now()
                if number + _SLOTS < len(parts):
                    if (done := brought[slot]) is not None:
                        done.synchronize()  # the host's memory may be written to again
                    gathered.append(workers.submit(self._gather, parts[number + _SLOTS], slot))
        finally:
            workers.shutdown(cancel_futures=True)

    def _gather(self, index: Tensor, slot: int) -> None:
        """Put these images together, on the host; the GPU is left alone, where a step may be being recorded."""
        rows = index if self.split.rows is None else self.split.rows.index_select(0, index)
        torch.index_select(self.split.images, 0, rows, out=self._images[slot, : len(index)])
        self._labels[slot, : len(index)] = self.split.labels.index_select(0, index)

    def _bring(self, slot: int, count: int, read: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Copy them over, when nobody reads any more what lies there. What comes next waits for that."""
        start = slot * self._images.shape[1]
        images, labels = (part.narrow(0, start, count) for part in (self.window.images, self.window.labels))
        if self._copies is None:
            images.copy_(self._images[slot, :count])
            labels.copy_(self._labels[slot, :count])
            return None
        if read is not None:
            self._copies.wait_event(read)
        with torch.cuda.stream(self._copies):
            images.copy_(self._images[slot, :count], non_blocking=True)
            labels.copy_(self._labels[slot, :count], non_blocking=True)
        done: torch.cuda.Event = self._copies.record_event()
        torch.cuda.current_stream(images.device).wait_event(done)
        return done

    def _now(self) -> torch.cuda.Event | None:
        device = self.window.images.device
        return torch.cuda.current_stream(device).record_event() if self._copies is not None else None


Feed = Resident | Streamed


def feeds(splits: tuple[Split, Split], sizes: tuple[int, int], device: torch.device) -> Callable[[], tuple[Feed, Feed]]:
    """For a learner's training and validation, in batches of at most these sizes; what streams is each learner's own.
    Images for validation come to the device first."""
    train, val = splits
    validation = Resident(_resident(val, device)) if fits(val, device) else None
    training = Resident(_resident(train, device)) if fits(train, device) else None
    return lambda: (training or Streamed(train, device, sizes[0]), validation or Streamed(val, device, sizes[1]))


def fits(split: Split, device: torch.device) -> bool:
    """Whether the device has room for these images and the network beside them, or has them already."""
    if device.type != "cuda" or split.images.is_cuda:
        return True
    each = split.images[:1].numel() * split.images.element_size()
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return len(split) * each <= SHARE * free


def _resident(split: Split, device: torch.device) -> Split:
    """The split's own images on the device, if that is not where they already are."""
    if split.images.device == device:
        return split
    images = split.images if split.rows is None else split.images[split.rows]
    return Split(images.to(device), split.labels.to(device))
