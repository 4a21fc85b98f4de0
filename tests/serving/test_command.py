"""`zeroforget serve` as a process of its own, from start to signal."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from typer.testing import CliRunner

from tests.serving.helpers import Client
from zeroforget import serving
from zeroforget.cli import app
from zeroforget.serving import Settings
from zeroforget.serving.run import bound, is_loopback

ZEROFORGET = [sys.executable, "-c", "from zeroforget.cli import main; main()"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_on_loopback_until_a_signal_comes(trained: Path, data: Path, how: signal.Signals) -> None:
    command = [*ZEROFORGET, "serve", str(trained), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(rf"serving {re.escape(str(trained))} at http://127\.0\.0\.1:(\d+)/\n", line)
            assert found, line
            client = Client(int(found[1]))
            assert client.predict(data / "low" / "digit0" / "000.png", task="low").status == 200
            client.close()
            process.send_signal(how)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert "Traceback" not in errors
    assert process.returncode in {0, 130, -how}


def test_mistakes_are_told_in_a_sentence(trained: Path, tmp_path: Path) -> None:
    def said(*words: str) -> str:
        result = CliRunner().invoke(app, ["serve", *words])
        assert result.exit_code != 0
        return f"{result.exception} {result.output}"

    assert "zeroforget learn" in said(str(tmp_path / "nothing"))
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        assert "choose another --port" in said(str(trained), "--port", str(taken.getsockname()[1]))
    assert "upload must be more than zero" in said(str(trained), "--upload", "0")
    # An empty one, of an unset variable perhaps, would open every address of this machine.
    assert "--host" in said(str(trained), "--port", "0", "--host", "")
    for host in ("nosuch.invalid", "192.0.2.1"):  # one has no address, the other is not this machine's
        assert "--host" in said(str(trained), "--port", "0", "--host", host)
        assert "--port" not in said(str(trained), "--port", "0", "--host", host)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--upload", "inf"), "--upload wants a number"),
        (("--upload", "nan"), "--upload wants a number"),
        (("--memory", "inf"), "--memory wants a number"),
        (("--memory", "1e300"), "memory must be at most"),
        (("--pixels", "-inf"), "--pixels wants a number"),
        (("--poll", "inf"), "poll_seconds must be at most"),
        (("--poll", "1e12"), "poll_seconds must be at most"),
        (("--poll", "nan"), "poll_seconds must be more than zero"),
        (("--threads", "99999999999"), "--threads"),
        (("--queue", "9" * 30), "queue must be at most"),
    ],
)
def test_numbers_without_end(trained: Path, words: tuple[str, str], told: str) -> None:
    result = CliRunner().invoke(app, ["serve", str(trained), *words])
    assert isinstance(result.exception, (ValueError, SystemExit))
    assert told in f"{result.exception} {result.output}"


def test_every_option_reaches_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def serve(path: Path, *, ready: Callable[[str], None], **given: Any) -> None:
        seen.append({"path": path, "computes": torch.get_num_threads(), **given})
        ready("http://somewhere/")

    monkeypatch.setattr(serving, "serve", serve)
    threads = torch.get_num_threads() + 1
    words = (
        "--host 0.0.0.0 --port 81 --upload 0.5 --pixels 2.5 --queue 7 --batch 3 --memory 1.5 --poll 0.25 "
        f"--threads {threads} --workers 3"
    )
    told = CliRunner().invoke(app, ["serve", str(tmp_path), *words.split()], catch_exceptions=False)
    assert told.stdout == f"serving {tmp_path} at http://somewhere/\n"
    assert "there is no password" in told.stderr
    limits = {"upload": 2**19, "pixels": 2_500_000, "queue": 7, "batch": 3, "memory": 3 * 2**19, "poll_seconds": 0.25}
    expected = {
        "path": tmp_path,
        "computes": threads,
        "host": "0.0.0.0",
        "port": 81,
        "settings": Settings(**limits),
        "tls": None,
        "workers": 3,
    }
    assert seen == [expected]
    told = CliRunner().invoke(app, ["serve", str(tmp_path)], catch_exceptions=False)
    assert told.stderr == ""
    usual = {"computes": threads - 1, "host": "127.0.0.1", "port": 8000, "settings": Settings(), "tls": None}
    assert seen[1] == {"path": tmp_path, "workers": 1, **usual}


def test_a_folder_may_be_named_by_a_word_but_not_by_nothing(trained: Path) -> None:
    assert serving.Server(str(trained)).catalog.folder.path == trained
    for start in (serving.Server, serving.serve):
        with pytest.raises(ValueError, match="a path is empty; name a file or a folder"):
            start("")


def test_it_stops_in_good_order_and_says_where_it_is(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs, told = list[uvicorn.Config](), list[str]()

    class Started(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            configs.append(config)

        def run(self, sockets: list[socket.socket] | None = None) -> None:
            assert sockets is not None
            with socket.create_connection(sockets[0].getsockname()[:2], timeout=5):
                pass  # whoever comes is let in already

    monkeypatch.setattr(uvicorn, "Server", Started)
    hosts = ["127.0.0.1", *(["::1"] if _has_six() else [])]
    for host in hosts:
        serving.serve(trained, host=host, port=0, ready=told.append)
    assert all(re.fullmatch(r"http://(127\.0\.0\.1|\[::1\]):\d+/", address) for address in told)
    assert len(told) == len(hosts)
    assert all((one.timeout_graceful_shutdown, one.server_header) == (30, False) for one in configs)


def _has_six() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_socket_answers_at_once_and_its_port_is_free_again_at_once() -> None:
    with bound("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    with pytest.raises(ValueError, match="from 0 to 65535, not 65536"):
        bound("127.0.0.1", 65536)


def test_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"))


def test_a_limit_is_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="queue must be more than zero"):
        Settings(queue=0)
    with pytest.raises(ValueError, match="decoders must be at most 256"):
        Settings(decoders=257)
    assert Settings(decoders=256).decoders == 256


def test_without_its_packages_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "try:\n    import zeroforget.serving\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "serving needs fastapi: pip install 'zeroforget[serve]'"
