"""One run: a folder with each finished task on disk, so that a kill costs an epoch at most and changes nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.data import Scenario, Task
from zeroforget.experiments.comparability import SETUP, describe_data
from zeroforget.experiments.costs import CountingFit, operations_of_an_answer
from zeroforget.experiments.disk import damaged, read_json, room_for, write_json
from zeroforget.experiments.experiment import RunConfig
from zeroforget.experiments.folder import Busy, Log, RunFolder, Unwritten, environment
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.resolve import NamedPart, conform, make_network
from zeroforget.experiments.results import Results
from zeroforget.experiments.search import Search, carried
from zeroforget.files.atomic import place
from zeroforget.files.hashes import sha256
from zeroforget.growing.network import GrowingNetwork
from zeroforget.methods import Method, registry
from zeroforget.processes import PeerLost, current
from zeroforget.training import Diverged, FitLog, Progress, logits
from zeroforget.training.checkpoint import Checkpoint, DamagedCheckpoint
from zeroforget.training.seeding import seeded

RECORD = "task.json"
TENSORS = "state.safetensors"
FIGURES: dict[str, Any] = {
    "name": str,
    "classes": int,
    "accuracy": list[float],
    "log": dict[str, Any],
    "logits": str,
    "seconds": float,
    "parameters": int,
    "overhead": dict[str, int],
    "growth": dict[str, int],
    "unchanged": list[bool],
}
"""What a run notes of a finished task."""
_REMEDY = "delete the run's folder and start it again"
_OTHER = f"It was begun with another version of the method or the network: {_REMEDY}"


def save_task(folder: Path, method: Method, record: dict[str, Any]) -> None:
    """Write a finished task's folder aside and rename it into place; `record` goes into task.json."""
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    Checkpoint(aside / TENSORS).save(dict(method.state_dict()), {})
    write_json(aside / RECORD, record | {"structure": method.structure()}, seal=True)
    place(aside, folder)


def load_record(folder: Path, needed: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """A finished task's task.json, or None. It must have the structure and what else is `needed`."""
    file = folder / RECORD
    if not file.exists():
        return None
    record = read_json(file, _REMEDY)
    for name, kind in ({"structure": Any} | dict(needed or {})).items():
        if name not in record:
            raise damaged(file, f"it lacks '{name}'", _REMEDY)
        try:
            conform(record[name], kind, f"'{name}'")
        except ValueError as error:
            raise damaged(file, str(error), _REMEDY) from error
    return record


def load_method(folder: Path, method: Method) -> None:
    """Bring a method that was just built to where it stood when the task was finished."""
    record = load_record(folder)
    try:
        saved = Checkpoint(folder / TENSORS).load()
    except DamagedCheckpoint as error:
        raise ValueError(f"{error}; {_REMEDY}") from error
    if record is None or saved is None:
        raise ValueError(f"{folder} lacks {RECORD} or {TENSORS}; {_REMEDY}")
    method.replay(record["structure"])
    load_tensors(method, saved[0], str(folder))


@torch.no_grad()
def load_tensors(method: Method, saved: dict[str, torch.Tensor], where: str, advice: str = _OTHER) -> None:
    """Copy tensors by name; the first that does not fit is named."""
    own = method.state_dict()
    for name in sorted(own.keys() | saved.keys()):
        if name not in saved:
            raise ValueError(f"{where}: tensor '{name}' is missing from what was saved. {advice}")
        if name not in own:
            raise ValueError(f"{where}: tensor '{name}' was saved, but the method has none of that name. {advice}")
        if own[name].shape != saved[name].shape or own[name].dtype != saved[name].dtype:
            raise ValueError(
                f"{where}: tensor '{name}' was saved as {tuple(saved[name].shape)} {saved[name].dtype}, "
                f"but the method has {tuple(own[name].shape)} {own[name].dtype}. {advice}"
            )
    for name, tensor in own.items():
        tensor.copy_(saved[name])


class Refused(ValueError):
    """A run that cannot be made: training diverged, say, or the method does not take the network."""


class Broken(Refused):
    """A run that met a mistake in somebody's code: all that Python says of it."""


def run_one(config: RunConfig, out: Path, data: Callable[[NamedPart], Scenario], watch: Observer) -> Results:
    """One run, from its beginning or from where it was stopped. Of several processes the first reads and writes."""
    folder, processes = RunFolder(out / config.folder), current()
    still: list[Callable[[], None]] = []
    with ExitStack() as held:

        def claimed() -> Results | None:
            held.enter_context(room_for(folder.path, "start it again: it goes on where it stopped"))
            still.append(held.enter_context(folder.locked()))
            folder.claim(config.to_dict(), config.defaults(), processes.world)
            return folder.results()

        finished = processes.by_first(claimed)
        if finished is not None:
            watch.run_done(config, finished, True)
            return finished
        begun = _Run(config, folder, data(config.scenario), watch, *still)
        with _checkpoints(folder):
            try:
                return begun.execute()
            except (DamagedCheckpoint, Busy):
                raise
            except ValueError as error:
                raise Refused(str(error)) from error
            except (OSError, MemoryError, torch.OutOfMemoryError, PeerLost):
                raise
            except Exception as error:  # the others shall not wait for it to be mended
                raise Broken(traceback.format_exc().rstrip()) from error


@contextmanager
def _checkpoints(folder: RunFolder) -> Iterator[None]:
    """Inside, a checkpoint that cannot be read is an error that says where and what to do."""
    try:
        yield
    except DamagedCheckpoint as error:
        remedy = f"delete {folder.path / 'learning'} and start it again: the task begins anew"
        raise ValueError(f"{error}; {remedy}") from error


class _Run:
    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        scenario: Scenario,
        watch: Observer,
        still_held: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.folder, self.scenario, self.watch = config, folder, scenario, watch
        self.still_held = still_held
        self.processes = current()

        def claimed() -> dict[str, Any]:
            folder.claim_data(describe_data(scenario))
            return folder.environment(config.choice.method)

        self.environment = self.processes.by_first(claimed)
        self.log = Log(folder.path / "log.jsonl") if self.processes.first else Unwritten()
        self.device = config.regime.device

    def execute(self) -> Results:
        self.config.search.check(len(self.scenario.tasks))
        records = self.processes.by_first(self._found)
        method = self._build()
        if records:
            with seeded("replay", self.config.seed):
                load_method(self.folder.task(len(records) - 1), method)
        self.log.write("resumed" if records else "started", finished=len(records), environment=environment())
        self.watch.run_begins(self.config, [task.name for task in self.scenario.tasks], len(records))
        for index in range(len(records), len(self.scenario.tasks)):
            method, record = self._task(method, index, records)
            records.append(record)
        results = self._results(records)
        if not results.trained[-1]:
            raise ValueError(
                f"method '{self.config.choice.label}' {results.logs[-1]['stopped']}, but there are {len(records)}: "
                "it was never trained"
            )
        if self.processes.first:
            results.save(self.folder.path)
            self.log.write("finished", average=results.average)
            shutil.rmtree(self.folder.path / "learning", ignore_errors=True)
        self.watch.run_done(self.config, results, False)
        return results

    # Structure -------------------------------------------------------------------------------------------------

    def _build(self) -> Method:
        """The same initial network for every method, given a seed."""
        config = self.config
        with seeded("init", config.seed):
            net = make_network(config.network, self.scenario.shape)
        with seeded("method", config.seed):
            method = registry.build(config.choice.method, net, self.scenario.example(), **config.choice.options)
        return method.to(self.device)

    def _found(self) -> list[dict[str, Any]]:
        """What is written of finished tasks."""
        records: list[dict[str, Any]] = []
        while (record := load_record(self.folder.task(len(records)), FIGURES)) is not None:
            records.append(record)
        self._tidy(len(records))
        return records

    def _tidy(self, finished: int) -> None:
        """Away with what a kill may have left between two steps."""
        for index in range(finished):
            shutil.rmtree(self.folder.learning(index), ignore_errors=True)
        for index in range(finished - 1):
            (self.folder.task(index) / TENSORS).unlink(missing_ok=True)

    # Learning --------------------------------------------------------------------------------------------------

    def _task(self, method: Method, index: int, records: list[dict[str, Any]]) -> tuple[Method, dict[str, Any]]:
        began = time.perf_counter()
        if self.config.search.covers(index):
            method, log = self._search(method, index)
        else:
            lr = carried(method, [r["log"]["notes"] for r in records], self.config.regime.lr)
            log = self._learn(method, index, lr, None)
        training = log.notes.pop("operations")
        if index == 0 and ":" in self.config.choice.method:
            self._try_replay(method)
        record = self.processes.by_first(lambda: self._written(method, log, training, began, records))
        self.watch.task_done(self.config, record)
        return method, record

    def _written(
        self, method: Method, log: FitLog, training: int, began: float, records: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """A task that is learned, judged and on disk."""
        index = len(records)
        task = self.scenario.tasks[index]
        record = self._evaluate(method, index, [*(r["logits"] for r in records)])
        record["operations"] |= {"training": training}
        record |= {"index": index, "name": task.name, "classes": len(task.classes), "log": log.to_dict()}
        # A task that was interrupted counts the epochs it had finished.
        record["seconds"] = max(time.perf_counter() - began, log.seconds)
        self.still_held()
        save_task(self.folder.task(index), method, record)
        self._tidy(index + 1)
        self.log.write("task", task=index, name=task.name, accuracy=record["accuracy"], seconds=record["seconds"])
        return record

    def _try_replay(self, method: Method) -> None:
        """What somebody's method saves must fit when its tasks are replayed: else no run of it could ever go on."""
        with seeded("replay", self.config.seed):
            twin = self._build()
            twin.replay(json.loads(json.dumps(method.structure())))
        advice = "Make it in __init__ or in add_task, which are called again when a run goes on; or override replay too"
        load_tensors(twin, dict(method.state_dict()), f"method '{self.config.choice.label}'", advice)

    def _search(self, method: Method, index: int) -> tuple[Method, FitLog]:
        start = self.config.choice.all_options().get(method.tradeoff) if method.tradeoff else None
        search = Search(
            method,
            self.scenario.tasks[index],
            lambda trial, lr, name: self._learn(trial, index, lr, name),
            self.config.regime.lr,
            self.config.search,
            start,
            self.folder.learning(index) / "search.json",
            self.device,
        )
        method, log = search()
        for trial in search.trials:
            self.log.write("trial", task=index, **dataclasses.asdict(trial))
        return method, log

    def _learn(self, method: Method, index: int, lr: float, trial: str | None) -> FitLog:
        task = self.scenario.tasks[index]
        past: tuple[Task, ...] = self.scenario.tasks[:index] if method.uses_past_data else ()
        fit = CountingFit(
            dataclasses.replace(self.config.regime, lr=lr),
            self.config.seed,
            lambda progress: self._progress(progress, trial),
            self.folder.learning(index) / (trial or "fit"),
            self.watch.every,
        )
        with seeded("learn", self.config.seed, index):
            try:
                log = method.learn(task, fit, past)
                log.notes["operations"] = fit.operations
                return log
            except (Diverged, DamagedCheckpoint, Busy):
                raise
            except ValueError as error:
                raise ValueError(f"method '{self.config.choice.label}', task '{task.name}': {error}") from error

    def _progress(self, progress: Progress, trial: str | None) -> None:
        if progress.last is not None and progress.step == progress.steps:
            self.still_held()
            epoch = dataclasses.asdict(progress.last)
            self.log.write("epoch", task=progress.index, trial=trial, phase=progress.phase, **epoch)
        self.watch.progress(self.config, progress, trial)

    # Judging ---------------------------------------------------------------------------------------------------

    def _evaluate(self, method: Method, index: int, learned: list[str]) -> dict[str, Any]:
        """Every task so far through its predictor; logits are remembered by their hash."""
        row: list[float] = []
        hashes: list[str] = []
        with deterministic():
            for k, task in enumerate(self.scenario.tasks[: index + 1]):
                out = logits(method.predictor(k), task.test, task.prepare, device=self.device)
                right = out.argmax(1) == task.test.labels.cpu()
                row.append(int(right.sum()) / len(right))
                hashes.append(digest(out))
            task = self.scenario.tasks[index]
            one = task.prepare.test(task.test.batch(torch.zeros(1, dtype=torch.int64))[0].to(self.device))
            answer = operations_of_an_answer(method.predictor(index), one)
        return {
            "accuracy": row,
            "logits": hashes[-1],
            "unchanged": [now == then for now, then in zip(hashes, [*learned, hashes[-1]], strict=True)],
            "parameters": parameters(method),
            "overhead": overhead(method),
            "operations": {"answer": answer},
            "growth": widths(method.net, index),
        }

    def _results(self, records: list[dict[str, Any]]) -> Results:
        config = self.config.to_dict()
        return Results(
            experiment=self.config.experiment,
            scenario=self.config.scenario.name,
            network=str(self.config.network),
            method=self.config.choice.label,
            options=config["options"],
            regime=config["regime"],
            seed=self.config.seed,
            tasks=[{"name": r["name"], "classes": r["classes"]} for r in records],
            accuracy=[r["accuracy"] for r in records],
            logs=[r["log"] for r in records],
            seconds=[r["seconds"] for r in records],
            parameters=[r["parameters"] for r in records],
            overhead=[r["overhead"] for r in records],
            operations=[r["operations"] for r in records] if all("operations" in r for r in records) else [],
            growth={axis: [r["growth"][axis] for r in records] for axis in records[-1]["growth"]},
            unchanged=records[-1]["unchanged"],
            environment=self.environment,
            setup={name: config[name] for name in SETUP},
        )


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, cuDNN chooses the same algorithm every time and rounds nothing off: bits can be compared."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = True, False, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = before


def digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bytes: equal only where every bit is."""
    return sha256(tensor.detach().cpu().contiguous().numpy().tobytes())


def parameters(method: Method) -> int:
    """How many numbers the network (at the newest task's width, if it grows) and all heads hold, frozen or not."""
    net: nn.Module = method.net
    heads: nn.Module = method.heads
    if isinstance(net, GrowingNetwork):
        heads = net.get_submodule("heads")
        net = net.dense(len(method.specs) - 1).get_submodule("features")
    return sum(p.numel() for p in [*net.parameters(), *heads.state_dict().values()])


def overhead(method: Method) -> dict[str, int]:
    """What a method keeps, in bits; `packed` and `spared` only where there is such a thing."""
    kept = method.overhead()
    found = {"training": kept.training, "inference": kept.inference}
    found |= {} if kept.packed is None else {"packed": kept.packed}
    return found | ({"spared": kept.spared} if kept.spared else {})


def widths(net: nn.Module, task: int) -> dict[str, int]:
    """The width of each axis of a growing network after a task; nothing for others."""
    return net.widths(task) if isinstance(net, GrowingNetwork) else {}
