"""The tasks that are served: the growing network once, and tasks' own networks cut from it as they are wanted."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zeroforget.growing.dense import DenseInTurn
from zeroforget.growing.network import GrowingNetwork
from zeroforget.serving.together import Together
from zeroforget.store import Report, TaskFacts, task_guess
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import SPREAD, TASK, Chain, Folder
from zeroforget.store.network import assemble_chain, preparation
from zeroforget.store.states import SERVING, chosen, served
from zeroforget.store.tensors import growing_tensors
from zeroforget.store.verify import verify

log = logging.getLogger("zeroforget.serving")
Signature = tuple[tuple[str, int, int], ...]


def size(module: nn.Module) -> int:
    """Bytes of a network's tensors."""
    return sum(tensor.nbytes for tensor in module.state_dict().values())


@dataclass(frozen=True)
class Snapshot:
    """A model as it was at one moment. It never changes, so that a request is answered by the model that took it."""

    chain: Chain
    net: GrowingNetwork
    spread: Mapping[str, Mapping[str, Tensor]]
    """Task → how the features of its own pictures are spread."""
    disk: int
    """Bytes of its files."""
    largest: int
    """Bytes of the newest task's own network: no other is larger."""
    whole: str = ""
    """The hash of the model's newest state, which may not be the one that is served."""

    @property
    def tasks(self) -> tuple[TaskFacts, ...]:
        """In the order they were learned."""
        return self.chain.tasks


def take(folder: Folder, together: Together | None = None, *, newest: bool = False) -> Snapshot:
    """The state that is served (or the newest), read and assembled; Damaged if a file is not as it was written."""
    every = folder.read()
    chain = every if newest else served(folder, every)
    chain.check_pictures()
    net = assemble_chain(folder, chain)
    for tensor in growing_tensors(net).values():
        tensor.close()  # nothing of it is learned here: no copies of the newest task's numbers
    if together is not None:
        together.share(net, chain.head)
    spread = {task.name: folder.tensors(folder.task(task), task, SPREAD) for task in chain.tasks}
    for number, task in enumerate(chain.tasks):
        head = nn.ModuleDict({"head": net.heads[number]})
        task_guess.check(spread[task.name], head, task.clusters, folder.task(task) / SPREAD)
    files = [folder.path / "model.json", *(file for task in chain.tasks for file in folder.task(task).iterdir())]
    largest = size(net.dense(len(chain.tasks) - 1)) if chain.tasks else 0
    return Snapshot(chain, net, spread, sum(file.stat().st_size for file in files), largest, every.head)


class Networks:
    """Tasks' own networks, the latest used kept ready within a bound of memory.

    They are known by the hash of their task, which stands for every number in them: a model that has learned another
    task goes on with the networks that are here.
    """

    def __init__(self, memory: int, together: Together | None = None) -> None:
        self.memory, self.together = memory, together
        self.bytes = 0
        self.cuts = 0
        self._ready: OrderedDict[str, tuple[nn.Module, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ready)

    def dense(self, snapshot: Snapshot, task: TaskFacts) -> nn.Module:
        """A task's network. Only one thread may ask."""
        if task.hash in self._ready:
            self._ready.move_to_end(task.hash)
            return self._ready[task.hash][0]
        module = snapshot.net.dense(task.number - 1)
        self.cuts += 1
        if self.together is not None:
            self.together.share(module, f"task-{task.hash}")
        self._ready[task.hash] = module, size(module)
        self.bytes += self._ready[task.hash][1]
        while self.bytes > self.memory and len(self._ready) > 1:
            self._drop()
        return module

    def _drop(self) -> None:
        old, (_, bytes_) = self._ready.popitem(last=False)
        self.bytes -= bytes_
        if self.together is not None:
            self.together.forget(f"task-{old}")

    @torch.no_grad()
    def probabilities(self, snapshot: Snapshot, task: TaskFacts, images: Tensor) -> Tensor:
        """The probability of each class of a task, as `Model.probabilities` has them."""
        scores = self.dense(snapshot, task)(preparation(task.preprocessing).test(images))
        return task_guess.probabilities(scores, task.calibration)

    def likely(self, snapshot: Snapshot, images: Tensor) -> dict[str, Tensor]:
        """Task → how likely each picture belongs to it, as `Model.likely_tasks` has it.

        What is ready answers; what there is room for is made ready. All others take turns in one network.
        """
        turns, largest = DenseInTurn(snapshot.net), snapshot.largest

        def dense(task: TaskFacts) -> nn.Module:
            if task.hash in self._ready or self.bytes + 2 * largest <= self.memory:
                return self.dense(snapshot, task)
            while self._ready and self.bytes + largest > self.memory:
                self._drop()
            return turns.turn(task.number - 1)

        return task_guess.likely(images, snapshot.chain.guessable, dense, lambda task: snapshot.spread[task.name])


class Catalog:
    """The model in a folder, looked at again and again. Whoever reads `snapshot` has a whole one, and never waits."""

    def __init__(
        self, path: Path, *, poll_seconds: float, verify_seconds: float, shadow: bool = False,
        together: Together | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.together = Folder(path), together
        if shadow and chosen(self.folder) is None:
            raise ModelError(f"{path} always serves its newest state; 'zeroforget promote {path}' lets you choose")
        self.poll_seconds, self.verify_seconds = poll_seconds, verify_seconds
        self._seen = self._signature()
        self.snapshot = take(self.folder, together)
        self.shadow, self.candidate = shadow, None if not shadow else self._newer(self.snapshot)
        self.report: Report | None = None
        """What `verify` found last; None while it looks for the first time, or anew after a change."""
        self.trouble: str | None = None
        """Why the folder cannot be read as it is now; the model read before goes on being served."""
        self.changes = 0
        self._stop = threading.Event()
        self._due = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._watch, "zeroforget-watch"), (self._prove, "zeroforget-verify"))
        ]

    def _newer(self, snapshot: Snapshot) -> Snapshot | None:
        """The newest state, if another one is served."""
        return None if snapshot.whole == snapshot.chain.head else take(self.folder, self.together, newest=True)

    def start(self) -> None:
        """Begin to watch the folder, and to verify it."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching. A verification that is under way is not waited for longer than a moment."""
        self._stop.set()
        self._due.set()
        for thread in self._threads:
            thread.join(2)

    def look(self) -> bool:
        """Look at the folder now; whether it has changed since and could be read."""
        seen = self._signature()
        if seen == self._seen and self.trouble is None:
            return False
        try:
            fresh = self.snapshot if seen == self._seen else take(self.folder, self.together)
            if self.shadow and seen != self._seen:
                self.candidate = self._newer(fresh)
        except Exception as error:  # what is served goes on, also where there is no memory for another
            if self._signature() != seen:  # a task came or went while it was read, which is no trouble: look again
                return False
            why = str(error) or type(error).__name__
            if why != self.trouble:
                log.error("the model before is still served: %s", why)
            self.trouble = why
            return False
        self.trouble, self._seen = None, seen
        if (fresh.chain.head, fresh.whole) == (self.snapshot.chain.head, self.snapshot.whole):
            return False
        if self.together is not None and self.snapshot.chain.head != fresh.chain.head:
            self.together.forget(self.snapshot.chain.head)
        self.snapshot, self.report = fresh, None
        self.changes += 1
        log.info("now serving %s", ", ".join(task.name for task in fresh.tasks) or "no task")
        self._due.set()
        return True

    def _signature(self) -> Signature:
        """Cheap to compare: the tasks' folders, and when each task.json was placed."""
        found = []
        with contextlib.suppress(OSError):
            stat = (self.folder.path / SERVING).stat()
            found.append((SERVING, stat.st_ino, stat.st_mtime_ns))
        for _, name in self.folder.entries():
            try:
                stat = (self.folder.tasks / name / TASK).stat()
                found.append((name, stat.st_ino, stat.st_mtime_ns))
            except OSError:
                found.append((name, 0, 0))
        return tuple(found)

    def _watch(self) -> None:
        while not self._stop.wait(self.poll_seconds):
            try:
                self.look()
            except Exception:
                log.exception("could not look at %s", self.folder.path)

    def _prove(self) -> None:
        if self.together is not None and not self.together.first:
            self._hear(self.together)
            return
        while True:
            self._due.clear()
            if self._stop.is_set():  # asked after clearing: `stop` may have come in between
                return
            about = self.snapshot.whole
            try:
                report = verify(self.folder, {})
            except Exception as error:  # whatever it is, it is tried again
                log.error("could not verify: %s", error)
            else:
                # A task that came in between is verified next; a report belongs to the model it speaks of.
                if not report.holds and report != self.report:
                    log.error("%s does not verify: %s", self.folder.path, [one.moved for one in report.proofs])
                if not report.holds or report.head == self.snapshot.whole:
                    self.report = report
                    if self.together is not None:
                        self.together.tell_report(about, report)
            self._due.wait(self.verify_seconds)

    def _hear(self, together: Together) -> None:
        """What another process found, which verifies for all."""
        while not self._stop.wait(self.poll_seconds):
            report = together.report(self.snapshot.whole)
            if report is not None and report != self.report:
                self.report = report
