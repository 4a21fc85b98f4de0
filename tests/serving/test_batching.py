"""Requests are classified together, many tasks at once, each as `predict` would; memory has a bound."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.serving.helpers import Running
from zeroforget.serving.batching import Answer, Batcher, Question
from zeroforget.serving.catalog import Networks, Snapshot, size, take
from zeroforget.serving.metrics import Metrics
from zeroforget.serving.settings import Settings
from zeroforget.store import open_model
from zeroforget.store.folder import Folder


@pytest.fixture(scope="module")
def snapshot(trained: Path) -> Snapshot:
    return take(Folder(trained))


def gather(batcher: Batcher, snapshot: Snapshot, asked: list[tuple[str | None, bytes]]) -> list[Answer]:
    """Ask everything at once, and let the worker begin when all of it waits."""

    async def ask() -> list[Answer]:
        tasks = [
            asyncio.create_task(batcher.ask(snapshot, None if name is None else snapshot.chain.find(name), content))
            for name, content in asked
        ]
        while batcher._waiting.qsize() < len(asked):
            await asyncio.sleep(0.01)
        batcher.start()
        return await asyncio.gather(*tasks)

    try:
        return asyncio.run(ask())
    finally:
        batcher.stop()


def test_what_waits_is_one_batch_of_many_tasks(snapshot: Snapshot, trained: Path, data: Path) -> None:
    files = [file for task in ("low", "middle") for file in sorted((data / task).rglob("*.png"))[::5]]
    names = ["low", "middle", None]
    asked = [(names[place % 3], file.read_bytes()) for place, file in enumerate(files)]
    metrics = Metrics()
    answers = gather(Batcher(Settings(batch=1000), metrics), snapshot, asked)
    assert (sum(metrics.batches.counts), metrics.batches.sum) == (1, len(files))
    model = open_model(trained)
    for (name, content), answer in zip(asked, answers, strict=True):
        expected = model.predict([content], name, top=3)[0]
        assert answer.task.name == expected.task
        found = dict(zip(answer.task.classes, answer.probabilities, strict=True))
        assert found == pytest.approx(dict(expected.classes) | found, abs=1e-5)
        assert max(found, key=lambda one: found[one]) == expected.label
        assert dict(answer.tasks or ()) == pytest.approx(dict(expected.tasks), abs=1e-5)


def test_a_batch_is_no_larger_than_allowed(snapshot: Snapshot, data: Path) -> None:
    content = (data / "low" / "digit0" / "000.png").read_bytes()
    metrics = Metrics()
    answers = gather(Batcher(Settings(batch=4), metrics), snapshot, [("low", content)] * 10)
    assert len(answers) == 10
    assert (sum(metrics.batches.counts), metrics.batches.sum) == (3, 10)


def test_a_failure_is_that_of_its_own_group(snapshot: Snapshot) -> None:
    batcher, loop = Batcher(Settings(), Metrics()), asyncio.new_event_loop()
    good = torch.zeros(1, 8, 8, dtype=torch.uint8)
    one = Question(snapshot, snapshot.tasks[0], loop, loop.create_future(), good)
    other = Question(snapshot, snapshot.tasks[1], loop, loop.create_future(), good[:, :3])
    batcher._answer([one, other])
    assert isinstance(one.result, Answer)
    assert isinstance(other.result, RuntimeError)
    loop.close()


def test_networks_are_kept_within_a_bound_and_cut_again_the_same(snapshot: Snapshot) -> None:
    images = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    roomy, narrow = Networks(2**30), Networks(1)
    for _ in range(2):
        for task in snapshot.tasks:
            same = narrow.probabilities(snapshot, task, images)
            assert torch.equal(same, roomy.probabilities(snapshot, task, images))
            assert narrow.bytes == size(narrow.dense(snapshot, task))
    assert (roomy.cuts, len(roomy)) == (2, 2)
    assert (narrow.cuts, len(narrow)) == (4, 1)
    assert roomy.bytes == sum(size(roomy.dense(snapshot, task)) for task in snapshot.tasks)


def test_many_clients_of_mixed_tasks_get_the_answers_of_predict(running: Running, trained: Path, data: Path) -> None:
    files = sorted(data.rglob("*.png"))[::4]
    model = open_model(trained)
    expected = {
        (file, name): one
        for name in ("low", "middle", None)
        for file, one in zip(files, model.predict(files, name, top=3), strict=True)
    }
    chance, held = random.Random(0), threading.local()
    asked = chance.choices(list(expected), k=400)

    def ask(case: tuple[Path, str | None]) -> None:
        if not hasattr(held, "client"):
            held.client = running.client()
        file, name = case
        said = held.client.predict(file, **({} if name is None else {"task": name}), top=3)
        assert said.status == 200
        assert said.json["task"] == expected[case].task
        assert [one["class"] for one in said.json["classes"]] == [one for one, _ in expected[case].classes]
        found = [one["probability"] for one in said.json["classes"]]
        assert found == pytest.approx([p for _, p in expected[case].classes], abs=1e-5)

    before = sum(running.server.metrics.batches.counts)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, asked))
    assert sum(running.server.metrics.batches.counts) - before < 400
