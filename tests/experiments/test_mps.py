"""CUDA's MPS is started, used, ended and, where it fails, done without. A script stands in for the control program."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeroforget.experiments import mps

# As the real one: -d leaves a process and its number in the folder of pipes; `quit`, typed, ends it.
CONTROL = """#!/bin/sh
echo "$* $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> "$CALLS"
pid="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    {refuse}
    {server} &
    echo $! > "$pid"
else
    read word
    echo "typed $word" >> "$CALLS"
    kill $(cat "$pid")
fi
"""
FINE = "import os; assert os.path.isdir(os.environ['CUDA_MPS_LOG_DIRECTORY'])"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "nobody"))
    monkeypatch.delenv(mps.LOGS, raising=False)
    return tmp_path / "calls"


def install(folder: Path, refuse: str = ":", server: str = "sleep 60") -> None:
    file = folder / "bin" / mps.CONTROL
    file.parent.mkdir()
    file.write_text(CONTROL.format(refuse=refuse, server=server))
    file.chmod(0o755)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("fails", [False, True])
def test_a_private_server_lives_as_long_as_it_is_needed(fails: bool, calls: Path, tmp_path: Path) -> None:
    install(tmp_path)
    said: list[str] = []
    pid, folder = 0, Path()

    def use() -> None:
        nonlocal pid, folder
        with mps.sharing(said.append, FINE):
            folder = Path(os.environ[mps.PIPES])
            pid = int((folder / f"{mps.CONTROL}.pid").read_text())
            assert alive(pid)
            assert mps.running()
            if fails:
                raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            use()
    else:
        use()
    assert not said
    assert not alive(pid)
    assert not folder.exists()
    assert os.environ[mps.PIPES] == str(tmp_path / "nobody")
    assert mps.LOGS not in os.environ
    assert calls.read_text().splitlines() == [f"-d {folder} {folder}/log", f" {folder} {folder}/log", "typed quit"]


@pytest.mark.parametrize(
    ("on_term", "patience"),
    [("sleep 0.5; exit", mps.PATIENCE_S), ("trap exit TERM", 0.5), ("", 0.5)],  # slow; deaf to the first word, to all
)
def test_a_server_that_takes_its_time_is_waited_for(
    on_term: str, patience: float, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "PATIENCE_S", patience)
    install(tmp_path, server=f"sh -c 'trap \"{on_term}\" TERM; while :; do sleep 0.05; done'")
    with mps.sharing(pytest.fail, FINE):
        pid = int((Path(os.environ[mps.PIPES]) / f"{mps.CONTROL}.pid").read_text())
        assert alive(pid)
    assert not alive(pid)


@pytest.mark.parametrize(
    ("refuse", "client", "message"),
    [
        ("echo 'no permission' >&2; exit 1", FINE, "no permission"),
        ("exit 3", FINE, "exit code 3"),
        (":", "import sys; sys.exit('a client cannot reach the server')", "a client cannot reach the server"),
    ],
)
def test_where_it_does_not_start_one_line_says_so(
    refuse: str, client: str, message: str, calls: Path, tmp_path: Path
) -> None:
    install(tmp_path, refuse)
    said: list[str] = []
    with mps.sharing(said.append, client):
        assert os.environ[mps.PIPES] == str(tmp_path / "nobody")
    assert said == [f"CUDA's MPS did not start, so runs take turns on the GPU: {message}"]
    assert calls.read_text().splitlines()[-1] == "typed quit"


def test_one_that_runs_is_used_and_left_alone(calls: Path, tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "nobody").mkdir()
    (tmp_path / "nobody" / f"{mps.CONTROL}.pid").write_text(f"{os.getpid()}\n")
    with mps.sharing(pytest.fail, FINE):
        assert os.environ[mps.PIPES] == str(tmp_path / "nobody")
    assert not calls.exists()


def test_one_process_alone_has_more_queues_to_the_gpu(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mps.QUEUES, raising=False)
    with mps.more_queues():
        assert os.environ[mps.QUEUES] == "32"
    assert mps.QUEUES not in os.environ
    monkeypatch.setenv(mps.QUEUES, "4")
    with mps.more_queues():
        assert os.environ[mps.QUEUES] == "4"
    assert os.environ[mps.QUEUES] == "4"


def test_clients_of_a_server_share_its_queues(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mps.QUEUES, raising=False)
    (tmp_path / "nobody").mkdir()
    (tmp_path / "nobody" / f"{mps.CONTROL}.pid").write_text(f"{os.getpid()}\n")
    with mps.more_queues():
        assert mps.QUEUES not in os.environ


def test_a_dead_ones_traces_do_not_count(calls: Path, tmp_path: Path) -> None:
    (tmp_path / "nobody").mkdir()
    file = tmp_path / "nobody" / f"{mps.CONTROL}.pid"
    file.write_text("4194305")  # above the largest number a process can have
    assert not mps.running()
    file.write_text("")
    assert not mps.running()


def test_a_process_of_any_name_lives_until_it_has_ended_buried_or_not(tmp_path: Path) -> None:
    program = tmp_path / "a) Z b"
    program.write_text("#!/bin/sh\nread word\n")
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as process:
        while "Z" not in Path(f"/proc/{process.pid}/comm").read_text():
            time.sleep(0.01)  # until it has its name
        assert mps._lives(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
        assert not mps._lives(process.pid)
    assert not mps._lives(process.pid)


@pytest.mark.parametrize(
    ("command", "trouble"),
    [
        (["sh", "-c", "echo fine >&2"], ""),
        (["sh", "-c", "echo first >&2; echo last; exit 2"], "last"),
        (["sh", "-c", "read word; [ $word = quit ]"], ""),
        ([sys.executable, "-c", "import os; assert os.getsid(0) == os.getpid()"], ""),  # Ctrl-C does not reach it
        (["zeroforget-no-such-program"], "[Errno 2] No such file or directory: 'zeroforget-no-such-program'"),
        (["sleep", "5"], "Command '['sleep', '5']' timed out after "),
    ],
)
def test_what_goes_wrong_in_a_call_is_one_line(
    command: list[str], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "TIMEOUT_S", 0.5 if command[0] == "sleep" else 30.0)
    said = mps._call(command, {}, "quit\n")
    assert said.startswith(trouble)
    assert len(said.splitlines()) == bool(trouble)


def test_without_the_program_nothing_happens(calls: Path) -> None:
    with mps.sharing(pytest.fail):
        assert mps.LOGS not in os.environ
