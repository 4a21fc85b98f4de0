"""Runs of an experiment on the hosts of a Ray cluster, each with its share of processors, a GPU and memory. Hosts may
come and go: a run goes on elsewhere from its checkpoint, in a folder that all of them see."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zeroforget._version import __version__
from zeroforget.experiments.experiment import RunConfig
from zeroforget.experiments.folder import Busy
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.parallel import terminable
from zeroforget.experiments.results import Results
from zeroforget.experiments.scheduling import Job, Outcome, Voice, Work, outcome, pass_on, tell_end

PATIENCE_S = 10.0
"""How long runs may take to end when they are asked to."""
REACHED_S = 5.0
"""How long a cluster may take to be reached."""
DEATHS = 5
"""So many times a run is begun again after its host or its process has died."""
_EVERY_S = 0.5
_MORE = "Give each run more, by --memory or --gpus: it goes on where it stopped"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and what each run takes of it."""

    address: str = "auto"
    cpus: float = 1.0
    gpus: float = 0.0
    memory: int | None = None
    """Bytes."""

    def __post_init__(self) -> None:
        if self.cpus <= 0:
            raise ValueError(f"a run needs some of a host's processors, not {self.cpus:g}")
        if not 0 <= self.gpus <= 1:
            raise ValueError(f"a run trains on one GPU or a share of it, from 0 to 1, not on {self.gpus:g}")

    @property
    def threads(self) -> int:
        """Of each run."""
        return max(1, int(self.cpus))

    def engine(self, work: Work, out: Path, most: int | None, watch: Observer) -> Hosts:
        """What trains runs there, at most so many at a time: by default as many as the cluster takes."""
        try:
            import ray
        except ImportError as error:
            raise ValueError(f"--ray needs Ray ({error}): pip install 'zeroforget[ray]'") from error
        return Hosts(ray, self, work, out, most, watch)


@dataclass(frozen=True)
class _Errand:
    """What a host must know of a run."""

    work: Work
    config: RunConfig
    each: Cluster
    shared: Path
    """A file that the host sees if it sees the folder of runs."""
    versions: str = ""
    folder: str = ""
    """The current folder, where code and data of one's own may lie."""
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def __call__(self, config: RunConfig, watch: Observer) -> Results:
        host = socket.gethostname()
        if self.versions != (own := _versions()):
            raise ValueError(f"{host} has {own}, and the runs were begun with {self.versions}: install the same there")
        if not self.shared.exists():
            raise ValueError(f"{host} does not see {self.shared.parent}: --out must be a folder that all hosts share")
        regime = replace(config.regime)  # looks for the device, which the host that began the runs may not have
        if regime.device.startswith("cuda") and self.each.gpus < 1:
            torch.cuda.set_per_process_memory_fraction(self.each.gpus)
        return self.work(config, watch)


def _versions() -> str:
    return f"zeroforget {__version__} and torch {torch.__version__.partition('+')[0]}"


def _live(errand: _Errand, ears: Any) -> Outcome:
    """All that a process on a host does: train one run, and tell."""
    import ray

    sys.argv[:] = errand.arguments  # for what is noted of how a run was made
    os.environ.update(errand.environment)
    with contextlib.suppress(OSError):
        os.chdir(errand.folder)
    torch.set_num_threads(errand.each.threads)
    last: list[Any] = []

    def tell(said: tuple[Any, ...]) -> None:
        last[:] = [ears.hear.remote(errand.config.folder, said)]

    found = outcome(errand, errand.config, Voice(tell, _EVERY_S), _MORE)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(last, timeout=PATIENCE_S)  # this process ends now, and what it has said must have left it
    return found


class _Ears:
    """Lives on the cluster: hears what runs say, until it is asked."""

    def __init__(self) -> None:
        self.said: list[tuple[Path, tuple[Any, ...]]] = []

    def hear(self, run: Path, said: tuple[Any, ...]) -> None:
        """One word."""
        self.said.append((run, said))

    def taken(self) -> list[tuple[Path, tuple[Any, ...]]]:
        """All that was said since the last time."""
        said, self.said = self.said, []
        return said


@dataclass(eq=False, kw_only=True)
class _Sent(Job):
    reference: Any


@dataclass
class Hosts:
    """Trains runs on a cluster: all are sent at once, and wait there for room."""

    ray: Any
    each: Cluster
    work: Work
    out: Path
    most: int | None
    watch: Observer
    _sent: list[_Sent] = field(default_factory=list)
    _deaths: Counter[Path] = field(default_factory=Counter)
    _ears: Any = None
    _errand: Callable[[RunConfig], _Errand] | None = None

    def has_room(self, running: int) -> bool:
        """Always, but for a bound of the user's."""
        return self.most is None or running < self.most

    def start(self, config: RunConfig, watch: Observer) -> Job:
        """Send it."""
        assert self._errand is not None
        # A process for each run: it leaves nothing behind on a GPU.
        task = self.ray.remote(max_calls=1)(_live).options(
            num_cpus=self.each.cpus,
            num_gpus=self.each.gpus,
            memory=self.each.memory,
            max_retries=0,  # what died is sent again from here, after a look at who works on it
            name=config.folder.as_posix(),
        )
        self._sent.append(_Sent(config, reference=task.remote(self._errand(config), self._ears)))
        return self._sent[-1]

    def ended(self, watch: Observer) -> list[Job]:
        """Wait until one comes to its end, pass on what all have said meanwhile."""
        ready, _ = self.ray.wait([job.reference for job in self._sent], timeout=_EVERY_S)
        by_run = {job.config.folder: job for job in self._sent}
        for run, said in self.ray.get(self._ears.taken.remote()):
            if run in by_run:
                pass_on(by_run[run], watch, *said)
        done = [job for job in self._sent if job.reference in ready]
        for job in done:
            self._sent.remove(job)
            job.outcome = self._outcome(job, watch)
            tell_end(job, watch)
        return list(done)

    def _outcome(self, job: _Sent, watch: Observer) -> Outcome:
        errors = self.ray.exceptions
        try:
            found: Outcome = self.ray.get(job.reference)
        except errors.RayTaskError as error:
            return str(error)
        except errors.RayError as error:
            run, why = job.config.folder, str(error).strip().partition("\n")[0]
            self._deaths[run] += 1
            if self._deaths[run] > DEATHS:
                return f"its host or its process died {DEATHS + 1} times: {why}"
            watch.notice(f"{run}: its host or its process died ({type(error).__name__}); it goes on elsewhere")
            return Busy(f"{run} died: {why}")
        return found

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Connected to the cluster. However this ends, no run of ours goes on there."""
        with contextlib.ExitStack() as stack:
            if not self.ray.is_initialized():
                self._connect()
                stack.callback(self.ray.shutdown)
            stack.enter_context(terminable())
            shared = stack.enter_context(_file_in(self.out))
            self._errand = lambda config: _Errand(
                self.work, config, self.each, shared, _versions(), str(Path.cwd()), tuple(sys.argv), _words()
            )
            self._ears = self.ray.remote(_Ears).options(**self._near()).remote()
            stack.callback(self.ray.kill, self._ears)
            stack.callback(self._stop)
            self._warn()
            yield

    def _connect(self) -> None:
        address = self.each.address
        try:
            if place := re.fullmatch(r"\[?([^/\]]+?)\]?:(\d+)", address):  # Ray itself would try for minutes
                socket.create_connection((place[1], int(place[2])), REACHED_S).close()
            self.ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"no Ray cluster answers at '{address}' ({error}); start one with `ray start --head`, or give the "
                "address of one"
            ) from error

    def _near(self) -> dict[str, Any]:
        """Where to hear: beside this process, so that no other host's death costs a word."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = self.ray.get_runtime_context().get_node_id()
        near = NodeAffinitySchedulingStrategy(here, soft=True)
        return {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": near}

    def _warn(self) -> None:
        wanted = {"CPU": self.each.cpus, "GPU": self.each.gpus, "memory": self.each.memory or 0}
        hosts = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(host.get(kind, 0) >= most for kind, most in wanted.items()) for host in hosts):
            text = ", ".join(f"{most:g} {kind}" for kind, most in wanted.items() if most)
            self.watch.notice(f"no host of the cluster has {text} for a run now; the runs wait for one")

    def _stop(self) -> None:
        left = [job.reference for job in self._sent]
        for reference in left:
            self.ray.cancel(reference)
        if left:
            _, left = self.ray.wait(left, num_returns=len(left), timeout=PATIENCE_S)
        for reference in left:
            self.ray.cancel(reference, force=True)


@contextlib.contextmanager
def _file_in(folder: Path) -> Iterator[Path]:
    """A file that every host sees that sees the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".shared-", dir=folder)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _words() -> tuple[tuple[str, str], ...]:
    """What the environment says to us."""
    return tuple((name, value) for name, value in os.environ.items() if name.startswith("ZEROFORGET_"))
