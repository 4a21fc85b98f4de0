"""Rank births in a folder: every task keeps its bits through saving, shipping, receiving and undoing, in networks of
every kind, whatever optimizer trained what came later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.growing.helpers import train
from tests.growing.test_rank_births import network
from tests.store import own_networks
from zeroforget.nets import own_code
from zeroforget.store import Model, open_model

HERE = "tests.store.own_networks"


@pytest.fixture(autouse=True)
def _nobody_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "_trusted", set())


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("attention", "adamw"),
        *(
            pytest.param(kind, optimizer, marks=pytest.mark.soak)
            for kind, optimizer in {"vgg": "sgd", "resnet": "adamw", "transformer": "sgd", "depthwise": "adamw"}.items()
        ),
    ],
)
def test_tasks_with_rank_births_keep_their_bits_in_a_folder(kind: str, optimizer: str, tmp_path: Path) -> None:
    net, x = network(own_networks.KINDS[kind])
    net.add_task("0", 3)
    train(net, x, kind=optimizer)
    for task, (growth, rank) in enumerate([(0.1, 4), (0.0, 3), (0.2, 2)], 1):
        net.add_task(str(task), 3, growth, rank, images=x, quiet=True)
        train(net, x, kind=optimizer)
    seen, prints = [net(x, task) for task in range(4)], [net.fingerprint(task) for task in range(4)]
    assert all(net.ranks(task) for task in range(1, 4))
    net.save(tmp_path / "m", build=f"{HERE}:{kind}")
    model = open_model(tmp_path / "m")

    def kept(by: Model, tasks: int) -> None:
        whole = by.network().eval()
        assert len(by.tasks) == tasks
        for task in range(tasks):
            assert torch.equal(by.dense(str(task))(x), seen[task]), task
            assert torch.equal(whole(x, task), seen[task]), task
            assert whole.fingerprint(task) == prints[task]

    kept(model, 4)
    assert model.verify().holds
    model.ship(tmp_path / "last.zfu", since="2")
    model.undo()
    kept(model, 3)
    model.ship(tmp_path / "all.zfu")
    received = open_model(tmp_path / "received")
    received.receive(tmp_path / "all.zfu")
    kept(received, 3)
    received.receive(tmp_path / "last.zfu")
    kept(received, 4)
    assert received.verify().holds
    more = received.network()
    more.add_task("4", 2, 0.1, 2, images=x, quiet=True)
    train(more, x, kind=optimizer)
    assert all(torch.equal(more(x, task), seen[task]) for task in range(4))
