"""Which of a model's states is served: chosen, compared with the newest, and taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.tutorial import run
from tests.serving.helpers import Running, until
from zeroforget.serving import Server, Settings
from zeroforget.store import ModelError, open_model
from zeroforget.store.folder import Folder
from zeroforget.store.states import choose
from zeroforget.store.writing import Watch


def names(running: Running) -> list[str]:
    return [task.name for task in running.server.catalog.snapshot.tasks]


def test_a_server_goes_back_and_forth_between_states(garden: Path, data: Path) -> None:
    picture = data / "middle" / "digit2" / "000.png"
    with Running(garden) as running:
        client = running.client()
        assert client.predict(picture, task="middle").status == 200
        output, code = run(f"zeroforget rollback {garden} low")
        assert code == 0
        assert "gone" in output
        until(lambda: names(running) == ["low"])
        assert client.predict(picture, task="middle").status == 404
        assert client.predict(picture).json["task"] == "low"
        assert "new" in run(f"zeroforget promote {garden}")[0]
        until(lambda: names(running) == ["low", "middle"])
        assert client.predict(picture, task="middle").status == 200
    assert open_model(garden).verify()


def test_a_shadow_tells_what_the_newest_state_would_change(garden: Path, data: Path) -> None:
    choose(Folder(garden), "low", Watch())
    with Running(garden, shadow=True) as running:
        client = running.client()
        pictures = sorted((data / "middle").rglob("*.png"))[:12]
        for picture in pictures:
            assert client.predict(picture).json["task"] == "low"
        until(lambda: running.server.batcher.shadow.compared == len(pictures))
        said = client.ask("/tasks").json["shadow"]
        assert said["new_tasks"] == ["middle"]
        assert said["compared"] == 12
        expected = [one.task for one in open_model(garden).predict(pictures)]
        assert said["other"] == sum(task != "low" for task in expected)
        assert "zeroforget_shadow_compared_total 12" in client.ask("/metrics").text
        run(f"zeroforget promote {garden}")
        until(lambda: running.server.catalog.candidate is None and names(running) == ["low", "middle"])
        assert client.ask("/tasks").json["shadow"] is None


def test_what_cannot_be_chosen(garden: Path) -> None:
    with pytest.raises(ModelError, match=r"'zeroforget promote .*' lets you choose"):
        Server(garden, Settings(shadow=True))
    with pytest.raises(ModelError, match="no task 'high'"):
        choose(Folder(garden), "high", Watch())
    with pytest.raises(ModelError, match="is not earlier than the one that is served"):
        choose(Folder(garden), "middle", Watch(), back=True)
    choose(Folder(garden), None, Watch())
    open_model(garden).undo()
    with pytest.raises(ModelError, match=r"serving.json is damaged: it names a state .* does not have"):
        Server(garden)
    choose(Folder(garden), None, Watch())  # the way out
    assert Server(garden)
