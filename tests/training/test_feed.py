"""Images that do not fit on the device: brought over batch by batch, the same to the bit."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.operators.streams import Event, Way
from zeroforget.data import Preparation, Split, Task
from zeroforget.methods.baselines import Finetuning
from zeroforget.methods.tfm import Tfm
from zeroforget.training import Fit, Progress, Regime, feed
from zeroforget.training.feed import Resident, Streamed, batch_sizes, feeds
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
    sizes, order = batch_sizes(images, batch), torch.randperm(images, generator=draws)
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


def seen_in_order(first: str, deaf: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps that read as late as they may (copies come first), or copies that come as late as they may (steps
    come first), see what they should, if somebody is `deaf` and does not wait for the others."""
    images = torch.arange(400.0).view(100, 1, 2, 2)
    streamed = Streamed(Split(images, torch.arange(100)), CPU, 3)
    ways, seen = {"steps": Way(), "copies": Way()}, list[tuple[Tensor, Tensor]]()
    steps, copies = ways.values()
    streamed._copies = copies  # type: ignore[assignment]
    if deaf == "host":
        monkeypatch.setattr(Event, "synchronize", lambda event: None)
    elif deaf in ways:
        monkeypatch.setattr(ways[deaf], "wait_event", lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    order, sizes = torch.randperm(100, generator=torch.Generator().manual_seed(0)), [3] * 33 + [1]
    for _ in range(2):  # epoch after epoch, without a pause
        for rows in streamed.batches(order, sizes):
            steps.later(lambda rows: seen.append(streamed.window.batch(rows)), (rows,), {})
    for stream in (steps, copies) if first == "steps" else (copies, steps):
        stream.record_event().run()
    parts = order.split(sizes) * 2
    assert len(seen) == len(parts) == 68
    found = zip(seen, parts, strict=True)
    return all(torch.equal(x, images[index]) and torch.equal(y, index) for (x, y), index in found)


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
    return Task(name, ("a", "b", "c"), *parts, Preparation((0.4,), (0.3,), pad=1, flip=True))  # type: ignore[call-arg]


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

        def room(device: torch.device, there: bool = there) -> float:
            asked.append(there)
            return math.inf if there else -1

        monkeypatch.setattr(feed, "budget", room)
        learner = method(cls).to(device)
        with seeded("heads"):
            logs = [learner.learn(task(tmp_path, name), Fit(regime)) for name in ("a", "bc")]
        epochs = [replace(epoch, seconds=0.0) for log in logs for epoch in log.epochs]
        found.append((epochs, {name: value.cpu() for name, value in learner.state_dict().items()}))
    assert asked == [True] * 2 + [False] * 2
    if device == "cpu":  # on a GPU two runs may round otherwise
        assert found[0][0] == found[1][0]
        assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    else:
        torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2, atol=1e-3)


def test_whoever_stops_in_the_middle_leaves_nobody_at_work_and_can_go_on(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, at_work = Streamed.gather, list[int]()

    def slow(self: Streamed, index: Tensor, slot: int) -> None:
        at_work.append(slot)
        time.sleep(0.02)
        plain(self, index, slot)
        at_work.remove(slot)

    def stop(progress: Progress) -> None:
        if progress.epoch == 1 and progress.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(feed, "budget", lambda device: -1)
    regime = Regime(epochs=3, batch_size=5)
    whole, again = method(Finetuning), method(Finetuning)
    with seeded("heads"):
        whole.learn(task(), Fit(regime))
    with monkeypatch.context() as patch:
        patch.setattr(Streamed, "gather", slow)
        with seeded("heads"), pytest.raises(KeyboardInterrupt) as stopped:
            again.learn(task(), Fit(regime, folder=tmp_path, progress=stop))
        assert not at_work
    assert stopped.tb is not None  # it keeps alive whatever was going on
    with seeded("heads"):
        again.learn(task(), Fit(regime, folder=tmp_path))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_an_error_while_images_are_gathered_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Streamed, index: Tensor, slot: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(feed, "budget", lambda device: -1)
    monkeypatch.setattr(Streamed, "gather", lost)
    learner = method(Finetuning)
    with pytest.raises(OSError, match="the disk is gone"):
        learner.learn(task(), Fit(Regime(epochs=1)))
    assert not learner.specs


def test_images_may_take_half_of_what_is_free_and_those_for_validation_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 10**9))
    assert feed.budget(torch.device("cuda")) == 500
    assert feed.budget(CPU) == math.inf

    images = torch.zeros(30, 1, 10, 10, dtype=torch.uint8)
    train, val = (Split(images, torch.zeros(n), torch.arange(n)) for n in (9, 4))
    elsewhere = torch.device("meta")
    assert feed._needed(train, CPU) == 0
    assert feed._needed(train, elsewhere) == 900
    for room, expected in (
        (1300, [Resident, Resident]),
        (1299, [Streamed, Resident]),
        (399, [Streamed, Streamed]),
    ):
        monkeypatch.setattr(feed, "budget", lambda device, room=room: room)
        assert [type(each) for each in feeds((train, val), (3, 4), elsewhere)] == expected


def test_a_window_is_smaller_than_what_it_is_for() -> None:
    for images, size, rows in ((1000, 256, 512), (1000, 1025, 1000), (5000, 65, 520), (100, 10, 20), (3, 2, 4)):
        split = Split(torch.zeros(images, 1), torch.zeros(images).long())
        assert len(Streamed(split, CPU, size).window) == rows


def test_parts_that_lie_elsewhere_are_brought_together() -> None:
    there = torch.device("meta")
    images, labels, rows = torch.zeros(6, 1, device=there), torch.zeros(3), torch.arange(3)
    moved = feed._resident(Split(images, labels, rows), there)
    assert {t.device for t in (moved.images, moved.labels, moved.rows) if t is not None} == {there}
    assert moved.images is images


def test_memory_that_runs_out_costs_no_phase(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "budget", lambda device: -1)
    fit, learner = Fit(Regime(epochs=1), folder=tmp_path), method(Finetuning)
    with monkeypatch.context() as patch:
        patch.setattr(Streamed, "__init__", _no_room)
        with pytest.raises(torch.OutOfMemoryError):
            learner.learn(task(), fit)
    learner.learn(task(), fit)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["phase-000.safetensors"]


def _no_room(*args: Any) -> None:
    raise torch.OutOfMemoryError("no room")
