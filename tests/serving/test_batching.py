"""Requests are classified together, many tasks at once, each as `predict` would; memory has a bound."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.helpers import Running, until
from zeroforget.serving.batching import Answer, Batcher, Question
from zeroforget.serving.catalog import Networks, Snapshot, size, take
from zeroforget.serving.metrics import Metrics
from zeroforget.serving.settings import Settings
from zeroforget.store import open_model
from zeroforget.store.folder import Folder
from zeroforget.store.pictures import decode


@pytest.fixture(scope="module")
def snapshot(trained: Path) -> Snapshot:
    return take(Folder(trained))


def ask_at_once(batcher: Batcher, snapshot: Snapshot, asked: list[tuple[str | None, bytes]]) -> list[Answer]:
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

    return asyncio.run(ask())


def gather(batcher: Batcher, snapshot: Snapshot, asked: list[tuple[str | None, bytes]]) -> list[Answer]:
    """The same, and stop."""
    try:
        return ask_at_once(batcher, snapshot, asked)
    finally:
        batcher.stop()


def test_what_waits_is_one_batch_of_many_tasks(snapshot: Snapshot, trained: Path, data: Path) -> None:
    files = [file for task in ("low", "middle") for file in sorted((data / task).rglob("*.png"))[::5]]
    names = ["low", "middle", None]
    asked = [(names[place % 3], file.read_bytes()) for place, file in enumerate(files)]
    metrics = Metrics()
    answers = gather(Batcher(Settings(batch=1000), metrics), snapshot, asked)
    assert (sum(metrics.batches.counts), metrics.batches.sum) == (1, len(files))
    assert sum(metrics._pictures.values()) == len(files)
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


def test_nothing_of_a_batch_is_held_while_none_waits(snapshot: Snapshot, data: Path) -> None:
    content = (data / "low" / "digit0" / "000.png").read_bytes()
    asked = dataclasses.replace(snapshot)
    gone = weakref.ref(asked)
    batcher = Batcher(Settings(), Metrics())
    ask_at_once(batcher, asked, [("low", content), ("middle", content)])
    del asked
    until(lambda: gc.collect() >= 0 and gone() is None)
    assert batcher.alive
    batcher.stop()


def test_a_failure_is_that_of_its_own_group(snapshot: Snapshot) -> None:
    batcher, loop = Batcher(Settings(), Metrics()), asyncio.new_event_loop()
    good = torch.zeros(1, 8, 8, dtype=torch.uint8)
    one = Question(snapshot, snapshot.tasks[0], loop, loop.create_future(), good)
    other = Question(snapshot, snapshot.tasks[1], loop, loop.create_future(), good[:, :3])
    guessed = Question(snapshot, None, loop, loop.create_future(), good[:, :3])
    batcher._answer([one, other, guessed])
    assert isinstance(one.result, Answer)
    assert isinstance(other.result, RuntimeError)
    assert isinstance(guessed.result, RuntimeError)
    loop.close()


def test_models_that_call_different_tasks_the_same_share_a_batch_and_no_answer(garden: Path, data: Path) -> None:
    old = take(Folder(garden))
    model = open_model(garden)
    model.undo()
    model.learn(data / "high", "middle", epochs=1, batch_size=16)
    new = take(Folder(garden))
    batcher, loop = Batcher(Settings(), Metrics()), asyncio.new_event_loop()
    image = decode((data / "high" / "digit9" / "002.png").read_bytes(), (1, 8, 8))
    asked = [(one, task) for task in (1, None) for one in (old, new)]

    def questions() -> list[Question]:
        return [
            Question(one, None if task is None else one.tasks[task], loop, loop.create_future(), image)
            for one, task in asked
        ]

    together, alone = questions(), questions()
    batcher._answer(together)
    for one in alone:
        batcher._answer([one])
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one.result, Answer)
        assert isinstance(other.result, Answer)
        assert one.result.task == other.result.task
        assert one.result.probabilities == pytest.approx(other.result.probabilities, abs=1e-5)
        assert dict(one.result.tasks or ()) == pytest.approx(dict(other.result.tasks or ()), abs=1e-5)
    named = [one.result.task.classes for one in together[:2] if isinstance(one.result, Answer)]
    assert named == [("digit2", "digit3", "digit4"), ("digit8", "digit9")]
    loop.close()


def test_who_no_longer_waits_does_not_keep_others_from_their_answer(snapshot: Snapshot, data: Path) -> None:
    content = (data / "low" / "digit0" / "000.png").read_bytes()
    batcher = Batcher(Settings(decoders=1), Metrics())

    async def ask(*, start: bool) -> Answer | None:
        gone, kept = (asyncio.create_task(batcher.ask(snapshot, snapshot.tasks[0], content)) for _ in range(2))
        while batcher._waiting.qsize() < (4 if start else 2):
            await asyncio.sleep(0.01)
        gone.cancel()
        if start:
            batcher.start()
            return await asyncio.wait_for(kept, 30)
        kept.cancel()
        return None

    asyncio.run(ask(start=False))  # its event loop is closed before the worker comes to it
    assert asyncio.run(ask(start=True))
    assert batcher.alive
    batcher.stop()


def test_stopping_waits_for_what_was_asked(snapshot: Snapshot, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (data / "low" / "digit0" / "000.png").read_bytes()
    batcher, decoding = Batcher(Settings(decoders=1), Metrics()), threading.Event()

    real = batcher.decoders.decode

    def slow(*given: Any) -> torch.Tensor:
        decoding.set()
        time.sleep(0.1)
        return real(*given)

    monkeypatch.setattr(batcher.decoders, "decode", slow)

    async def ask() -> list[Answer]:
        tasks = [asyncio.create_task(batcher.ask(snapshot, None, content)) for _ in range(3)]
        await asyncio.to_thread(decoding.wait, 30)
        await asyncio.to_thread(batcher.stop)
        return await asyncio.wait_for(asyncio.gather(*tasks), 30)

    batcher.start()
    assert len(asyncio.run(ask())) == 3
    assert not batcher.alive


def test_the_end_may_come_in_the_middle_of_a_batch(snapshot: Snapshot) -> None:
    batcher, loop = Batcher(Settings(), Metrics()), asyncio.new_event_loop()
    image = torch.zeros(1, 8, 8, dtype=torch.uint8)
    one = Question(snapshot, snapshot.tasks[0], loop, loop.create_future(), image)
    for waiting in (one, None):
        batcher._waiting.put(waiting)
    batcher.start()
    batcher._worker.join(20)
    assert not batcher.alive
    batcher.stop()
    assert isinstance(one.result, Answer)
    loop.close()


def test_the_network_that_was_not_used_for_longest_goes_first(snapshot: Snapshot) -> None:
    first, second = snapshot.tasks
    third = dataclasses.replace(first, hash="another")
    networks = Networks(2**30)
    both = size(networks.dense(snapshot, first)) + size(networks.dense(snapshot, second))
    networks = Networks(both)
    for task in (first, second, first):
        networks.dense(snapshot, task)
    assert (networks.cuts, len(networks), networks.bytes) == (2, 2, both)
    networks.dense(snapshot, third)
    assert networks.bytes <= both
    networks.dense(snapshot, first)
    assert networks.cuts == 3, "the one used last is still there"
    networks.dense(snapshot, second)
    assert networks.cuts == 4


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
