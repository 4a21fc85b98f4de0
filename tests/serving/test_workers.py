"""Several processes that serve one model: one copy of the weights, one answer, and an end of one is no end of all."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.helpers import Client, until
from tests.store.helpers import learn_more
from zeroforget.growing.dense import fingerprint
from zeroforget.serving import Settings
from zeroforget.serving.catalog import Networks, take
from zeroforget.serving.gate import Keys, new_key
from zeroforget.serving.run import plain
from zeroforget.serving.together import SILENT_S, Together, map_file, merged
from zeroforget.serving.worker import settings_of
from zeroforget.store import open_model
from zeroforget.store.folder import Folder

MAPS = Path("/proc/self/maps")


class Several:
    """`zeroforget serve --workers 2` as a process, and its workers."""

    def __init__(self, model: Path, place: Path, *words: str) -> None:
        place.mkdir(exist_ok=True)
        self.place = place
        command = [sys.executable, "-m", "zeroforget", "serve", str(model), "--port", "0", "--workers", "2"]
        command += ["--threads", "1", "--poll", "0.5", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=os.environ | {"TMPDIR": str(place)}, **pipes)
        assert self.process.stdout is not None
        found = re.search(r":(\d+)/", self.process.stdout.readline())
        assert found, self.process.communicate()[1]
        self.port = int(found[1])

    @property
    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return sorted(map(int, children))

    def pulses(self) -> list[Mapping[str, Any]]:
        found = []
        for file in self.place.glob("zeroforget-serve-*/pulse-*.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(file.read_text()))
        return found

    def ask(self, path: str, picture: Path | None = None) -> Any:
        client = Client(self.port)
        try:
            reply = client.ask(path, None if picture is None else picture.read_bytes())
        finally:
            client.close()
        assert reply.status == 200, reply
        return reply.json

    def end(self, how: signal.Signals) -> str:
        self.process.send_signal(how)
        return self.process.communicate(timeout=60)[1]


@contextlib.contextmanager
def several(model: Path, place: Path, *words: str) -> Iterator[Several]:
    made = Several(model, place, *words)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


needs_proc = pytest.mark.skipif(not MAPS.exists(), reason="this system does not tell of its processes")


@needs_proc
def test_two_processes_answer_switch_together_and_survive_each_other(garden: Path, data: Path, tmp_path: Path) -> None:
    picture = data / "middle" / "digit2" / "000.png"
    with several(garden, tmp_path / "tmp") as server:
        expected = open_model(garden).predict(picture, "middle")[0].label
        before = server.workers
        assert len(before) == 2
        asked = [server.ask("/predict?task=middle", picture) for _ in range(12)]
        assert {one["classes"][0]["class"] for one in asked} == {expected}
        assert all("zeroforget_predict_seconds_count" in one["metrics"] for one in server.pulses())
        for worker in before:
            assert held(worker, "Rss") > 0
            assert held(worker, "Anonymous") == 0  # nothing of it was copied

        learn_more(open_model(garden), data, "high")
        head = open_model(garden).head
        until(lambda: [one["model"] for one in server.pulses()] == [head, head])
        assert server.ask("/predict?task=high", data / "high" / "digit8" / "000.png")["model"] == head
        until(lambda: server.ask("/tasks")["verified"])

        os.kill(before[0], signal.SIGKILL)
        until(lambda: before[0] not in server.workers)
        assert server.ask("/predict?task=middle", picture)["classes"][0]["class"] == expected
        until(lambda: len(server.pulses()) == 2 and server.ask("/health")["status"] == "ok")
        assert len(server.workers) == 2
        said = server.end(signal.SIGTERM)
        assert "is started again" in said
        assert "Traceback" not in said
        assert not list((tmp_path / "tmp").glob("zeroforget-serve-*"))
        with pytest.raises(OSError, match="refused"):
            http.client.HTTPConnection("127.0.0.1", server.port, timeout=5).request("GET", "/health")


def held(pid: int, what: str) -> int:
    """Of the files of weights that a process has mapped: kB of this kind."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    parts = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)
    ours = [part for part in parts if ".weights" in part.partition("\n")[0]]
    assert ours
    return sum(int(found[1]) for part in ours if (found := re.search(rf"^{what}:\s+(\d+) kB", part, re.MULTILINE)))


@pytest.mark.soak
@needs_proc
def test_processes_end_with_the_one_that_started_them(trained: Path, tmp_path: Path) -> None:
    with several(trained, tmp_path / "tmp") as server:
        left = server.workers
        server.process.kill()
        until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in left))
        until(lambda: not list((tmp_path / "tmp").glob("zeroforget-serve-*")))


@pytest.mark.soak
@needs_proc
def test_one_that_is_stuck_is_started_again_and_health_says_so(trained: Path, tmp_path: Path) -> None:
    with several(trained, tmp_path / "tmp") as server:
        stuck = server.workers[0]
        until(lambda: len(server.pulses()) == 2)
        os.kill(stuck, signal.SIGSTOP)
        client = Client(server.port)
        until(lambda: client.ask("/health").status == 503, 3 * SILENT_S)
        client.close()
        until(lambda: stuck not in server.workers, 4 * SILENT_S)
        until(lambda: server.ask("/health")["status"] == "ok")


def test_what_is_wrong_is_told_before_anybody_is_let_in(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zeroforget", "serve", str(tmp_path / "none"), "--port", "0", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "there is no model in" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_numbers_are_mapped_from_one_file_and_are_the_same(trained: Path, tmp_path: Path) -> None:
    own = take(Folder(trained))
    snapshots = [take(Folder(trained), Together(tmp_path, number, 2)) for number in range(2)]
    assert len(list(tmp_path.glob("*.weights"))) == 1
    for snapshot in snapshots:
        for number in range(2):
            assert fingerprint(snapshot.net.dense(number)) == own.tasks[number].network
        for tensor in (*snapshot.net.parameters(), *snapshot.net.buffers()):
            assert not tensor.numel() or (tensor.data_ptr() % 64 == 0 and inside(tensor.data_ptr(), tmp_path))


def inside(address: int, folder: Path) -> bool:
    """Whether a file of this folder is mapped there."""
    if not MAPS.exists():
        return True
    for line in MAPS.read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return str(folder) in line
    return False


def test_layouts_stay_and_files_go_with_their_networks(trained: Path, tmp_path: Path) -> None:
    together = Together(tmp_path, 0, 2)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    strides, values = net[0].weight.stride(), {name: value.clone() for name, value in net.state_dict().items()}
    together.share(net, "net")
    assert net[0].weight.stride() == strides
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
    (tmp_path / "other").write_bytes(bytes(4096))
    with pytest.raises(OSError, match="is not of this network"):
        map_file(tmp_path / "other", list(torch.nn.Linear(2, 2).parameters()))
    networks, snapshot = Networks(1, together), take(Folder(trained), together)
    for task in snapshot.tasks:
        networks.dense(snapshot, task)
    assert [file.stem for file in tmp_path.glob("task-*")] == [f"task-{snapshot.tasks[-1].hash}"]


def test_without_room_for_a_file_weights_are_copied(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    snapshot = take(Folder(trained), Together(tmp_path / "file" / "there", 0, 2))
    assert "weights are copied, not shared" in caplog.text
    assert fingerprint(snapshot.net.dense(0)) == snapshot.tasks[0].network


def test_counts_of_all_are_added_and_what_holds_must_hold_for_each() -> None:
    one = '# TYPE zeroforget_requests_total counter\nzeroforget_requests_total{path="/",status="200"} 2\n'
    two = one.replace(" 2\n", " 3\n") + 'zeroforget_requests_total{path="/a b",status="404"} 1\n'
    rest = "# TYPE zeroforget_verified gauge\nzeroforget_verified {}\nzeroforget_waiting_requests 4\n"
    text = merged([one + rest.format(1), two + rest.format(0)], [two + rest.format(0)])
    assert 'zeroforget_requests_total{path="/",status="200"} 8\n' in text
    assert 'zeroforget_requests_total{path="/a b",status="404"} 2\n' in text
    assert "zeroforget_verified 0\n" in text
    assert "zeroforget_waiting_requests 8\n" in text  # of the one that ended nothing waits
    lines = text.splitlines()
    assert lines.index("# TYPE zeroforget_verified gauge") > max(
        place for place, line in enumerate(lines) if "requests_total" in line
    )
    assert "zeroforget_verified NaN\n" in merged([rest.format("NaN")], [])


def test_a_keys_rate_is_one_for_all_processes(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    key = new_key(tmp_path / "keys", "anna", 0.001)
    gates = [Keys(tmp_path / "keys", Together(tmp_path / "common", number, 2)) for number in range(2)]
    assert gates[0].refusal(f"Bearer {key}") is None
    for gate in gates:
        refusal = gate.refusal(f"Bearer {key}")
        assert refusal is not None
        assert refusal.status_code == 429


def test_one_that_is_silent_failing_or_missing_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Together(tmp_path, number, 2) for number in range(2))
    assert one.trouble() == ("degraded", "worker 2 of 2 is started again")
    two.pulse("head", "ok", None, "")
    assert one.trouble() is None
    two.pulse("head", "failing", "a picture is decoded without end", "")
    assert one.trouble() == ("failing", "worker 2: a picture is decoded without end")
    two.pulse("head", "ok", None, "zeroforget_requests_total 3\nzeroforget_tasks 2\n")
    monkeypatch.setattr("time.monotonic", lambda: 10.0**9)
    assert one.trouble() == ("failing", f"worker 2 has said nothing for {SILENT_S:g} seconds")
    one.ended(1)
    assert one.metrics("zeroforget_requests_total 1\n") == "zeroforget_requests_total 4\n"
    one.ended(1)  # once is enough
    assert one.metrics("zeroforget_requests_total 1\n") == "zeroforget_requests_total 4\n"


def test_settings_reach_the_processes_as_they_are() -> None:
    given = Settings(hosts=("a", "b"), key_file=Path("keys"), own_port=9, queue=3, shadow=True)
    assert settings_of(json.loads(json.dumps(plain(given)))) == given
    assert settings_of(json.loads(json.dumps(plain(Settings())))) == Settings()
