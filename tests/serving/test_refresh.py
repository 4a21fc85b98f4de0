"""A task learned meanwhile appears, one taken back goes, and damage does not stop what is served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serving.helpers import Running, until
from tests.store.helpers import learn_more, learned
from zeroforget.serving import catalog
from zeroforget.serving.catalog import Catalog, Snapshot, take
from zeroforget.store import ModelError, open_model
from zeroforget.store.folder import Folder
from zeroforget.store.verify import Report, verify


def names(running: Running) -> list[str]:
    return [one["name"] for one in running.client().ask("/tasks").json["tasks"]]


def test_a_task_learned_meanwhile_appears_and_no_request_fails(garden: Path, data: Path) -> None:
    model = open_model(garden)
    old, new = data / "low" / "digit1" / "001.png", data / "high" / "digit9" / "002.png"
    with Running(garden) as running:
        expected, failed, stop = model.predict(old, "low")[0].classes[0][1], list[object](), threading.Event()

        def ask() -> None:
            client = running.client()
            while not stop.is_set():
                reply = client.predict(old, task="low")
                if reply.status != 200 or abs(reply.json["classes"][0]["probability"] - expected) > 1e-5:
                    failed.append(reply)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        cut = running.server.batcher.networks
        assert running.client().predict(new, task="high").status == 404
        learn_more(model, data, "high")
        until(lambda: running.client().predict(new, task="high").status == 200)
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed
        said = running.client().predict(new, task="high").json
        assert said["model"] == model.head
        assert said["classes"][0]["class"] == model.predict(new, "high")[0].label
        assert names(running) == ["low", "middle", "high"]
        assert cut.cuts == 2, "the networks of old tasks are kept"
        until(lambda: running.client().ask("/tasks").json["verified"])


def test_a_task_taken_back_goes_and_its_name_may_come_again(garden: Path, data: Path) -> None:
    with Running(garden) as running:
        picture, model = data / "middle" / "digit2" / "001.png", open_model(garden)
        model.undo()
        until(lambda: running.client().predict(picture, task="middle").status == 404)
        assert names(running) == ["low"]
        model.learn(data / "high", "middle", epochs=1, batch_size=16)
        until(lambda: running.client().predict(picture, task="middle").status == 200)
        said = running.client().predict(picture, task="middle").json["classes"]
        assert {one["class"] for one in said} == {"digit8", "digit9"}


def test_damage_is_told_and_what_was_read_is_served_on(garden: Path, data: Path) -> None:
    picture, broken = data / "middle" / "digit2" / "001.png", garden / "tasks" / "002-middle" / "born.safetensors"
    content = broken.read_bytes()
    with Running(garden, verify_seconds=0.2) as running:
        client = running.client()
        until(lambda: client.ask("/tasks").json["verified"])
        broken.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        until(lambda: client.ask("/tasks").json["verified"] is False)
        assert [one["verified"] for one in client.ask("/tasks").json["tasks"]] == [None, False]
        assert (
            client.ask("/tasks")
            .json["proofs"][0]["moved"][0]
            .startswith("garden/tasks/002-middle/born.safetensors is ")
        )
        assert client.ask("/health").json["status"] == "degraded"
        assert client.ask("/health").json["reason"] == "the model does not verify; see /tasks"
        assert client.ask("/health").status == 200
        assert client.predict(picture, task="middle").status == 200
        broken.write_bytes(content)
        until(lambda: client.ask("/health").json["status"] == "ok")


def test_a_folder_that_cannot_be_read_is_told_until_it_can(garden: Path) -> None:
    catalog = Catalog(garden, poll_seconds=1, verify_seconds=1)
    head, away = catalog.snapshot.chain.head, garden / "tasks" / "001-low"
    away.rename(garden / "aside")
    assert not catalog.look()
    assert "task 1 is missing" in (catalog.trouble or "")
    assert catalog.snapshot.chain.head == head
    (garden / "aside").rename(away)
    assert not catalog.look()
    assert catalog.trouble is None


def test_a_task_taken_back_while_the_folder_is_read_is_no_trouble(
    garden: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, model = Catalog(garden, poll_seconds=1, verify_seconds=1), open_model(garden)
    learn_more(model, data, "high")
    real = catalog.take

    def interrupted(folder: Folder, *given: object, **more: object) -> Snapshot:
        model.undo()
        raise ModelError("the files of 'high' were there a moment ago")

    monkeypatch.setattr(catalog, "take", interrupted)
    assert not served.look()
    assert served.trouble is None
    monkeypatch.setattr(catalog, "take", real)
    assert not served.look()  # it is the model that was served all along
    assert (served.trouble, served.changes) == (None, 0)


def test_trouble_is_told_on_every_page_and_not_where_the_folder_lies(garden: Path, data: Path) -> None:
    with Running(garden) as running:
        client = running.client()
        until(lambda: running.server.catalog.report is not None)
        (garden / "tasks" / "001-low").rename(garden / "aside")
        until(lambda: client.ask("/health").json["status"] == "degraded")
        assert client.ask("/health").json["reason"] == "the folder cannot be read as it is; see /tasks"
        trouble = client.ask("/tasks").json["trouble"]
        assert trouble.startswith("garden")
        assert str(garden.parent) not in trouble
        assert "\nzeroforget_readable 0\n" in client.ask("/metrics").text
        assert client.predict(data / "low" / "digit0" / "000.png", task="low").status == 200
        (garden / "aside").rename(garden / "tasks" / "001-low")
        until(lambda: client.ask("/health").json["status"] == "ok")
        assert "\nzeroforget_readable 1\n" in client.ask("/metrics").text


def test_a_change_is_seen_once_and_what_was_proved_of_the_model_before_is_not_proved_of_this(
    garden: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Catalog(garden, poll_seconds=1, verify_seconds=1)
    before, served.report = served.snapshot.chain.head, verify(served.folder)
    model = open_model(garden)
    model.undo()
    model.learn(data / "high", "middle", epochs=1, batch_size=16)  # the same names again: nothing to see but new files
    assert served.look()
    assert served.snapshot.chain.head == model.head != before
    assert (served.report, served.changes, served._due.is_set()) == (None, 1, True)
    monkeypatch.setattr(catalog, "take", None)  # called, it would fail
    assert not served.look()
    assert (served.trouble, served.changes) == (None, 1)


def test_a_change_while_the_model_is_first_read_is_not_missed(garden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(folder: Folder, *_: object) -> Snapshot:
        found = take(folder)
        open_model(garden).undo()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(catalog, "take", meanwhile)
        served = Catalog(garden, poll_seconds=1, verify_seconds=1)
    assert len(served.snapshot.tasks) == 2
    assert served.look()
    assert len(served.snapshot.tasks) == 1


def test_a_report_of_another_model_is_not_this_ones(garden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was learned or taken back while it was verified."""
    right, asked = verify(Folder(garden)), list[Report]()
    reports = [replace(right, head="0" * 64), right]

    def told(*_: object) -> Report:
        asked.append(reports[min(len(asked), 1)])
        return asked[-1]

    monkeypatch.setattr(catalog, "verify", told)
    served = Catalog(garden, poll_seconds=60, verify_seconds=60)
    served.start()
    until(lambda: len(asked) == 1)
    time.sleep(0.05)
    assert served.report is None
    served._due.set()
    until(lambda: served.report == right)
    served.stop()


def test_the_same_trouble_is_logged_once(garden: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Catalog(garden, poll_seconds=60, verify_seconds=0.02)
    (garden / "tasks" / "001-low").rename(garden / "aside")
    for _ in range(3):
        assert not served.look()
    assert caplog.text.count("the model before is still served") == 1
    asked = verify_often(served)
    assert asked >= 3
    assert caplog.text.count("does not verify") == 1


def verify_often(served: Catalog) -> int:
    """Let it verify three times at least."""
    seen = list[object]()
    real = verify
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(catalog, "verify", lambda *given: (seen.append(given), real(*given))[1])
        served.start()
        until(lambda: len(seen) >= 3)
        served.stop()
    return len(seen)


def test_a_folder_that_cannot_be_looked_at_is_looked_at_again(garden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, real = Catalog(garden, poll_seconds=0.02, verify_seconds=60), Catalog.look
    tried = list[int]()

    def stumbling(self: Catalog) -> bool:
        tried.append(len(tried))
        if len(tried) == 1:
            raise OSError("gone for a moment")
        return real(self)

    monkeypatch.setattr(Catalog, "look", stumbling)
    served.start()
    until(lambda: len(tried) >= 2)
    open_model(garden).undo()
    until(lambda: len(served.snapshot.tasks) == 1)
    served.stop()


def test_a_request_is_answered_by_the_model_that_took_it(
    garden: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Running(garden, poll_seconds=60) as running:
        server, model = running.server, open_model(garden)
        before, real = model.head, server.batcher.networks.probabilities

        def meanwhile(*given: Any) -> Any:
            model.undo()
            assert server.catalog.look()
            return real(*given)

        monkeypatch.setattr(server.batcher.networks, "probabilities", meanwhile)
        reply = running.client().predict(data / "middle" / "digit2" / "001.png", task="middle")
        assert (reply.status, reply.json["task"], reply.json["model"]) == (200, "middle", before)
        assert names(running) == ["low"]


def test_where_there_is_no_model_it_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="zeroforget learn"):
        Catalog(tmp_path / "nothing", poll_seconds=1, verify_seconds=1)


def test_a_model_without_a_task_waits_for_its_first(tmp_path: Path, data: Path) -> None:
    model = learned(tmp_path / "garden", data, "low")
    model.undo()
    picture = data / "low" / "digit0" / "000.png"
    with Running(tmp_path / "garden") as running:
        client = running.client()
        assert client.predict(picture).status == 404
        assert "zeroforget learn" in client.predict(picture).json["error"]
        assert client.ask("/health").json["tasks"] == 0
        model.learn(data / "low", "low", epochs=1, batch_size=16)
        until(lambda: client.predict(picture).status == 200)


def test_what_fails_in_memory_is_told_and_tried_again(
    garden: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says with a RuntimeError that there is no memory for a moment's second copy."""
    real = {name: getattr(catalog, name) for name in ("take", "verify")}
    tried: dict[str, int] = {"take": 0, "verify": 0}

    def failing(name: str) -> Callable[..., object]:
        def once(*given: object) -> object:
            tried[name] += 1
            if tried[name] == 1:
                raise RuntimeError("can't allocate memory")
            return real[name](*given)

        return once

    monkeypatch.setattr(catalog, "verify", failing("verify"))
    served = Catalog(garden, poll_seconds=0.05, verify_seconds=0.1)
    monkeypatch.setattr(catalog, "take", failing("take"))
    learn_more(open_model(garden), data, "high")
    assert not served.look()
    assert served.trouble == "can't allocate memory"
    served.start()
    until(lambda: served.trouble is None and len(served.snapshot.tasks) == 3)
    until(lambda: served.report is not None and served.report.holds)
    served.stop()
