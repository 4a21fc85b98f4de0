"""Other threads ask for earlier tasks while the network changes its form."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.tensors import GrowingTensor
from zeroforget.proving.grow import adopt

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def adopted() -> tuple[GrowingNetwork, Tensor]:
    torch.manual_seed(0)
    classifier = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5)).eval()
    net = adopt(classifier.requires_grad_(False), X, task="old")
    net.add_task("second", 3, 0.2)
    return net, classifier(X)


def test_whoever_asks_while_a_task_is_added_gets_the_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network cut out of one that is half made would even be kept, and answer wrongly ever after."""
    net, truth = adopted()
    answers: list[Tensor] = []
    begun, fill = threading.Event(), GrowingTensor._fill

    def slow(self: GrowingTensor, value: Tensor) -> None:
        """Before the old values are back in their places, somebody asks; nobody waits for him longer than this."""
        fill(self, value)
        begun.set()
        asks.join(0.1)

    def ask() -> None:
        begun.wait(10)
        answers.append(net(X, "old"))

    monkeypatch.setattr(GrowingTensor, "_fill", slow)
    asks = threading.Thread(target=ask)
    asks.start()
    net.add_task("third", 3, 0.2)
    asks.join(10)
    assert [torch.equal(answer, truth) for answer in answers] == [True]
    assert torch.equal(net(X, "old"), truth)
    assert torch.equal(net.dense("old")(X), truth)


def test_many_threads_ask_at_once() -> None:
    net, truth = adopted()
    known = {"old": truth, "second": net.eval()(X, "second")}
    stop, wrong = threading.Event(), list[str]()

    def ask() -> None:
        while not stop.is_set():
            for task, expected in known.items():
                with torch.inference_mode():
                    wrong.extend([task] * (not torch.equal(net(X, task), expected)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for number in range(12):
            net.add_task(f"more {number}", 3, 0.05)
            net.train()(X, net.tasks[-1]).sum().backward()
            net.eval()
        for _ in range(6):
            net.drop_task()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert wrong == []


def test_who_asks_for_an_earlier_task_writes_nothing() -> None:
    net, _ = adopted()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.dense("old")
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())
    net.dense("second")
    assert not all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())


def test_a_compiled_network_asks_for_what_is_kept_without_a_lock() -> None:
    """It cannot follow one."""
    net, truth = adopted()
    net.eval()(X, "old")
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(X, "old"), truth)


def test_copies_and_saved_networks_have_a_lock_of_their_own(tmp_path: Path) -> None:
    net, truth = adopted()
    torch.save(net, tmp_path / "net.pt")
    for other in (copy.deepcopy(net), torch.load(tmp_path / "net.pt", weights_only=False)):
        assert other.lock is not net.lock
        with net.lock:
            found: list[Tensor] = []
            asks = threading.Thread(target=lambda other=other, found=found: found.append(other(X, "old")))
            asks.start()
            asks.join(10)
        assert torch.equal(found[0], truth)
