"""Pictures of many requests and many tasks, classified together by one thread.

While it computes, other requests arrive: they are its next batch. So a lone request never waits for company, and a
busy server batches by itself.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroforget.serving.catalog import Networks, Snapshot
from zeroforget.serving.decoding import DecoderProcesses, Stopped
from zeroforget.serving.metrics import Metrics
from zeroforget.serving.settings import Settings
from zeroforget.serving.together import Together
from zeroforget.store import TaskFacts, Unreadable

log = logging.getLogger("zeroforget.serving")
Ranks = list[tuple[str, float]]


@dataclass(frozen=True)
class Answer:
    """A task, the probability of each of its classes, and, if no task was asked, that of each task."""

    task: TaskFacts
    probabilities: list[float]
    tasks: Ranks | None = None


@dataclass(eq=False)
class Question:
    """A picture that somebody waits for an answer about."""

    snapshot: Snapshot
    task: TaskFacts | None
    """None asks which task it is, too."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Answer]
    image: Tensor = field(default_factory=lambda: torch.empty(0))
    result: Answer | Exception | None = None


class Shadow:
    """How the newest state would have guessed tasks, beside the state that is served."""

    def __init__(self) -> None:
        self.compared, self.other = 0, 0
        self.moves: Counter[tuple[str, str]] = Counter()
        """From which task to which, and how often."""

    def add(self, served: str, newest: str) -> None:
        """Count one picture."""
        self.compared += 1
        if served != newest:
            self.other += 1
            self.moves[served, newest] += 1


class Batcher:
    """Has pictures decoded in a few processes and classifies them in one thread."""

    def __init__(
        self, settings: Settings, metrics: Metrics, candidate: Callable[[], Snapshot | None] = lambda: None,
        together: Together | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.metrics, self.candidate = settings, metrics, candidate
        self.shadow = Shadow()
        self.networks = Networks(settings.memory, together)
        self._waiting: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self.decoders = DecoderProcesses(settings.decoders, settings.decode_seconds, settings.pixels)
        self._hands = ThreadPoolExecutor(settings.decoders, "zeroforget-decode")
        """Threads that hand pictures to the processes which decode them."""
        self._open: set[Question] = set()
        self._began: float | None = None
        """When the batch that is computed now was begun."""
        self._worker = threading.Thread(target=self._work, name="zeroforget-classify", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self.decoders.start()
        self._worker.start()

    def stop(self) -> None:
        """Finish what was asked, then stop; what is not finished in time is given up."""
        end = time.monotonic() + self.settings.stop_seconds
        while self._open and self.alive and time.monotonic() < end:
            time.sleep(0.01)
        self.decoders.stop()
        self._hands.shutdown(cancel_futures=True)
        self._waiting.put(None)
        if self.alive:
            self._worker.join(max(1.0, end - time.monotonic()))
        left = [question for question in list(self._open) if question.result is None]
        for question in left:
            question.result = Stopped("was not classified: the server stops")
        _deliver(left)

    @property
    def alive(self) -> bool:
        """Whether questions are answered."""
        return self._worker.is_alive()

    @property
    def stuck(self) -> str | None:
        """What does not come to an end, if something does not."""
        began = self._began
        if began is not None and time.monotonic() - began > self.settings.answer_seconds:
            return "a batch of pictures is computed without end"
        return "a picture is decoded without end" if self.decoders.stuck else None

    async def ask(self, snapshot: Snapshot, task: TaskFacts | None, content: bytes) -> Answer:
        """Classify one picture's file; Unreadable if it is none."""
        loop = asyncio.get_running_loop()
        question = Question(snapshot, task, loop, loop.create_future())
        self._open.add(question)
        try:
            try:
                self._hands.submit(self._decode, question, content)
            except RuntimeError as error:  # no thread takes it any more
                raise Stopped("was not decoded: the server stops") from error
            return await question.future
        finally:
            self._open.discard(question)

    def _decode(self, question: Question, content: bytes) -> None:
        try:
            shape = question.snapshot.chain.model.backbone.shape
            question.image = self.decoders.decode(content, shape, self.settings.pixels)
        except Unreadable as error:
            question.result = error
        except Exception as error:  # whatever a picture makes its decoder do, it is the picture's fault
            log.warning("a picture could not be decoded: %r", error)
            question.result = Unreadable(f"cannot be decoded: {type(error).__name__}")
        if question.result is None:
            self._waiting.put(question)
        else:
            _deliver([question])

    # In the worker ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while batch := self._next():
            self.metrics.batch(len(batch))
            self._began = time.monotonic()
            self._answer(batch)
            self._began = None
            _deliver(batch)
            self._compare(batch)
            del batch  # so that the last pictures of a busy hour, and their model, are not held through the night

    def _next(self) -> list[Question]:
        """What waits now, as many as may be classified together; waits for the first. None of it: time to stop."""
        batch = list[Question]()
        question = self._waiting.get()
        while question is not None:
            batch.append(question)
            if len(batch) == self.settings.batch:
                return batch
            try:
                question = self._waiting.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._waiting.put(None)
        return batch

    def _answer(self, batch: list[Question]) -> None:
        """Each group is a failure of its own: a question never fails because of its neighbours."""
        chosen: dict[str, list[tuple[Question, TaskFacts, Ranks | None]]] = {}
        for group in _groups([one for one in batch if one.task is None], lambda one: one.snapshot.chain.head):
            with _Failing(group):
                for question, found in zip(group, self._ranks(group), strict=True):
                    task = question.snapshot.chain.find(found[0][0])
                    chosen.setdefault(task.hash, []).append((question, task, found))
        for question in batch:
            if question.task is not None:
                chosen.setdefault(question.task.hash, []).append((question, question.task, None))
        for rows in chosen.values():
            with _Failing([question for question, _, _ in rows]):
                first, task, _ = rows[0]
                images = torch.stack([question.image for question, _, _ in rows])
                values = self.networks.probabilities(first.snapshot, task, images).tolist()
                for (question, own, ranks), row in zip(rows, values, strict=True):
                    question.result = Answer(own, row, ranks)
                self.metrics.task(task.name, len(rows))

    def _compare(self, batch: list[Question]) -> None:
        """What the newest state would have said, where it is not served yet. Of tasks that were named it says the
        same, bit for bit; what may change is which task is guessed."""
        newest = self.candidate()
        group = [one for one in batch if one.task is None and isinstance(one.result, Answer)]
        if newest is None or not group:
            return
        try:
            for question, ranks in zip(group, self._ranks(group, newest), strict=True):
                assert isinstance(question.result, Answer)
                self.shadow.add(question.result.task.name, ranks[0][0])
        except Exception:
            log.exception("could not compare with the newest state")

    def _ranks(self, group: list[Question], snapshot: Snapshot | None = None) -> list[Ranks]:
        likely = self.networks.likely(snapshot or group[0].snapshot, torch.stack([one.image for one in group]))
        columns = {name: values.tolist() for name, values in likely.items()}
        pairs = ([(name, column[row]) for name, column in columns.items()] for row in range(len(group)))
        return [sorted(one, key=lambda pair: -pair[1]) for one in pairs]


class _Failing:
    """Whatever goes wrong inside becomes the result of these questions; the worker lives on."""

    def __init__(self, questions: list[Question]) -> None:
        self.questions = questions

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("could not classify", exc_info=error)
        for question in self.questions:
            question.result = error
        return True


def _groups(questions: list[Question], key: Callable[[Question], str]) -> list[list[Question]]:
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(key(question), []).append(question)
    return list(found.values())


def _deliver(batch: list[Question]) -> None:
    """Wake each event loop once for all its questions."""
    for group in _groups(batch, lambda one: str(id(one.loop))):
        try:
            group[0].loop.call_soon_threadsafe(_settle, group)
        except RuntimeError:
            log.warning("%d answers came after the server had stopped", len(group))


def _settle(group: list[Question]) -> None:
    for question in group:
        if question.future.done():
            continue
        if isinstance(question.result, Answer):
            question.future.set_result(question.result)
        else:
            question.future.set_exception(question.result or RuntimeError("no answer"))
