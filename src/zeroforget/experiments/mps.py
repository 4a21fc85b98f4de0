"""CUDA's Multi-Process Service: with it, processes that share a GPU compute at the same time; without, they take turns.
A private one is started for as long as it is needed. And for a process that has a GPU to itself, more ways to it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
TIMEOUT_S = 60.0
PATIENCE_S = 5.0

# The server itself starts with its first client, and may fail only then. This client needs the driver alone.
CLIENT = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
sys.exit(
    cuda.cuInit(0) and "the driver does not start"
    or cuda.cuDeviceGet(ctypes.byref(device), 0) and "there is no GPU"
    or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) and "a client cannot reach the server"
    or 0
)
"""


@contextmanager
def sharing(say: Callable[[str], None], client: str = CLIENT) -> Iterator[None]:
    """Inside, processes that are started are clients of an MPS server: one that runs already, or one of our own.

    Where there is none to start, nothing is said; where starting fails, one line, and everything works without it.
    """
    if running() or shutil.which(CONTROL) is None:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="zf-mps-"))  # a short path: sockets go in there
    names = {PIPES: str(folder), LOGS: str(folder / "log")}
    try:
        (folder / "log").mkdir()
        trouble = _call([CONTROL, "-d"], names) or _call([sys.executable, "-c", client], names)
        if trouble:
            say(f"CUDA's MPS did not start, so runs take turns on the GPU: {trouble}")
        with _environment({} if trouble else names):
            yield
    finally:
        _end(folder, names)


@contextmanager
def more_queues() -> Iterator[None]:
    """Inside, if the GPU has not been used before, streams of this process have more queues to it: in the eight that
    are usual, work of one candidate of a growth search waits for that of another.

    Who has said a number keeps it, and so do clients of an MPS server, which has so many for all of them.
    """
    with _environment({} if QUEUES in os.environ or running() else {QUEUES: "32"}):
        yield


def running() -> bool:
    """Whether a control program serves the folder where clients would look for it."""
    pid = _pid(Path(os.environ.get(PIPES, "/tmp/nvidia-mps")))
    return pid is not None and _lives(pid)


def _pid(folder: Path) -> int | None:
    try:
        return int((folder / f"{CONTROL}.pid").read_text())
    except (OSError, ValueError):
        return None


def _lives(pid: int) -> bool:
    """Whether there is such a process that has not ended; one that nobody has buried yet has."""
    try:  # MPS is Linux's alone, so there is /proc; the name in brackets may hold anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _end(folder: Path, names: dict[str, str]) -> None:
    """Tell our server to quit and see it gone, for it uses the folder to its last moment."""
    pid = _pid(folder)
    trouble = _call([CONTROL], names, "quit\n")
    if pid is not None and (trouble or not _gone(pid)):
        for word in (signal.SIGTERM, signal.SIGKILL):
            with suppress(OSError):
                os.kill(pid, word)
            if _gone(pid):
                break
    shutil.rmtree(folder, ignore_errors=True)


def _gone(pid: int) -> bool:
    end = time.monotonic() + PATIENCE_S
    while _lives(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _call(command: list[str], names: dict[str, str], typed: str = "") -> str:
    """Run a program that knows of our server; returns what went wrong, in one line, or nothing."""
    with tempfile.TemporaryFile("w+") as said:  # no pipe: one that stays in the background would hold it open
        try:
            code = subprocess.run(
                command,
                input=typed,
                stdout=said,
                stderr=said,
                text=True,
                timeout=TIMEOUT_S,
                env=os.environ | names,
                start_new_session=True,  # Ctrl-C is not for it
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        said.seek(0)
        return "" if code == 0 else (said.read().strip().splitlines() or [f"exit code {code}"])[-1]


@contextmanager
def _environment(names: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    os.environ |= names
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
