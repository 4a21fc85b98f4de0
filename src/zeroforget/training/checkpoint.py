"""Unfinished training on disk: one safetensors file for each phase of a task, replaced atomically."""

from __future__ import annotations

import json
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn

from zeroforget.files.atomic import replacing
from zeroforget.files.hashes import Digest

_SUM = "sha256"


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was written."""

    def __init__(self, path: Path, why: str) -> None:
        self.path = path
        super().__init__(f"{path} is damaged: {why}")


@dataclass(frozen=True)
class Checkpoint:
    """The file that holds where one phase of training stands: named tensors, and facts as JSON."""

    path: Path

    def save(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write aside, sync, rename: a crash leaves the old file or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A copy of every tensor: safetensors refuses tensors that share memory, as tied parameters do.
        plain = {name: _plain(tensor.detach()) for name, tensor in tensors.items()}
        # One word alone: of several, the library writes now this one first and now that one.
        words = {"facts": json.dumps(facts | {_SUM: _checksum(plain, facts)})}
        with replacing(self.path, self.path.with_suffix(f".{os.getpid()}.tmp")) as aside:
            try:
                save_file(plain, aside, metadata=words)
            except SafetensorError:  # it says in words alone what the disk said; written by Python, it is an OSError
                aside.write_bytes(save(plain, metadata=words))

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was saved last, or None. DamagedCheckpoint unless every byte is as it was written; earlier versions
        wrote no checksum."""
        if not self.path.exists():
            return None
        if not self.path.is_file():
            raise DamagedCheckpoint(self.path, "it is not a file")
        try:
            with safe_open(self.path, framework="pt") as file:
                words = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = dict(json.loads(words["facts"]))
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise DamagedCheckpoint(self.path, str(error)) from error
        claimed = facts.pop(_SUM, None) or words.get(_SUM)
        if words.keys() - {"facts", _SUM} or claimed not in {None, _checksum(tensors, facts)}:
            raise DamagedCheckpoint(self.path, "its content is not what was written (sha256 differs)")
        return tensors, facts


def _checksum(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    """Of every name, type, shape and byte."""
    digest = Digest(json.dumps(facts).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain(tensor: Tensor) -> Tensor:
    there = tensor.cpu().contiguous()
    return there.clone() if there.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() else there


class Later:
    """Writes checkpoints of what is on a GPU while training goes on there, one at a time.

    What is handed over is copied on the GPU first; a thread brings the copy to disk.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._written: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether one is still being written."""
        return self._written is not None and not self._written.done()

    def save(self, file: Checkpoint, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """As `Checkpoint.save`, of the tensors as they are now; what went wrong with the last one is raised here."""
        self.wait()
        try:
            kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        except torch.OutOfMemoryError:  # then training waits
            file.save(tensors, facts)
            return
        if (device := next((t.device for t in kept.values() if t.is_cuda), None)) is not None:
            now = torch.cuda.current_stream(device)
            if self._stream is None or self._stream.device != now.device:
                self._stream = torch.cuda.Stream(now.device)
            self._stream.wait_stream(now)  # for the copy

        def write() -> None:
            with torch.cuda.stream(self._stream):
                file.save(kept, facts)

        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        self._written = self._thread.submit(write)

    def wait(self) -> None:
        """Until all is on disk; what is interrupted while it waits may wait again."""
        if self._written is not None:
            try:
                self._written.result()
            finally:
                if self._written.done():
                    self._written = None

    def __deepcopy__(self, memo: object) -> Later:
        return Later()

    def __reduce__(self) -> tuple[type[Later], tuple[()]]:
        return Later, ()  # threads stay where they are


PAUSE = 20.0
"""Seconds of training on a GPU that an interruption may cost; there an epoch takes less time than to write one down."""


class PhaseFile:
    """One phase of a task on disk: after every epoch, or every so many seconds (`pause`), beside the next epochs.

    At the end always, and at once: what a later phase does may depend on every bit of this one.
    """

    def __init__(self, folder: Path, phase: int, task: int, later: Later, pause: float | None) -> None:
        self.folder, self.phase, self.task, self.later, self.pause = folder, phase, task, later, pause
        self._next = -math.inf if pause is None else time.perf_counter() + pause

    def _file(self, task: int) -> Checkpoint:
        """The first task's has the name that earlier versions gave to that of any task."""
        return Checkpoint(self.folder / f"phase-{self.phase:03d}{f'-task-{task:03d}' if task else ''}.safetensors")

    def save(
        self,
        now: dict[str, Tensor],
        best: dict[str, Tensor] | None,
        optimizer: torch.optim.Optimizer | None,
        facts: dict[str, Any],
        *,
        ended: bool,
    ) -> None:
        """Where it stands, if it is time to: its weights, the best ones (None: they are the same), the optimizer."""
        began = time.perf_counter()
        soon = began < self._next or (self.later.busy and began < self._next + (self.pause or 0.0))
        if soon and not ended:
            return
        state, numbers = ({}, {}) if optimizer is None else optimizer_tensors(optimizer)
        parts = {"now": now, "best": best or {}, "optimizer": state}
        tensors = {f"{part}/{name}": tensor for part, held in parts.items() for name, tensor in held.items()}
        facts = facts | {"optimizer": numbers, "task": self.task}
        if self.pause is None or ended:
            self.later.wait()
            self._file(self.task).save(tensors, facts)
        else:
            self.later.save(self._file(self.task), tensors, facts)
            self._next = time.perf_counter() + self.pause

    def load(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
        """Where an interrupted run stopped: its tensors as `now`, `best` and `optimizer`, and the facts."""
        saved = self._file(self.task).load() or self._file(0).load()
        if saved is None or saved[1].get("task", self.task) != self.task:
            return None
        parts: dict[str, dict[str, Tensor]] = {"now": {}, "best": {}, "optimizer": {}}
        for name, tensor in saved[0].items():
            part, rest = name.split("/", 1)
            parts[part][rest] = tensor
        parts["best"] = parts["best"] or parts["now"]
        return parts, saved[1]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as named tensors and plain numbers."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = value
    return tensors, numbers


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Put back what `optimizer_tensors` took."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in (tensors | numbers).items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    whole = optimizer.state_dict()
    whole["state"] = state
    optimizer.load_state_dict(whole)
    for parameter, held in optimizer.state.items():
        for key, value in held.items():
            # Files hold dense tensors; fused optimizers want the parameter's own strides (channels last, say).
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                held[key] = torch.empty_like(parameter, requires_grad=False).copy_(value)


class _Learns(Protocol):
    def trainable(self) -> Iterable[nn.Parameter]: ...


@dataclass
class _Attempt:
    """The phases in which one learner learns a task."""

    learner: weakref.ref[_Learns]
    parameters: list[weakref.ref[nn.Parameter]]
    """Those that its first phase trained."""
    first: int
    cut: bool = False

    def taken_back(self) -> bool:
        """Whether it was interrupted and the task's structure dropped, so that all its phases come again."""
        learner = self.learner()
        held: Iterable[nn.Parameter] = learner.parameters() if isinstance(learner, nn.Module) else ()
        here = {id(parameter) for parameter in held}
        trained = [parameter() for parameter in self.parameters]
        return self.cut and any(parameter is None or id(parameter) not in here for parameter in trained)


class Phases:
    """Counts the phases of each task; one that was interrupted gives its number back to whoever tries again."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self._counts = Counter(counts)
        self._attempts: dict[int, _Attempt] = {}

    def take(self, learners: Sequence[_Learns], task: int) -> range:
        """The numbers of the next phase of these learners."""
        attempt = self._attempts.get(task)
        if attempt is None or attempt.learner() is not learners[0]:
            self._begin(learners[0], task)
        elif attempt.taken_back():
            self._counts[task] = attempt.first
            self._begin(learners[0], task)
        first = self._counts[task]
        self._counts[task] += len(learners)
        return range(first, self._counts[task])

    def give_back(self, numbers: range, task: int) -> None:
        """This phase was interrupted."""
        self._counts[task] = numbers.start
        self._attempts[task].cut = True

    def forget(self, task: int) -> None:
        """This phase failed and would again: whatever is tried next has a number of its own."""
        self._attempts.pop(task, None)

    def _begin(self, learner: _Learns, task: int) -> None:
        parameters = [weakref.ref(parameter) for parameter in learner.trainable()]
        self._attempts[task] = _Attempt(weakref.ref(learner), parameters, self._counts[task])
