"""Sixty thousand requests of mixed tasks while a task is learned: none fails, each answer is predict's."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.campaigns import SEED, many
from tests.serving.helpers import Client, Running, memory, until
from tests.serving.test_workers import several
from tests.store.helpers import learn_more
from zeroforget.store import Prediction, open_model

REQUESTS = many(60_000)
Case = tuple[Path, str]


@pytest.mark.soak
def test_sixty_thousand_mixed_requests_while_a_task_is_added(garden: Path, data: Path) -> None:
    model, files = open_model(garden), sorted(data.rglob("*.png"))
    expected: dict[Case, Prediction] = {}

    def know(task: str) -> None:
        expected.update({(file, task): one for file, one in zip(files, model.predict(files, task), strict=True)})

    know("low")
    know("middle")
    wrong: list[object] = []
    answered: dict[str, int] = {}
    held, lock = threading.local(), threading.Lock()

    def ask(case: Case) -> None:
        if not hasattr(held, "client"):
            held.client = running.client()
        said, right = held.client.predict(case[0], task=case[1], top=3), expected[case]
        if said.status != 200:
            wrong.append(said)
            return
        found = said.json["classes"]
        same = [one["class"] for one in found] == [name for name, _ in right.classes]
        near = all(abs(one["probability"] - p) <= 1e-5 for one, (_, p) in zip(found, right.classes, strict=True))
        if not (same and near):
            wrong.append((case, found, right))
        with lock:
            answered[case[1]] = answered.get(case[1], 0) + 1

    seen: list[str] = []
    done = threading.Event()

    def watch(server: Running) -> None:
        client = server.client()
        while not done.wait(0.2):
            seen.append(client.ask("/health").json["status"])

    chance = random.Random(SEED)
    with Running(garden) as running, ThreadPoolExecutor(16) as pool:
        known = list(expected)
        first = [pool.submit(ask, chance.choice(known)) for _ in range(REQUESTS * 7 // 10)]
        until(lambda: sum(answered.values()) > 500)
        health = threading.Thread(target=watch, args=[running])
        health.start()
        learn_more(model, data, "high")
        before = memory()
        for _ in range(3):  # taken back, learned again: what is served changes each time
            model.undo()
            learn_more(model, data, "high")
            until(lambda: running.server.catalog.snapshot.chain.head == model.head)
        during = sum(answered.values())
        know("high")
        until(lambda: len(running.server.catalog.snapshot.tasks) == 3)
        second = [pool.submit(ask, chance.choice(list(expected))) for _ in range(REQUESTS - len(first))]
        for future in first + second:
            future.result()
        batches, changes = sum(running.server.metrics.batches.counts), running.server.catalog.changes
        done.set()
        health.join()
        grown = (memory() - before) / 2**20
    assert not wrong, wrong[:3]
    assert sum(answered.values()) == REQUESTS
    assert during < len(first), "the task was to be learned while requests came"
    assert answered["high"] > 500
    assert set(seen) == {"ok"}
    assert changes >= 3
    assert grown < 200
    print(
        f"{REQUESTS} requests in {batches} batches; by task {answered}; {changes} changes of the model, "
        f"{len(seen)} times healthy, {grown:.0f} MiB more at the end"
    )


@pytest.mark.soak
def test_requests_to_several_processes_while_the_model_changes(garden: Path, data: Path, tmp_path: Path) -> None:
    """Each is answered, and right, by whichever process; none of them is older than a look and a reading."""
    model, files = open_model(garden), sorted(data.rglob("*.png"))
    names = {task: [one.label for one in model.predict(files, task)] for task in ("low", "middle")}
    cases = [(file, task, label) for task, labels in names.items() for file, label in zip(files, labels, strict=True)]
    chance, wrong, held = random.Random(SEED), list[object](), threading.local()

    def ask(case: tuple[Path, str, str]) -> None:
        if not hasattr(held, "client"):
            held.client = Client(server.port)
            clients.append(held.client)
        said = held.client.predict(case[0], task=case[1], top=1)
        if said.status != 200 or said.json["classes"][0]["class"] != case[2]:
            wrong.append((case, said))

    late, clients = [], list[Client]()
    with several(garden, tmp_path / "tmp", "--connections", "100") as server, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, chance.choice(cases)) for _ in range(many(10_000))]
        for _ in range(4):
            learn_more(model, data, "high")
            began, head = time.monotonic(), model.head
            until(lambda head=head: [one["model"] for one in server.pulses()] == [head, head])
            late.append(time.monotonic() - began)
            model.undo()
        for future in asked:
            future.result()
        for client in clients:
            client.close()
    assert not wrong, wrong[:3]
    print(f"{len(asked)} requests, none wrong; both processes had switched after {max(late):.1f} seconds at most")
