"""Decodes pictures in processes that are killed when one takes too long: no picture can hold the server up."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

from zeroforget.data import decode as decode_module
from zeroforget.serving import decoder
from zeroforget.store import Unreadable
from zeroforget.store.errors import TooManyPixels

_PART = 2**16
START = 60.0
"""A process has started by then, however busy the machine is."""
LATE = 5.0
"""A process that works so many seconds beyond its deadline cannot be killed: something is wrong with the machine."""


class Stopped(Unreadable):
    """The server stops, and decodes nothing any more."""


class DecoderProcesses:
    """As many processes as decode at once. `decode` may be called by as many threads."""

    def __init__(self, count: int, seconds: float, pixels: int) -> None:
        self.count, self.seconds, self.pixels = count, seconds, pixels
        self.killed = 0
        """How many processes were ended over a picture."""
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._all: set[_Process] = set()
        self._busy: dict[int, float] = {}
        self._lock = threading.Lock()
        self._stopped = False
        for _ in range(count):
            self._idle.put(None)  # a place; its process starts with the first picture

    def start(self) -> None:
        """Start all processes now, so that the first pictures do not wait for them."""
        made = [self._fresh() for _ in range(self.count)]
        for _ in range(self.count):
            self._idle.get_nowait()
        for process in made:
            self._idle.put(process)

    def stop(self) -> None:
        """End all processes, whatever they are at."""
        with self._lock:
            self._stopped = True
            left = list(self._all)
        for process in left:
            process.end()

    @property
    def stuck(self) -> bool:
        """Whether a picture is being decoded beyond its deadline."""
        with self._lock:
            oldest = min(self._busy.values(), default=math.inf)
        return time.monotonic() - oldest > self.seconds + LATE

    def decode(self, content: bytes, shape: tuple[int, int, int], most: int) -> Tensor:
        """A picture's file as bytes of this shape; Unreadable if it is none, or takes too long."""
        process = self._idle.get()
        try:
            process = process if process is not None and process.alive else self._fresh()
            process.wait_until_ready()
            began = time.monotonic()
            with self._lock:
                self._busy[threading.get_ident()] = began
            status, found = process.ask(content, shape, most, began + self.seconds)
        except (OSError, EOFError) as error:
            if process is not None:
                self._end(process)
            process = None
            if self._stopped:
                raise Stopped("was not decoded: the server stops") from None
            late = isinstance(error, TimeoutError)
            why = f"takes more than {self.seconds:g} seconds to decode" if late else "ended the process that decoded it"
            raise Unreadable(why) from None
        finally:
            with self._lock:
                self._busy.pop(threading.get_ident(), None)
            self._idle.put(process)
        if status == decoder.DONE:
            return torch.frombuffer(found, dtype=torch.uint8).reshape(shape)
        text = found.decode(errors="replace")
        raise TooManyPixels(text) if status == decoder.TOO_LARGE else Unreadable(text)

    def _fresh(self) -> _Process:
        with self._lock:
            if self._stopped:
                raise EOFError
            process = _Process(self.seconds, self.pixels)
            self._all.add(process)
        return process

    def _end(self, process: _Process) -> None:
        process.end()
        with self._lock:
            self._all.discard(process)
            self.killed += not self._stopped


class _Process:
    """One process, and the pipes to it."""

    def __init__(self, seconds: float, pixels: int) -> None:
        self.alarm = math.ceil(seconds + LATE)
        words = [sys.executable, "-P", "-W", "ignore", decoder.__file__, str(Path(decode_module.__file__)), str(pixels)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # an interrupt from the keyboard is for the server alone
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._ready = False
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def wait_until_ready(self) -> None:
        """Until it has started, which is nobody's picture's fault."""
        if not self._ready:
            self._read(1, time.monotonic() + START)
            self._ready = True

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, content: bytes, shape: tuple[int, int, int], most: int, until: float) -> tuple[int, bytearray]:
        """Status and content of its answer; TimeoutError, or OSError if it ends."""
        self._write(decoder.REQUEST.pack(*shape, self.alarm, most, len(content)), until)
        self._write(content, until)
        status, size = decoder.ANSWER.unpack(self._read(decoder.ANSWER.size, until))
        return status, self._read(size, until)

    def _write(self, content: bytes, until: float) -> None:
        view = memoryview(content)
        while view:
            self._wait(self._in, select.POLLOUT, until)
            view = view[os.write(self._in, view[:_PART]) :]

    def _read(self, size: int, until: float) -> bytearray:
        out = bytearray()
        while len(out) < size:
            self._wait(self._out, select.POLLIN, until)
            part = os.read(self._out, min(size - len(out), 2**20))
            if not part:
                raise EOFError
            out += part
        return out

    @staticmethod
    def _wait(handle: int, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(handle, event)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError

    def end(self) -> None:
        """Kill it, and let go of its pipes."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
