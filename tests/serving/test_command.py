"""`zeroforget serve` as a process of its own, from start to signal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.serving.helpers import Client
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


def test_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"))


def test_a_limit_is_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="queue must be more than zero"):
        Settings(queue=0)


def test_without_its_packages_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "try:\n    import zeroforget.serving\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "serving needs fastapi: pip install 'zeroforget[serve]'"
