"""`net.fit`: any growing network learns from any loader, old tasks keep their bits, and resuming changes none."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import zeroforget
from zeroforget.growing.network import GrowingNetwork
from zeroforget.progress import Epoch, Progress
from zeroforget.training.seeding import seeded


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Points around two centres, moved at random by everything that augmentations draw from."""

    def __init__(self, count: int = 40) -> None:
        self.y = torch.arange(count) % 2
        with seeded("points"):
            self.x = torch.randn(count, 6) + 2.0 * self.y[:, None]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        moved = torch.randn(6) + random.random() + float(np.random.rand())
        return self.x[row] + 0.1 * moved, self.y[row]


def network(**options: Any) -> GrowingNetwork:
    with seeded("net"):
        body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        return zeroforget.grow(body, torch.randn(4, 6), **({"start": 0.5} | options))


def loaders(**options: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    data = Noisy()
    return DataLoader(data, batch_size=8, shuffle=True, **options), DataLoader(data, batch_size=16)


def same(a: GrowingNetwork, b: GrowingNetwork) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


class Hostile(torch.optim.Optimizer):
    """Decays, jumps and writes wherever it can reach."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9).add_(torch.randn_like(parameter), alpha=group["lr"])
                parameter.data.untyped_storage()  # what it holds is its own
                parameter.data -= group["lr"] * torch.sign(parameter.data)


OPTIMIZERS: list[Any] = [
    "adamw",
    Hostile,
    lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=0.5),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_older_tasks_do_not_move_by_a_bit_whatever_the_optimizer(optimizer: Any) -> None:
    net, (train, val), x = network(), loaders(), torch.randn(5, 6)
    log = net.fit(train, val, task="one", classes=["low", "high"], epochs=8, lr=0.05)
    assert log.val_accuracy > 0.8
    before, answers = net.fingerprint("one"), net(x, "one")
    net.fit(train, val, task="two", classes=2, epochs=3, lr=0.05, optimizer=optimizer, rank=2)
    net.fit(train, val, task="three", classes=3, epochs=2, lr=0.05, optimizer=optimizer, growth=0.25)
    assert net.fingerprint("one") == before
    assert torch.equal(net(x, "one"), answers)
    assert net.ranks("two")
    assert net.history[2].growth == 0.25
    assert not net.training


class Stop(Exception):
    """An interruption."""


def stopping(after: int) -> Callable[[Progress], None]:
    def told(progress: Progress) -> None:
        if progress.epoch >= after:
            raise Stop

    return told


@pytest.mark.parametrize("own", [False, True], ids=["global draws", "a generator of its own"])
def test_interrupted_and_resumed_ends_with_the_same_bits(tmp_path: Path, own: bool) -> None:
    def taught(folder: Path | None, progress: Any = False) -> GrowingNetwork:
        net = network()
        generator = torch.Generator().manual_seed(3) if own else None
        train, val = loaders(generator=generator)
        net.fit(train, val, task="one", classes=2, epochs=2, lr=0.01)
        options: dict[str, Any] = {"epochs": 5, "lr": 0.02, "growth": 0.25, "rank": 1, "folder": folder}
        net.fit(train, val, task="two", classes=2, progress=progress, **options)
        return net

    whole = taught(None)
    with pytest.raises(Stop):
        taught(tmp_path / "run", stopping(3))
    torch.manual_seed(12)  # another process has drawn other numbers
    heard: list[Progress] = []
    resumed = taught(tmp_path / "run", heard.append)
    assert heard[0].epoch == 3
    assert same(whole, resumed)
    assert not same(whole, network())


def test_an_interruption_leaves_the_network_as_it_was_be_it_the_first_task_or_a_later_one() -> None:
    net, (train, val) = network(), loaders()
    for task, tasks in (("one", ()), ("two", ("one",))):
        before, parts = {k: v.clone() for k, v in net.state_dict().items()}, list(net.modules())
        with pytest.raises(Stop):
            net.fit(train, val, task=task, classes=2, epochs=4, progress=stopping(1))
        assert net.tasks == tasks
        assert list(net.modules()) == parts
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        net.fit(train, val, task=task, classes=2, epochs=1)


def test_random_numbers_of_others_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    train, val = loaders(generator=generator)
    states = [generator.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()]  # type: ignore[index]
    network().fit(train, val, task="one", classes=2, epochs=1)
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == states[2]
    assert np.array_equal(np.random.get_state()[1], states[3])  # type: ignore[index]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(3, 8)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.relu(self.a(left) + self.b(right))


class Rows(IterableDataset[Any]):
    """It does not tell how many there are."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_batches_are_pairs_tuples_dictionaries_arrays_or_of_unknown_number() -> None:
    data = Noisy()
    halves = data.x.split(3, 1)
    forms: list[Any] = [
        [((halves[0][i], halves[1][i]), data.y[i]) for i in torch.arange(40).split(10)],
        [(halves[0][i], halves[1][i], data.y[i]) for i in torch.arange(40).split(10)],
        [{"left": halves[0][i], "right": halves[1][i], "labels": data.y[i]} for i in torch.arange(40).split(10)],
        [{"left": halves[0][i].numpy(), "right": halves[1][i].numpy(), "labels": data.y[i].numpy()}
         for i in torch.arange(40).split(10)],
        DataLoader(Rows([(a, b, y) for a, b, y in zip(*halves, data.y, strict=True)]), batch_size=10),
    ]  # fmt: skip
    states = []
    for form in forms:
        with seeded("net"):
            net = zeroforget.grow(TwoInputs(), (halves[0][:2], halves[1][:2]), start=0.5)
        log = net.fit(form, form, task="one", classes=2, epochs=3, lr=0.02, rank=None)
        assert math.isfinite(log.val_accuracy)
        states.append(net)
    assert all(same(states[0], other) for other in states[1:])


def test_a_loss_of_ones_own_learns_numbers_and_several_labels() -> None:
    x = Noisy().x
    numbers = x[:, :1] * 2 - 1
    pairs = [(x[i], numbers[i]) for i in torch.arange(40).split(10)]
    net = network()
    said: list[Progress] = []
    log = net.fit(
        pairs, pairs, task="price", classes=["euro"], loss=nn.MSELoss(), epochs=20, lr=0.02, progress=said.append
    )
    assert math.isnan(log.val_accuracy)
    assert log.epochs[log.best].val_loss < 0.5 * log.epochs[0].val_loss
    assert net(x, "price").shape == (40, 1)
    several = torch.stack([x[:, 0] > 1, x[:, 1] > 1, x[:, 2] > 1], 1).float()
    pairs = [(x[i], several[i]) for i in torch.arange(40).split(10)]
    log = net.fit(pairs, pairs, task="marks", classes=["a", "b", "c"], loss=nn.BCEWithLogitsLoss(), epochs=15, lr=0.02)
    assert log.val_accuracy > 0.7
    within = net.fit(
        pairs, pairs, task="again", classes=3, loss=nn.MSELoss(), epochs=1, keep="accurate",
        score=lambda out, y: (out - y).abs().mean(1) < 10,
    )  # fmt: skip
    assert within.val_accuracy == 1.0


def test_training_stops_early_and_a_callback_may_end_it() -> None:
    train, val = loaders()
    net, heard = network(), list[Epoch]()
    log = net.fit(train, val, task="one", classes=2, epochs=9, callbacks=[heard.append, lambda epoch: epoch.epoch == 1])
    assert [epoch.epoch for epoch in heard] == [0, 1]
    assert log.stopped == "a callback ended it"
    random_labels = DataLoader(TensorDataset(torch.randn(16, 6), torch.arange(16) % 2), batch_size=8)
    log = net.fit(train, random_labels, task="two", classes=2, epochs=60, patience=1, decay=10, lr=0.05)
    assert log.stopped == "learning rate below its bound"
    assert len(log.epochs) < 60


def test_mixed_precision_and_the_newest_task_learning_on() -> None:
    train, val = loaders()
    net = network()
    first = net.fit(train, val, task="one", classes=["low", "high"], epochs=2, precision="bf16")
    with torch.no_grad():
        weight = net.heads[0].get_parameter("weight").clone()
    net.fit(train, val, task="one", epochs=3, lr=0.02)
    assert net.tasks == ("one",)
    assert math.isfinite(first.val_accuracy)
    assert not torch.equal(net.heads[0].get_parameter("weight"), weight)


def test_names_of_classes_are_kept_and_shown_and_networks_saved_before_them_load() -> None:
    net = network()
    net.add_task("birds", ["robin", "wren"])
    net.add_task("cars", 3)
    net.add_task("many", [f"class number {n}" for n in range(9)])
    assert net.history[0].names == ("robin", "wren")
    assert net.history[1].names == ()
    assert "2 (robin, wren)" in str(net)
    assert "9 (class number 0, class number 1,…)" in str(net)
    older = pickle.loads(pickle.dumps(net))
    for record in older.history:
        record.__dict__.pop("names", None)
    assert older.history[0].names == ()
    assert "birds" in str(older)
    plain = network()
    plain.add_task("birds", 2)
    with seeded("same"):
        named = network()
        named.add_task("birds", ["robin", "wren"])
    assert named.dense("birds").state_dict().keys() == plain.dense("birds").state_dict().keys()
    classifier = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    assert zeroforget.adopt(classifier, torch.randn(4, 6), classes=["a", "b"]).history[0].names == ("a", "b")


PAIR = [(torch.zeros(4, 6), torch.tensor([0, 1, 0, 1]))]
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"task": "new"}, "'new' is a new task: name its classes"),
    ({"task": "one", "classes": None}, "task 'one' is finished: its features are read by 'two'"),
    ({"task": "two", "classes": 5}, "'two' is there already, with other classes"),
    ({"classes": ["a", "a"]}, "names each class once"),
    ({"classes": "ab"}, "at least 2, not 'ab'"),
    ({"classes": ["a"]}, "one output has nothing to choose from: give a loss"),
    ({"epoch": 3}, "no option 'epoch'; did you mean 'epochs'?"),
    ({"train": iter(PAIR)}, "train can be gone through once"),
    ({"val": []}, "val gives no batch"),
    ({"train": 3}, "train is a DataLoader or another iterable of batches, not int"),
    ({"train": [torch.zeros(3, 6)]}, "a batch is .inputs, targets."),
    ({"train": [{"x": torch.zeros(3, 6), "y": torch.zeros(3)}]}, "none is 'labels': say which holds the targets"),
    ({"train": [(torch.zeros(4, 6), torch.zeros(4))]}, "targets are a whole number for each example"),
    ({"train": [(torch.zeros(4, 6), torch.tensor([0, 1, 2, 3]))]}, "targets run from 0 to 3, but the 2 classes"),
    ({"optimizer": lambda parameters, lr: None}, "optimizer must make a torch.optim.Optimizer"),
    ({"loss": nn.MSELoss(), "mixup": 0.5}, "only the default loss knows"),
    ({"loss": nn.MSELoss(), "keep": "accurate"}, "needs a score of each example"),
    ({"loss": lambda out, y: 3.0}, "must return one number with a gradient"),
    ({"lr": -1.0}, "lr"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_are_told_in_one_sentence_and_change_nothing(changes: dict[str, Any], message: str) -> None:
    net = network()
    net.add_task("one", 2)
    net.add_task("two", 2)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    given: dict[str, Any] = {"task": "three", "train": PAIR, "val": PAIR, "epochs": 1}
    given |= {"classes": 2} if "task" not in changes else {}
    given |= changes
    with pytest.raises(ValueError, match=message) as error:
        net.fit(given.pop("train"), given.pop("val"), **given)
    assert "\n" not in str(error.value)
    assert net.tasks == ("one", "two")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_folder_keeps_to_the_training_it_was_begun_for(tmp_path: Path) -> None:
    train, val = loaders()
    network().fit(train, val, task="one", classes=2, epochs=1, folder=tmp_path)
    with pytest.raises(ValueError, match=r"holds another training: lr was 0\.001"):
        network().fit(train, val, task="one", classes=2, epochs=1, folder=tmp_path, lr=0.01)
    (tmp_path / "fit.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        network().fit(train, val, task="one", classes=2, epochs=1, folder=tmp_path)


def test_asking_without_a_task_says_what_to_name() -> None:
    net = network()
    with pytest.raises(ValueError, match=r"name the task: net\(x, task\).* none yet; call add_task first"):
        net(torch.zeros(1, 6))
    net.add_task("one", 2)
    with pytest.raises(ValueError, match=r"name the task: .* the tasks are 'one'"):
        net(torch.zeros(1, 6))
    several = zeroforget.grow(TwoInputs(), (torch.zeros(2, 3), torch.zeros(2, 3)))
    with pytest.raises(ValueError, match=r"name the task: net\(x, task\)"):
        several(torch.zeros(2, 3), torch.zeros(2, 3))
