"""Training from shards: the bits of training from a folder, exact orders for every process, and legs of an epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from tests.training.ranks import together
from zeroforget.data import Images, Preparation, Split, Task
from zeroforget.methods.registry import build
from zeroforget.processes import Processes
from zeroforget.training import Fit, Progress, Regime, feed
from zeroforget.training.feed import ALONE, Sharded, batch_sizes


class Shelves(Images):
    """Images in memory that say they lie in shards of so many."""

    def __init__(self, values: Tensor, each: int) -> None:
        self.values, self.each, self.expected = values, each, list[Tensor]()
        self.shape = tuple(values.shape)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        return self.values.index_select(0, rows)

    def shards(self, rows: Tensor | None) -> npt.NDArray[np.int32]:
        where = torch.arange(len(self)) if rows is None else rows
        return (where // self.each).int().numpy()

    def expect(self, rows: Tensor) -> None:
        self.expected.append(rows)


def task(each: int | None, images: int = 48) -> Task:
    draws = torch.Generator().manual_seed(0)
    values = torch.randint(256, (images + 8, 3, 6, 6), generator=draws, dtype=torch.uint8)
    held: Tensor | Images = values if each is None else Shelves(values, each)
    labels = torch.arange(images + 8) % 2
    train = Split(held, labels[:images], torch.arange(images))
    val = Split(held, labels[images:], torch.arange(images, images + 8))
    return Task("signs", ("stop", "go"), train, val, val, Preparation((0.5,) * 3, (0.25,) * 3, pad=1, flip=True))


def body() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(144, 8), nn.ReLU())


def learned(each: int | None, method: str = "finetuning", **options: Any) -> dict[str, Tensor]:
    model = build(method, body(), torch.randn(2, 3, 6, 6))
    optimizer = "sgd" if method == "hat" else "adamw"
    model.learn(task(each), Fit(Regime(epochs=2, batch_size=4, optimizer=optimizer, lr=0.01), seed=1, **options))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_few_shards_train_what_a_folder_trains_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert equal(learned(None), learned(8))
    monkeypatch.setattr(feed, "WINDOW", 2)
    assert not equal(learned(None), learned(8))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_process_reads_its_own_shards_a_window_at_a_time(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "WINDOW", 2)
    rows = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:90]
    images = Shelves(torch.zeros(100, 1, 2, 2, dtype=torch.uint8), 10)
    sharded = Sharded(Split(images, torch.zeros(90).long(), rows), torch.device("cpu"), 8)
    sizes = batch_sizes(90, 8, world)
    seen: list[Tensor] = []
    for rank in range(world):
        processes = replace(ALONE, rank=rank, world=world) if world > 1 else ALONE
        order = sharded.shuffled(torch.Generator().manual_seed(5), sizes, processes)
        assert torch.equal(order, sharded.shuffled(torch.Generator().manual_seed(5), sizes, processes))
        assert len(order) == sum(processes.sizes(sizes))
        where = images.shards(rows[order])
        last = {shard: place for place, shard in enumerate(where)}
        open_at = [len({s for s in last if list(where).index(s) <= place <= last[s]}) for place in range(len(where))]
        assert max(open_at) <= 2  # never more shards than a window has
        assert len(set(where)) <= -(-10 // world) + 1
        seen.append(order)
    assert torch.cat(seen).sort().values.tolist() == list(range(90))
    other = sharded.shuffled(torch.Generator().manual_seed(6), sizes, Processes())
    assert other.tolist() != seen[0].tolist()


class Stop(Exception):
    pass


def stopping(at: Sequence[int]) -> Any:
    def told(progress: Progress) -> None:
        if (progress.epoch, progress.step) == tuple(at):
            raise Stop

    return told


@pytest.mark.parametrize("method", ["finetuning", "tfm", "si", "hat"])
@pytest.mark.parametrize("place", [(0, 5), (1, 11)])
def test_an_epoch_goes_on_in_its_middle_with_the_same_bits(
    method: str, place: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sharded, "leg", 3)
    monkeypatch.setattr(feed, "WINDOW", 2)
    whole = learned(8, method)
    with pytest.raises(Stop):
        learned(8, method, folder=tmp_path, progress=stopping(place))
    steps: list[tuple[int, int]] = []
    again = learned(8, method, folder=tmp_path, progress=lambda p: steps.append((p.epoch, p.step)))
    assert equal(whole, again)
    assert steps[0] == (place[0], (place[1] - 1) // 3 * 3 + 1)


def cut(folder: Path) -> tuple[bool, list[tuple[int, int]], dict[str, Tensor]]:
    """In each process: whether training that stopped in an epoch ends with the same bits, and the steps it made."""
    Sharded.leg, feed.WINDOW = 3, 2
    whole, steps = learned(8), list[tuple[int, int]]()
    with contextlib.suppress(Stop):
        learned(8, folder=folder, progress=stopping((1, 8)))
    again = learned(8, folder=folder, progress=lambda p: steps.append((p.epoch, p.step)))
    return equal(whole, again), steps, again


@pytest.mark.soak
def test_two_processes_go_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    one, other = together(2, cut, tmp_path)
    for same, steps, _ in (one, other):
        assert same
        assert steps[0] == (1, 7)
    assert equal(one[2], other[2])


def test_legs_change_nothing_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learned(8)
    monkeypatch.setattr(Sharded, "leg", 12)
    assert equal(one, learned(8))
