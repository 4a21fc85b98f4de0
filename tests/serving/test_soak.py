"""Sixty thousand requests of mixed tasks while a task is learned: none fails, each answer is predict's."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serving.helpers import Running, until
from tests.store.helpers import learn_more
from zeroforget.store import Prediction, open_model

REQUESTS = 60_000
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

    chance = random.Random(0)
    with Running(garden) as running, ThreadPoolExecutor(16) as pool:
        known = list(expected)
        first = [pool.submit(ask, chance.choice(known)) for _ in range(REQUESTS * 7 // 10)]
        until(lambda: sum(answered.values()) > 500)
        learn_more(model, data, "high")
        during = sum(answered.values())
        know("high")
        until(lambda: len(running.server.catalog.snapshot.tasks) == 3)
        second = [pool.submit(ask, chance.choice(list(expected))) for _ in range(REQUESTS - len(first))]
        for future in first + second:
            future.result()
        batches = sum(running.server.metrics.batches.counts)
    assert not wrong, wrong[:3]
    assert sum(answered.values()) == REQUESTS
    assert during < len(first), "the task was to be learned while requests came"
    assert answered["high"] > 500
    print(f"{REQUESTS} requests in {batches} batches; by task {answered}")
