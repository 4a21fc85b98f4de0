"""Several processes that serve one model at one port: started, watched, started again when one ends, and ended."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from zeroforget.serving.settings import Settings
from zeroforget.serving.together import SILENT_S, Together

log = logging.getLogger("zeroforget.serving")
LOOK_S = 0.1
STUCK_S = 2 * SILENT_S
"""A process that has reported nothing for so long, or is failing, is ended and started again."""
PAUSES = (0.0, 1.0, 5.0, 30.0)
"""Before it is started again for the first time, the second, and so on."""
BEYOND_S = 20.0
"""Processes end by themselves within the bound for that; what is left is killed so much later."""


class Workers:
    """So many processes; `run` returns when all of them have ended."""

    def __init__(
        self, path: Path, count: int, settings: Settings, sockets: list[socket.socket], tls: tuple[Path, Path] | None
    ) -> None:
        self.settings, self.count, self.sockets = settings, count, sockets
        self.folder = Path(tempfile.mkdtemp(prefix="zeroforget-serve-"))
        """For this user alone. Below TMPDIR; memory, where that is memory."""
        self.told: int | None = None
        """The signal to end by."""
        self.words: dict[str, Any] = {
            "path": str(path), "settings": plain(settings), "tls": None if tls is None else [str(one) for one in tls],
            "folder": str(self.folder), "count": count, "threads": torch.get_num_threads(),
            "sockets": [sock.fileno() for sock in sockets],
        }  # fmt: skip
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.since: dict[int, float] = {}
        self.failures: dict[int, int] = {}

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until SIGINT or SIGTERM. ValueError says why the first process could not begin."""
        usual = {sig: signal.signal(sig, self._tell) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in range(self.count):  # one after another: the others find the first one's weights
                self._start(number)
                self._wait_until_ready(number)
            if self.told is None:
                ready()
            while self.told is None:
                self._look()
                time.sleep(LOOK_S)
        finally:
            self._end()
            for sig, handler in usual.items():
                signal.signal(sig, handler)
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.told is not None:
            signal.raise_signal(self.told)  # as it would have ended without us

    def _tell(self, sig: int, frame: FrameType | None) -> None:
        self.told = sig
        for process in self.running.values():
            process.terminate()

    def _start(self, number: int) -> None:
        command = [sys.executable, "-P", "-m", "zeroforget.serving.worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, pass_fds=self.words["sockets"], **pipes)  # type: ignore[call-overload]
        self.running[number], self.since[number] = process, time.monotonic()
        try:
            process.stdin.write(json.dumps(self.words | {"number": number}) + "\n")
            process.stdin.flush()  # it stays open: its end is ours
        except BrokenPipeError:
            log.error("worker %d ended at once", number + 1)
        if self.told is not None:  # the signal came while it was started
            process.terminate()

    def _wait_until_ready(self, number: int) -> None:
        out = self.running[number].stdout
        assert out is not None
        line = out.readline().strip()
        if line != "ready" and self.told is None:
            raise ValueError(json.loads(line) if line.startswith('"') else "a process of the server could not begin")

    def _look(self) -> None:
        """Start again what has ended, and end what is stuck."""
        now, together = time.monotonic(), Together(self.folder, -1, self.count)
        for number, values in together.pulses().items():
            stuck = now - values["at"] > STUCK_S or values["status"] == "failing"
            if stuck and self.running[number].poll() is None and now - self.since[number] > STUCK_S:
                log.error("worker %d is stuck and is started again", number + 1)
                self.running[number].kill()
        for number, process in list(self.running.items()):
            if process.poll() is None:
                if now - self.since[number] > PAUSES[-1]:
                    self.failures[number] = 0
                continue
            together.ended(number)
            pause = PAUSES[min(self.failures.get(number, 0), len(PAUSES) - 1)]
            if now - self.since[number] >= pause:
                log.error("worker %d has ended (%s) and is started again", number + 1, process.returncode)
                self.failures[number] = self.failures.get(number, 0) + 1
                _let_go(process)
                self._start(number)

    def _end(self) -> None:
        end = time.monotonic() + self.settings.stop_seconds + BEYOND_S
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _let_go(process)


def _let_go(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def plain(settings: Settings) -> dict[str, Any]:
    """Settings as plain JSON values."""
    return asdict(settings) | {"key_file": None if settings.key_file is None else os.fspath(settings.key_file)}
