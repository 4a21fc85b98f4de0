"""What can be asked of the server, what it refuses, and with which words."""

from __future__ import annotations

import io
import json
import math
import select
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.serving.helpers import Client, Running, until
from tests.store.helpers import LATER
from zeroforget.serving import catalog
from zeroforget.serving.metrics import Histogram, Metrics
from zeroforget.store import open_model
from zeroforget.store.folder import Folder
from zeroforget.store.verify import Report, verify


def png(width: int, height: int) -> bytes:
    """A tiny file that claims to have this many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.fixture
def digit(data: Path) -> Path:
    return data / "middle" / "digit3" / "005.png"


def test_a_task_answers_as_predict_does(client: Client, trained: Path, digit: Path) -> None:
    said = client.predict(digit, task="middle", top=2).json
    expected = open_model(trained).predict(digit, "middle", top=2)[0]
    assert said["task"] == "middle"
    assert [one["class"] for one in said["classes"]] == [name for name, _ in expected.classes]
    assert [one["probability"] for one in said["classes"]] == pytest.approx([p for _, p in expected.classes], abs=1e-5)
    assert said["model"] == open_model(trained).head
    assert "tasks" not in said


def test_without_a_task_it_guesses_as_predict_does(client: Client, trained: Path, data: Path) -> None:
    for picture in (data / "low" / "digit0" / "003.png", data / "middle" / "digit4" / "002.png"):
        said, expected = client.predict(picture).json, open_model(trained).predict(picture, top=5)[0]
        assert said["task"] == expected.task
        assert [one["task"] for one in said["tasks"]] == [name for name, _ in expected.tasks]
        assert [one["probability"] for one in said["tasks"]] == pytest.approx([p for _, p in expected.tasks], abs=1e-5)
        assert said["classes"][0]["class"] == expected.label
        assert said["sure"] is expected.sure


def test_the_picture_of_any_kind_and_name_is_taken_as_predict_takes_it(client: Client, trained: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (300, 200, 3), np.uint8)
    for kind, mode in (("JPEG", "RGB"), ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGBA"), ("TIFF", "L")):
        file = io.BytesIO()
        Image.fromarray(values).convert(mode).save(file, kind)
        said = client.predict(file.getvalue(), task="low").json
        expected = open_model(trained).predict([file.getvalue()], "low")[0]
        assert said["classes"][0]["probability"] == pytest.approx(expected.classes[0][1], abs=1e-5), kind


def test_the_tasks_are_listed_with_what_they_added_and_that_they_verify(running: Running, client: Client) -> None:
    until(lambda: running.server.catalog.report is not None)
    said, model = client.ask("/tasks").json, open_model(running.server.catalog.folder.path)
    assert [one["name"] for one in said["tasks"]] == ["low", "middle"]
    for one, facts in zip(said["tasks"], model.tasks, strict=True):
        assert one["features_added"] == sum(facts.born.values())
        assert one["bytes_added"] == facts.bytes
        assert one["classes"] == list(facts.classes)
        assert (one["accuracy"], one["operations"]) == (facts.accuracy, facts.operations)
        assert one["interval"] == list(facts.interval)
        assert one["verified"] is True
    assert said["tasks"][1]["features"] == sum(one["features_added"] for one in said["tasks"])
    assert (said["model"], said["bytes"], said["verified"]) == (model.head, model.bytes, True)
    assert [one["holds"] for one in said["proofs"]] == [True, True, True]


BAD = {
    "zero bytes": (b"", 422, "empty"),
    "no picture": (b"hello" * 100, 422, "is no picture"),
    "too many bytes": (b"\xff" * 200_001, 413, "at most 200,000"),
    "far too many bytes": (b"\xff" * 700_000, 413, "at most 200,000"),
    "too many pixels": (png(1001, 1000), 413, "1001×1000"),
    "a decompression bomb": (png(60_000, 60_000), 413, "pixels"),
    "a header alone": (png(100, 100), 422, "cannot be decoded"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", 422, "is no picture"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_picture_is_refused_with_the_reason(what: str, running: Running, client: Client, digit: Path) -> None:
    body, status, why = BAD[what]
    reply = client.predict(body, task="low")
    assert reply.status == status
    assert why in reply.json["error"]
    assert running.client().predict(digit, task="low").status == 200
    assert (running.server.waiting, running.server.held) == (0, 0)


def test_a_truncated_picture_is_refused(client: Client) -> None:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), np.uint8)).save(file, "JPEG")
    for part in (20, 200, len(file.getvalue()) // 2):
        reply = client.predict(file.getvalue()[:part], task="low")
        assert reply.status == 422, reply
        assert reply.json["error"].startswith("the upload ")


def test_an_upload_without_a_length_is_limited_too(running: Running) -> None:
    connection = running.client().connection
    connection.request(
        "POST", "/predict?task=low", iter([b"\xff" * 50_000] * 6), {"Transfer-Encoding": "chunked"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_an_upload_without_an_end_is_not_read_to_its_end(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=30) as sock:
        sock.sendall(b"POST /predict?task=low HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n")
        sock.sendall(b"x" * 1_000_000)  # five times as much as is taken; a little more, and it is enough
        while not select.select([sock], [], [], 0.1)[0]:
            sock.sendall(b"x" * 20_000)
        answer = sock.recv(4096).lower()
        assert answer.startswith(b"http/1.1 413 ")
        assert b"connection: close" in answer
    until(lambda: (running.server.waiting, running.server.held) == (0, 0))


def test_as_much_as_is_allowed_is_taken(running: Running, trained: Path, digit: Path) -> None:
    assert running.client().predict(b"\xff" * 200_000, task="low").status == 422  # no picture, but not too large
    assert running.client().predict(png(1000, 1000), task="low").status == 422
    content = digit.read_bytes()
    with Running(trained, upload=len(content), uploads=len(content)) as narrow:
        assert narrow.client().predict(content, task="low").status == 200


def test_what_is_not_a_picture_itself_is_refused(client: Client, digit: Path) -> None:
    for kind in ("multipart/form-data; boundary=x", "application/json", "text/plain", "Text/HTML"):
        reply = client.ask("/predict?task=low", digit.read_bytes(), **{"Content-Type": kind})
        assert reply.status == 415
        assert kind.split(";")[0].lower() in reply.json["error"]
    assert client.ask("/predict?task=low", digit.read_bytes(), **{"Content-Type": "image/png"}).status == 200


def test_wrong_questions_are_refused(client: Client, digit: Path) -> None:
    unknown = client.predict(digit, task="birds")
    assert (unknown.status, unknown.json["error"]) == (404, "no task 'birds' in this model; its tasks are: low, middle")
    assert client.predict(digit, task="low", top=100_000).status == 200
    for top in ("0", "-1", "many", "1e9", "100001"):
        reply = client.predict(digit, task="low", top=top)
        assert reply.status == 422
        assert reply.json["error"].startswith("top: ")
    assert client.ask("/predict").status == 405
    for path in ("/nowhere", "/docs", "/redoc"):
        assert (client.ask(path).status, client.ask(path).json) == (404, {"error": "Not Found"})


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("taks=low", "no parameter 'taks'; there are 'task' and 'top'"),
        ("task=low&TOP=2", "no parameter 'TOP'; there are 'task' and 'top'"),
        ("task=low&task=middle", "task: is given twice"),
        ("task=low&top=1&top=2", "top: is given twice"),
    ],
)
def test_a_misspelt_parameter_is_no_reason_to_guess(client: Client, digit: Path, query: str, told: str) -> None:
    reply = client.ask(f"/predict?{query}", digit.read_bytes())
    assert (reply.status, reply.json) == (422, {"error": told})


def test_a_task_is_asked_however_its_letters_are_composed(garden: Path, data: Path, digit: Path) -> None:
    name = "caf\u00e9"
    open_model(garden).learn(data / "high", name, **LATER)
    with Running(garden) as running:
        assert running.client().predict(digit, task="cafe\u0301").json["task"] == name


@pytest.mark.parametrize("path", ["/", "/health", "/tasks", "/metrics"])
def test_what_can_be_got_can_be_asked_for_its_head(client: Client, path: str) -> None:
    client.connection.request("HEAD", path)
    reply = client.connection.getresponse()
    assert (reply.status, reply.read()) == (200, b"")
    assert reply.headers["Content-Type"] == client.ask(path).headers["Content-Type"]
    client.connection.request("HEAD", "/predict")
    reply = client.connection.getresponse()
    reply.read()
    assert reply.status == 405


def test_sums_are_told_to_the_last_digit() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.batch(1_234_567)
        metrics.answered(123_456.25)
    lines = metrics.text({}).splitlines()
    assert "zeroforget_batch_pictures_sum 3703701.0" in lines
    assert "zeroforget_predict_seconds_sum 370368.75" in lines


def test_a_picture_that_does_not_arrive_in_time_is_given_up(trained: Path) -> None:
    with (
        Running(trained, upload_seconds=0.5) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=60) as sock,
    ):
        sock.sendall(b"POST /predict?task=low HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
        assert b" 408 " in sock.recv(4096)
        until(lambda: (running.server.waiting, running.server.held) == (0, 0))


def test_a_client_that_goes_away_is_not_waited_for(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as sock:
        sock.sendall(b"POST /predict?task=low HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
        until(lambda: running.server.held == 3)
    until(lambda: (running.server.waiting, running.server.held) == (0, 0))


def test_a_full_queue_says_come_again(trained: Path, digit: Path) -> None:
    with Running(trained, queue=1, decoders=1) as running, ThreadPoolExecutor(1) as pool:
        decoders = running.server.batcher.decoders
        taken = decoders._idle.get()  # so the first picture waits
        first = pool.submit(running.client().predict, digit, task="low")
        until(lambda: running.server.waiting == 1)
        reply = running.client().predict(digit, task="low")
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert "waiting" in reply.json["error"]
        assert running.client().ask("/health").json["waiting"] == 1
        decoders._idle.put(taken)
        assert first.result().status == 200
        until(lambda: running.server.waiting == 0)
        assert running.client().predict(digit, task="low").status == 200


def test_pictures_that_wait_share_a_bound_of_bytes(trained: Path, digit: Path) -> None:
    with Running(trained, uploads=1000) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as slow:
            slow.sendall(
                b"POST /predict?task=low HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n" + b"x" * 990
            )
            until(lambda: running.server.held == 990)
            assert running.client().predict(digit, task="low").status == 503
        until(lambda: running.server.held == 0)
        assert running.client().predict(digit, task="low").status == 200


def test_one_histogram_has_each_value_below_its_bound_and_all_below_the_next() -> None:
    counted = Histogram((1, 2, 4))
    for value in (0.5, 1, 2, 3, 9):
        counted.add(value)
    assert counted.lines("x") == [
        *('x_bucket{le="1"} 2', 'x_bucket{le="2"} 3', 'x_bucket{le="4"} 4', 'x_bucket{le="+Inf"} 5'),
        *("x_sum 15.5", "x_count 5"),
    ]


def test_names_and_kinds_are_written_as_prometheus_reads_them() -> None:
    metrics = Metrics()
    metrics.task('a "b" \\ c\nd', 2)
    metrics.task('a "b" \\ c\nd', 1)
    lines = metrics.text({"made_total": ("Made.", 3), "now": ("Now.", 4)}).splitlines()
    assert 'zeroforget_pictures_total{task="a \\"b\\" \\\\ c\\nd"} 3' in lines
    assert "# TYPE zeroforget_made_total counter" in lines
    assert "# TYPE zeroforget_now gauge" in lines


def measured(client: Client) -> dict[str, float]:
    lines = [line for line in client.ask("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_every_answer_is_counted_once_and_unknown_paths_together(client: Client, digit: Path) -> None:
    before = measured(client)
    client.predict(digit, task="low")
    client.predict(b"no picture", task="low")
    for path in ("/a", "/b"):
        client.ask(path)
    after = measured(client)

    def more(name: str) -> float:
        return after[f"zeroforget_{name}"] - before.get(f"zeroforget_{name}", 0)

    assert more("predict_seconds_count") == more('pictures_total{task="low"}') == 1
    assert more('requests_total{path="/predict",status="200"}') == 1
    assert more('requests_total{path="/predict",status="422"}') == 1
    assert more('requests_total{path="other",status="404"}') == 2


def test_health_and_metrics(running: Running, client: Client, digit: Path) -> None:
    client.predict(digit, task="middle")
    until(lambda: running.server.catalog.report is not None)
    assert client.ask("/health").json == {"status": "ok", "reason": None, "tasks": 2, "waiting": 0}
    reply = client.ask("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = dict(line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#"))
    assert float(lines['zeroforget_requests_total{path="/predict",status="200"}']) >= 1
    assert float(lines['zeroforget_pictures_total{task="middle"}']) >= 1
    assert lines["zeroforget_predict_seconds_count"] == lines['zeroforget_predict_seconds_bucket{le="+Inf"}']
    assert (lines["zeroforget_tasks"], lines["zeroforget_verified"]) == ("2", "1")
    for line in reply.text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or float(line.rsplit(" ", 1)[1]) >= 0


def test_the_interface_is_described(client: Client) -> None:
    said = client.ask("/openapi.json").json
    assert set(said["paths"]) == {"/predict", "/tasks", "/health", "/metrics"}
    predict = said["paths"]["/predict"]["post"]
    assert set(predict["requestBody"]["content"]) == {"image/*"}
    assert {"404", "408", "413", "415", "422", "503"} <= set(predict["responses"])
    assert [one["name"] for one in predict["parameters"]] == ["task", "top"]
    assert predict["parameters"][1]["schema"]["default"] == 5
    assert "class" in said["components"]["schemas"]["ClassProbability"]["properties"]
    assert json.dumps(said).count("http") <= 1


def test_the_page_allows_no_request_elsewhere(client: Client) -> None:
    page = client.ask("/")
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["Referrer-Policy"] == "no-referrer"
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page.text


def test_what_fails_inside_is_told_to_the_log_alone(
    running: Running, digit: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patched:
        patched.setattr(running.server.batcher.networks, "probabilities", failing)
        reply = running.client().predict(digit, task="low")
    assert (reply.status, reply.json) == (500, {"error": "the server failed; its log says why"})
    assert "a secret" in caplog.text
    assert (running.server.waiting, running.server.held) == (0, 0)
    assert running.client().predict(digit, task="low").status == 200


def test_whatever_a_decoder_does_is_the_pictures_fault(
    running: Running, digit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(running.server.batcher.decoders, "decode", failing)
        reply = running.client().predict(digit, task="low")
    assert (reply.status, reply.json) == (422, {"error": "the upload cannot be decoded: ZeroDivisionError"})


def test_a_server_that_classifies_no_more_is_failing(trained: Path) -> None:
    with Running(trained) as running:
        running.server.batcher.stop()
        reply = running.client().ask("/health")
        assert (reply.status, reply.json["status"]) == (503, "failing")
        assert "start the server again" in reply.json["reason"]


def test_a_request_under_way_is_answered_before_it_stops(
    trained: Path, digit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    with Running(trained) as running, ThreadPoolExecutor(1) as pool:
        real = running.server.batcher.networks.probabilities

        def slow(*given: Any) -> Any:
            begun.set()
            go_on.wait(30)
            return real(*given)

        monkeypatch.setattr(running.server.batcher.networks, "probabilities", slow)
        asked = pool.submit(running.client().predict, digit, task="low")
        assert begun.wait(30)
        running.uvicorn.should_exit = True
        time.sleep(0.2)  # it sees that it shall stop
        go_on.set()
        assert asked.result().status == 200


def test_it_stops_at_once_and_answers_what_was_asked(trained: Path, digit: Path) -> None:
    with Running(trained) as running:
        client = running.client()
        assert client.predict(digit, task="low").status == 200
        until(lambda: running.server.catalog.report is not None)  # verifying would not be waited for
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert not running.server.batcher.alive
    assert not any(thread.is_alive() for thread in running.server.catalog._threads)


def test_it_stops_while_it_verifies(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(folder: Folder, data: dict[str, Path]) -> Report:
        begun.set()
        go_on.wait(60)
        return verify(folder, data)

    monkeypatch.setattr(catalog, "verify", slow)
    with Running(trained) as running:
        assert begun.wait(30)
        assert math.isnan(measured(running.client())["zeroforget_verified"])
        assert running.client().ask("/health").json["status"] == "ok"
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert running.server.catalog.report is None
    go_on.set()
    for thread in running.server.catalog._threads:
        thread.join(30)
        assert not thread.is_alive()
