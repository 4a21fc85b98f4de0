"""Clients that mean harm: pictures made to cost, connections made to stay, names and pages of others."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.campaigns import SEED, many
from tests.serving.helpers import Client, Running, memory, until
from zeroforget.serving import Server, Settings
from zeroforget.serving.decoding import DecoderProcesses
from zeroforget.serving.gate import OWN_FILES, SILENT_S, Guests, ask_for_files, new_key
from zeroforget.store import Unreadable


def progressive(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan is there again and again: small, and each one a pass over all pixels."""
    out = io.BytesIO()
    Image.effect_noise((side, side), 80).save(out, "JPEG", progressive=True, quality=30)
    content = out.getvalue()
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * scans + b"\xff\xd9"


def ask(port: int, body: bytes, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/predict", body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def good(data: Path) -> bytes:
    return (data / "low" / "digit0" / "000.png").read_bytes()


def test_thousands_of_scans_are_refused_before_they_are_decoded(client: Client) -> None:
    reply = client.predict(progressive(32, 200))
    assert reply.status == 422
    assert "scans; at most 100" in reply.json["error"]
    assert client.predict(progressive(64, 20)).status == 200


def test_what_takes_too_long_is_killed_and_others_are_answered(trained: Path, good: bytes) -> None:
    """Processes that never come to an end: each is killed at the deadline, and another takes its place."""
    with Running(trained, decode_seconds=0.5, decoders=1) as running:
        decoders = running.server.batcher.decoders
        process = decoders._idle.get()
        assert process is not None
        process.wait_until_ready()
        os.kill(process._process.pid, signal.SIGSTOP)  # as one that computes without end looks from here
        decoders._idle.put(process)
        status, said = ask(running.port, good)
        assert (status, "takes more than 0.5 seconds to decode" in said) == (422, True)
        assert ask(running.port, good)[0] == 200
        assert decoders.killed == 1
        assert running.client().ask("/health").json["status"] == "ok"


def test_a_process_that_dies_costs_one_picture(trained: Path, good: bytes) -> None:
    decoders = DecoderProcesses(1, 10, 10**6)
    try:
        first = decoders.decode(good, (1, 8, 8), 10**6)
        process = decoders._idle.get()
        assert process is not None
        process._process.kill()
        process._process.wait()
        decoders._idle.put(process)
        assert torch.equal(decoders.decode(good, (1, 8, 8), 10**6), first)
    finally:
        decoders.stop()
    with pytest.raises(Unreadable, match="the server stops"):
        decoders.decode(good, (1, 8, 8), 10**6)


def test_health_says_when_a_picture_is_decoded_without_end(trained: Path) -> None:
    with Running(trained) as running:
        assert running.client().ask("/health").status == 200
        running.server.batcher.decoders._busy[0] = time.monotonic() - 60
        reply = running.client().ask("/health")
        assert (reply.status, reply.json["status"]) == (503, "failing")
        assert "decoded without end" in reply.json["reason"]
        running.server.batcher.decoders._busy.clear()
        running.server.batcher._began = time.monotonic() - 1000
        assert "computed without end" in running.client().ask("/health").json["reason"]
        running.server.batcher._began = None


def test_slow_uploads_take_nobodys_place(trained: Path, good: bytes) -> None:
    """As many uploads that have sent one byte as may wait, and more: a whole one is answered among them."""
    with Running(trained, queue=8) as running:
        slow = []
        for _ in range(24):
            sock = socket.create_connection(("127.0.0.1", running.port), timeout=30)
            sock.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx")
            slow.append(sock)
        until(lambda: running.server.held >= 24)
        assert ask(running.port, good)[0] == 200
        assert running.server.waiting == 0
        for sock in slow:
            sock.close()
        until(lambda: running.server.held == 0)


def test_headers_have_a_deadline_and_each_address_its_connections(trained: Path, good: bytes) -> None:
    with Running(trained, header_seconds=0.3, connections_each=4) as running:
        socks = [socket.create_connection(("127.0.0.1", running.port), timeout=30) for _ in range(4)]
        socks[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Sl")
        fifth = socket.create_connection(("127.0.0.1", running.port), timeout=30)
        assert fifth.recv(100).startswith(b"HTTP/1.1 503")
        assert all(sock.recv(100).startswith(b"HTTP/1.1 408") for sock in socks)
        for sock in (*socks, fifth):
            sock.close()
        until(lambda: not running.uvicorn.server_state.connections)
        assert ask(running.port, good)[0] == 200


UPLOAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx"
"""One that never comes to its end."""


def connections(port: int, count: int, said: bytes, who: str = "127.0.0.1") -> list[socket.socket]:
    """Many of them, from one address of this machine."""
    made = []
    for _ in range(count):
        made.append(socket.socket())
        made[-1].bind((who, 0))
        made[-1].settimeout(30)
        made[-1].connect(("127.0.0.1", port))
        made[-1].sendall(said)
    return made


def closed(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()


def test_who_only_holds_connections_gives_way(trained: Path, good: bytes) -> None:
    """Those of the same address as a friend, and those of many addresses that hold all there are."""
    if sys.platform != "linux":
        pytest.skip("only Linux has many addresses of its own")
    with Running(trained, connections_each=8, connections=24) as running:
        socks = connections(running.port, 12, UPLOAD)
        time.sleep(2 * SILENT_S)
        assert [ask(running.port, good)[0] for _ in range(3)] == [200] * 3
        for number in range(2, 6):
            socks += connections(running.port, 8, UPLOAD, f"127.0.0.{number}")
        time.sleep(2 * SILENT_S)
        assert [ask(running.port, good)[0] for _ in range(3)] == [200] * 3
        assert len(running.server.guests.here) <= 24
        closed(socks)


def test_a_full_port_does_not_fill_the_one_of_health(trained: Path) -> None:
    with Running(trained, own_port=0, connections_each=8, connections=8) as running:
        socks = connections(running.port, 8, UPLOAD)
        own = Client(running.own_port)
        running.clients.append(own)
        assert own.ask("/health").status == 200
        closed(socks)


def test_who_is_answered_keeps_the_connection(trained: Path, good: bytes) -> None:
    """Requests that are computed give way to nobody: the next ones are told to come again."""
    with Running(trained, connections_each=2) as running, ThreadPoolExecutor(2) as pool:
        process = running.server.batcher.decoders._idle.get()
        other = running.server.batcher.decoders._idle.get()
        asked = [pool.submit(ask, running.port, good) for _ in range(2)]
        until(lambda: running.server.waiting == 2)
        time.sleep(2 * SILENT_S)
        sock = socket.create_connection(("127.0.0.1", running.port), timeout=30)
        assert sock.recv(100).startswith(b"HTTP/1.1 503")
        sock.close()
        for one in (process, other):
            running.server.batcher.decoders._idle.put(one)
        assert [one.result()[0] for one in asked] == [200, 200]


def test_nothing_that_is_owed_takes_for_ever(trained: Path, good: bytes) -> None:
    """A body that nobody waits for, dripping; answers that are not read; a connection that says nothing."""
    with Running(trained, header_seconds=0.4, upload_seconds=0.4) as running:
        drips = connections(running.port, 2, b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n")
        deaf = connections(running.port, 2, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        mute = connections(running.port, 2, b"")
        end = time.monotonic() + 30
        while running.server.guests.here:
            assert time.monotonic() < end
            for sock in drips:
                with contextlib.suppress(OSError):
                    sock.sendall(b"x")
            time.sleep(0.05)
        closed(drips + deaf + mute)
        assert ask(running.port, good)[0] == 200


def test_connections_stay_below_the_files_that_may_be_open(trained: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert Guests(Settings(connections=10_000)).most == (1024 - OWN_FILES) // 2
        ask_for_files(10_000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 20_000 + OWN_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "[::1", "127.0.0.1.evil.example"])
def test_a_name_that_is_somebody_elses_is_not_answered(client: Client, host: str) -> None:
    reply = client.ask("/tasks", Host=host)
    assert reply.status in {400, 421}
    assert "zeroforget" not in reply.text or "--allow-host" in reply.text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:80", "LOCALHOST.", "192.0.2.7"])
def test_its_own_names_and_addresses_are_answered(client: Client, host: str) -> None:
    assert client.ask("/tasks", Host=host).status == 200


def test_a_page_of_another_site_may_not_post(client: Client, good: bytes) -> None:
    origins = ("http://evil.example", "null", "http://[", "//")
    for headers in (*({"Origin": origin} for origin in origins), {"Sec-Fetch-Site": "cross-site"}):
        assert client.ask("/predict", good, **headers).status == 403
    own = {"Host": "localhost:80", "Origin": "http://localhost:80", "Sec-Fetch-Site": "same-origin"}
    assert client.ask("/predict", good, **own).status == 200


def test_nothing_inline_is_allowed_and_nothing_is_sniffed(client: Client) -> None:
    page = client.ask("/")
    policy = page.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert " style=" not in page.text
    for path in ("/", "/tasks", "/health", "/metrics", "/nothing", "/openapi.json"):
        assert client.ask(path).headers["X-Content-Type-Options"] == "nosniff"


def test_keys_open_the_server_are_taken_back_without_a_restart_and_have_a_rate(
    trained: Path, good: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    key, slow = new_key(file, "anna"), new_key(file, "ben", 0.001)
    assert key not in file.read_text()
    with Running(trained, key_file=file) as running:
        client = running.client()
        assert [client.ask(path).status for path in ("/health", "/", "/tasks", "/metrics")] == [200, 200, 401, 401]
        assert ask(running.port, good)[0] == 401
        for wrong in ("Bearer x", f"Basic {key}", key, f"Bearer {key}x", "Bearer "):
            assert ask(running.port, good, Authorization=wrong)[0] == 401
        assert ask(running.port, good, Authorization=f"Bearer {key}")[0] == 200
        assert [ask(running.port, good, Authorization=f"Bearer {slow}")[0] for _ in range(2)] == [200, 429]
        file.write_text("".join(line for line in file.read_text().splitlines(True) if not line.startswith("anna")))
        until(lambda: ask(running.port, good, Authorization=f"Bearer {key}")[0] == 401)


def test_files_without_keys_are_refused(trained: Path, tmp_path: Path) -> None:
    for text in ("", "# none\n", "anna secret\n", f"anna {'0' * 64} 0\n"):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(ValueError, match="keys"):
            Server(trained, Settings(key_file=tmp_path / "keys"))
    (tmp_path / "keys").unlink()
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(ValueError, match="it is not a file"):
        Server(trained, Settings(key_file=tmp_path / "keys"))


def test_a_key_is_added_on_a_line_of_its_own(tmp_path: Path) -> None:
    """Also where whoever edited the file left the last line open."""
    file = tmp_path / "keys"
    new_key(file, "anna")
    file.write_text(file.read_text().rstrip())
    new_key(file, "ben")
    assert [line.split()[0] for line in file.read_text().splitlines()] == ["anna", "ben"]


def test_health_and_metrics_at_a_port_of_their_own(trained: Path, good: bytes) -> None:
    with Running(trained, own_port=0) as running:
        own = Client(running.own_port)
        running.clients.append(own)
        assert [own.ask(path).status for path in ("/health", "/metrics", "/tasks", "/")] == [200, 200, 404, 404]
        client = running.client()
        assert [client.ask(path).status for path in ("/health", "/metrics", "/tasks")] == [404, 404, 200]


def test_many_hostile_pictures_a_small_share(trained: Path, good: bytes) -> None:
    hostile_pictures(trained, good, 60, seed=0)


@pytest.mark.soak
def test_many_hostile_pictures(trained: Path, good: bytes) -> None:
    hostile_pictures(trained, good, many(5000), seed=1 + SEED)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def hostile(number: int) -> bytes:
    """The picture of this number: of many formats, damaged, cut, enormous by their own account, or of endless parts."""
    draw = random.Random(number)
    kinds = ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "TGA", "ICO", "JPEG2000"]
    kind, way = draw.choice(kinds), draw.randrange(8)
    out = io.BytesIO()
    side = draw.choice((1, 7, 33, 64))
    Image.effect_noise((side, side), 60).convert(draw.choice(("L", "RGB"))).save(out, kind)
    content = bytearray(out.getvalue())
    if way < 3:
        for _ in range(draw.choice((1, 3, 20))):
            content[draw.randrange(len(content))] = draw.randrange(256)
    elif way == 3:
        del content[draw.randrange(len(content)) :]
    elif way == 4:
        spot = draw.randrange(len(content))
        content[spot:spot] = draw.randbytes(draw.randrange(1, 200))
    elif way == 5:
        return progressive(32, draw.choice((90, 200, 2000)))
    elif way == 6:
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", draw.choice((1, 2**16, 2**30)), 2**15, 8, 2, 0, 0, 0))
        return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(2**20))) + chunk(b"IEND", b"")
    else:
        return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nquit\n" + draw.randbytes(50)
    return bytes(content)


def label(answer: tuple[int, str]) -> tuple[int, str]:
    """The likeliest class."""
    return answer[0], json.loads(answer[1])["classes"][0]["class"]


def hostile_pictures(trained: Path, good: bytes, count: int, seed: int) -> None:
    with Running(trained, decode_seconds=5) as running:
        want = label(ask(running.port, good))
        before = memory()

        def one(number: int) -> int:
            status, said = ask(running.port, hostile(seed * 10**6 + number))
            assert status in {200, 413, 422}, (number, status, said)
            if number % 20 == 0:
                assert label(ask(running.port, good)) == want
            return status

        with ThreadPoolExecutor(4) as pool:
            seen = list(pool.map(one, range(count)))
        assert running.client().ask("/health").json["status"] == "ok"
        assert label(ask(running.port, good)) == want
        assert seen.count(200) < count
        assert memory() - before < 200 * 2**20
        print(
            f"{count} hostile pictures: { ({s: seen.count(s) for s in set(seen)}) }; "
            f"{running.server.batcher.decoders.killed} processes killed; {(memory() - before) / 2**20:.0f} MiB more"
        )


def test_many_hostile_requests_a_small_share(trained: Path, good: bytes) -> None:
    hostile_requests(trained, good, 100, seed=0)


@pytest.mark.soak
def test_many_hostile_requests(trained: Path, good: bytes) -> None:
    hostile_requests(trained, good, many(5000), seed=1 + SEED)


METHODS = ("GET", "POST", "POST", "HEAD", "PUT", "OPTIONS", "TRACE", "CONNECT", "PRI * ", "\0", "get")
TARGETS = (
    *("/", "/predict", "/tasks", "/health", "/metrics", "/openapi.json", "/docs", "//", "/../../etc/passwd", "*"),
    *("/%2e%2e/", "/predict?task=low&task=low", f"/predict?top={9**30}", "/predict?task=%00", "http://evil/"),
    *("/predict?task=%E2%80%AEx", f"/predict?task={'a' * 7000}", "/predict?task=%ff%fe", "/tasks%0d%0aX:1"),
    *("/\r\nX: y", "/" + "a" * 70_000),
)
HOSTS = ("localhost", "localhost", "evil", "127.0.0.1", "", "a\x1b[2J", "[::1]", "x@localhost", "localhost:99999999")
HEADERS = (
    *(f"Content-Length: {size}" for size in ("5", "-1", "99999999999", "abc", "5, 5", "0x5")),
    *(f"Transfer-Encoding: {how}" for how in ("chunked", "gzip", "chunked, chunked")),
    *(f"Origin: {origin}" for origin in ("null", "http://localhost", "http://[", "//", "http://localhost:x")),
    *("Host: second", "Connection: upgrade", "Upgrade: websocket", "Expect: 100-continue", "Sec-Fetch-Site: none"),
    *("Content-Type: multipart/form-data; boundary=x", "Content-Type: \0", f"Authorization: Bearer {'a' * 5000}"),
    *("Range: bytes=0-", "A\0: b", " folded: x", "\u202e: x", "X-Forwarded-For: 1.1.1.1", f"X: {'y' * 70_000}"),
)
BODIES = ("", "hello", "5\r\nhello\r\n0\r\n\r\n", "zz\r\n", "ffffffffffffffffff\r\n", "\x89PNG\r\n\x1a\n" * 5)


def hostile_request(number: int) -> bytes:
    """The request of this number: odd lines, headers and bodies."""
    draw = random.Random(number)
    headers = [f"Host: {draw.choice(HOSTS)}", *draw.sample(HEADERS, draw.choice((0, 0, 1, 2, 4)))]
    version = draw.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9", ""))
    head = f"{draw.choice(METHODS)} {draw.choice(TARGETS)} {version}\r\n" + "\r\n".join(headers)
    return f"{head}\r\n\r\n{draw.choice(BODIES)}".encode()


def hostile_requests(trained: Path, good: bytes, count: int, seed: int) -> None:
    """Each is answered or turned away, by no failure of ours and with no sign that a terminal obeys."""
    with Running(trained, upload_seconds=2) as running:
        seen: Counter[str] = Counter()
        for number in range(seed * 10**6, seed * 10**6 + count):
            said = b""
            sock = socket.create_connection(("127.0.0.1", running.port), timeout=30)
            with sock, contextlib.suppress(OSError):
                sock.sendall(hostile_request(number))
                sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(2**16):
                    said += part
            seen[said[9:12].decode()] += 1
            assert said[9:12] != b"500", number
            assert b"\x1b" not in said, number
            assert "\u202e".encode() not in said, number
        assert running.client().ask("/health").json["status"] == "ok"
        assert ask(running.port, good)[0] == 200
        print(f"{count} hostile requests: {dict(seen)}")


def test_a_server_over_https(trained: Path, good: bytes, tmp_path: Path) -> None:
    import re
    import ssl

    words = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run(
            [*words, *names, "-keyout", tmp_path / "key", "-out", tmp_path / "cert"], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("openssl is not on this machine")
    command = [sys.executable, "-m", "zeroforget", "serve", str(trained), "--port", "0", "--threads", "1"]
    command += ["--tls-cert", str(tmp_path / "cert"), "--tls-key", str(tmp_path / "key")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"at https://127\.0\.0\.1:(\d+)/", process.stdout.readline())
            assert found
            context = ssl.create_default_context(cafile=str(tmp_path / "cert"))
            mute = connections(int(found[1]), 140, b"")  # no handshake comes: counted all the same
            time.sleep(2 * SILENT_S)  # who came just now does not give way yet
            connection = http.client.HTTPSConnection("127.0.0.1", int(found[1]), timeout=30, context=context)
            connection.request("POST", "/predict", good)
            assert connection.getresponse().status == 200
            connection.close()
            assert sum(place.is_socket() for place in Path(f"/proc/{process.pid}/fd").glob("*")) < 140
            closed(mute)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
