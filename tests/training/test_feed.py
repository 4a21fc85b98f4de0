"""Images that do not fit on the device: brought over batch by batch, the same to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroforget.data import Preparation, Split, Task
from zeroforget.methods.finetuning import Finetuning
from zeroforget.methods.tfm import Tfm
from zeroforget.training import Fit, Progress, Regime, feed
from zeroforget.training import fit as loop
from zeroforget.training.feed import Resident, Streamed, feeds, fits
from zeroforget.training.seeding import seeded

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 120), st.integers(1, 12), st.booleans(), st.integers(0, 9))
def test_batches_are_those_of_a_split_that_is_there(images: int, batch: int, chosen: bool, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    values = torch.randint(256, (2 * images, 1, 3, 2), generator=draws, dtype=torch.uint8)
    rows = torch.randperm(2 * images, generator=draws)[:images] if chosen else None
    split = Split(values if chosen else values[:images], torch.randint(5, (images,), generator=draws).int(), rows)
    sizes, order = loop._sizes(images, batch), torch.randperm(images, generator=draws)
    streamed = Streamed(split, CPU, batch + 1)
    for _ in range(2):  # epoch after epoch
        assert len(streamed) == images
        seen = [streamed.window.batch(rows) for rows in streamed.batches(streamed.placed(order), sizes)]
        there = Resident(split)
        expected = [there.window.batch(rows) for rows in there.batches(there.placed(order), sizes)]
        assert [len(y) for _, y in seen] == sizes
        for (x, y), (wanted_x, wanted_y) in zip(seen, expected, strict=True):
            assert torch.equal(x, wanted_x)
            assert torch.equal(y, wanted_y)
            assert y.dtype == wanted_y.dtype
        order = order.flip(0)


class Lazy(TorchDispatchMode):
    """A stream whose work is done when somebody waits for it; copies inside of it belong to it. Who is deaf does not
    wait for others."""

    def __init__(self, deaf: bool) -> None:
        super().__init__()
        self.deaf = deaf
        self.todo: list[Callable[[], Any]] = []
        self.done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note copies; views are made at once."""
        if func is torch.ops.aten.copy_.default:
            self.todo.append(lambda: func(*args))
            return args[0]
        return func(*args, **(kwargs or {}))

    def wait_event(self, event: Event) -> None:
        """What comes next comes after it."""
        if not self.deaf:
            self.todo.append(event.run)

    def record_event(self) -> Event:
        """All until now."""
        return Event(self, len(self.todo))


class Event:
    """A place in a stream."""

    deaf = False
    """Whether the host does not wait."""

    def __init__(self, stream: Lazy, until: int) -> None:
        self.stream, self.until = stream, until

    def run(self) -> None:
        """Do what is not yet done before it."""
        while self.stream.done < self.until:
            self.stream.done += 1
            self.stream.todo[self.stream.done - 1]()

    def synchronize(self) -> None:
        """The host waits."""
        if not self.deaf:
            self.run()


def seen_in_order(first: str, deaf: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps that read as late as they may (copies come first), or copies that come as late as they may (steps
    come first), see what they should."""
    images = torch.arange(400.0).view(100, 1, 2, 2)
    streamed = Streamed(Split(images, torch.arange(100)), CPU, 3)
    steps, copies, seen = Lazy(deaf == "steps"), Lazy(deaf == "copies"), list[tuple[Tensor, Tensor]]()
    streamed._copies = copies  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(Event, "deaf", deaf == "host")
    order, sizes = torch.randperm(100, generator=torch.Generator().manual_seed(0)), [3] * 33 + [1]
    for rows in streamed.batches(order, sizes):
        steps.todo.append(lambda rows=rows: seen.append(streamed.window.batch(rows)))
    for stream in (steps, copies) if first == "steps" else (copies, steps):
        stream.record_event().run()
    assert len(seen) == 34
    return all(
        torch.equal(x, images[index]) and torch.equal(y, index)
        for (x, y), index in zip(seen, order.split(sizes), strict=True)
    )


@pytest.mark.parametrize("first", ["steps", "copies"])
def test_nothing_is_overwritten_before_it_is_read_or_read_before_it_is_there(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen_in_order(first, "nobody", monkeypatch)


@pytest.mark.parametrize(("first", "deaf"), [("steps", "steps"), ("copies", "copies"), ("steps", "host")])
def test_who_did_not_wait_would_be_noticed(first: str, deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not seen_in_order(first, deaf, monkeypatch)


def task(folder: Any = None, name: str = "t") -> Task:
    """Small pictures, from a file if there is a folder."""
    draw = torch.Generator().manual_seed(len(name))
    y = torch.arange(150) % 3
    x = (torch.randn(150, 1, 6, 6, generator=draw) * 30 + 60 + 50 * y.view(-1, 1, 1, 1)).clamp(0, 255).byte()
    if folder is not None:
        np.save(folder / f"{name}.npy", x.numpy())
        x = torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))
    parts = [Split(x, y[rows], rows) for rows in torch.arange(150).split([101, 30, 19])]
    return Task(name, ("a", "b", "c"), *parts, Preparation((0.4,), (0.3,), pad=1, flip=True))


def method(cls: type) -> Any:
    with seeded("net"):
        body = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 8), nn.ReLU()
        )
        return cls(body, torch.randn(2, 1, 6, 6))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", [Finetuning, Tfm])
@pytest.mark.parametrize("batch", [10, 150])
def test_a_network_learns_the_same(
    cls: type, batch: int, device: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = [], list[bool]()
    regime = Regime(epochs=3, batch_size=batch, device=device)
    for there in (True, False):

        def room(split: Split, device: torch.device, there: bool = there) -> bool:
            asked.append(there)
            return there

        monkeypatch.setattr(feed, "fits", room)
        learner = method(cls).to(device)
        with seeded("heads"):
            logs = [learner.learn(task(tmp_path, name), Fit(regime)) for name in ("a", "bc")]
        epochs = [replace(epoch, seconds=0.0) for log in logs for epoch in log.epochs]
        found.append((epochs, {name: value.cpu() for name, value in learner.state_dict().items()}))
    assert asked == [True] * 4 + [False] * 4
    if device == "cpu":  # on a GPU two runs may round otherwise
        assert found[0][0] == found[1][0]
        assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    else:
        torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2, atol=1e-3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("images")]


def test_whoever_stops_in_the_middle_leaves_no_thread_and_can_go_on(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "fits", lambda split, device: False)

    def stop(progress: Progress) -> None:
        if progress.epoch == 1 and progress.step == 3:
            raise KeyboardInterrupt

    regime = Regime(epochs=3, batch_size=5)
    whole, again = method(Finetuning), method(Finetuning)
    with seeded("heads"):
        whole.learn(task(), Fit(regime))
    with seeded("heads"), pytest.raises(KeyboardInterrupt):
        again.learn(task(), Fit(regime, folder=tmp_path, progress=stop))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("images")]
    with seeded("heads"):
        again.learn(task(), Fit(regime, folder=tmp_path))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_an_error_while_images_are_gathered_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Streamed, index: Tensor, slot: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(feed, "fits", lambda split, device: False)
    monkeypatch.setattr(Streamed, "_gather", lost)
    learner = method(Finetuning)
    with pytest.raises(OSError, match="the disk is gone"):
        learner.learn(task(), Fit(Regime(epochs=1)))
    assert not learner.specs


def test_images_may_take_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, split = (
        torch.device("cuda"),
        Split(torch.zeros(9, 1, 10, 10, dtype=torch.uint8), torch.zeros(5), torch.arange(5)),
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    for free, room in ((900, True), (899, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**9))
        assert fits(split, gpu) == room
    assert fits(split, CPU)


def test_each_learner_has_a_window_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = task()
    made = feeds((given.train, given.val), (11, 256), CPU)
    assert made()[0] is made()[0]
    monkeypatch.setattr(feed, "fits", lambda split, device: len(split) < 50)
    made = feeds((given.train, given.val), (11, 256), CPU)
    (train, val), (other, same) = made(), made()
    assert isinstance(train, Streamed)
    assert isinstance(val, Resident)
    assert train is not other
    assert val is same
