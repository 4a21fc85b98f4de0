"""Several processes that train one network together: what they add up, agree on and tell each other.

One process alone is the same with nothing to say, so code that uses this reads the same for one and for many.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from zeroforget.files.hashes import sha256

T = TypeVar("T")

WAIT = timedelta(hours=2)
"""How long processes wait for one that is still there, such as the first one, which alone reads and writes files."""


class PeerLost(RuntimeError):
    """Another process of this training ended."""


@dataclass(frozen=True)
class Processes:
    """Those that train together, as one of them sees them: which one it is, and how many there are."""

    rank: int = 0
    world: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this one decides and writes."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.world == 1

    @property
    def key(self) -> tuple[int, ...]:
        """What a seed has in addition, so that no two processes draw the same; nothing for one alone."""
        return () if self.alone else (self.rank, self.world)

    def part(self, rows: Tensor) -> Tensor:
        """This process' part of the rows of a batch: as many as the others have, or one more."""
        return rows.tensor_split(self.world)[self.rank]

    def sizes(self, whole: Iterable[int]) -> list[int]:
        """How many rows this process has of batches of these sizes."""
        return [size // self.world + (self.rank < size % self.world) for size in whole]

    def sum(self, tensor: Tensor) -> Tensor:
        """In place: the sum over all processes, the same bits in each."""
        if not self.alone:
            with _peers(self):
                distributed.all_reduce(tensor, group=self.group)
        return tensor

    @torch.no_grad()
    def mean_gradients(self, parameters: Iterable[nn.Parameter], loss: Tensor, weight: float) -> Tensor:
        """Weighted by `weight` (this process' part of the batch), gradients and the loss become those of the whole.

        They travel in one flat buffer. Returns the loss.
        """
        if self.alone:
            return loss
        parameters = list(parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([*(g.detach().reshape(-1) for g in gradients), loss.reshape(1)])
        pieces = self.sum(flat.mul_(weight)).split([*(g.numel() for g in gradients), 1])
        for parameter, gradient, piece in zip(parameters, gradients, pieces[:-1], strict=True):
            gradient.copy_(piece.view(gradient.shape))
            if parameter.grad is None and piece.any():  # another process' images reached it
                parameter.grad = gradient
        whole: Tensor = pieces[-1].reshape(()).to(loss.dtype)
        return whole

    @torch.no_grad()
    def average(self, tensors: Iterable[Tensor]) -> None:
        """In place: where processes hold other numbers (statistics of their own batches), the mean. What is no floating
        number becomes the first process' own."""
        if self.alone:
            return
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault(tensor.dtype, []).append(tensor)
        for kind, held in kinds.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in held])
            if kind.is_floating_point:
                lowest, highest, mean = flat.clone(), flat.clone(), flat.double() / self.world
                with _peers(self):
                    distributed.all_reduce(lowest, distributed.ReduceOp.MIN, group=self.group)
                    distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=self.group)
                flat = torch.where(lowest == highest, flat, self.sum(mean).to(kind))
            else:
                self._from_first(flat)
            for tensor, piece in zip(held, flat.split([tensor.numel() for tensor in held]), strict=True):
                tensor.copy_(piece.view(tensor.shape))

    def check_same(self, tensors: Mapping[str, Tensor], what: str, advice: str) -> None:
        """Raise ValueError in every process if they do not hold the same bits."""
        if self.alone:
            return
        mine = {name: _digest(tensor) for name, tensor in sorted(tensors.items())}
        held = self.told(mine)
        if other := next((rank for rank, theirs in enumerate(held) if theirs != held[0]), 0):
            names = sorted({name for name, _ in held[0].items() ^ held[other].items()})
            raise ValueError(
                f"{what}: processes 0 and {other} of {self.world} differ in {len(names)} of {len(mine)} tensors, such "
                f"as '{names[0]}'. {advice}"
            )

    def told(self, mine: T) -> list[T]:
        """What each process says, by rank."""
        said: list[Any] = [mine] * self.world
        if not self.alone:
            with _peers(self):
                distributed.all_gather_object(said, mine, group=self.group)
        return said

    def by_first(self, work: Callable[[], T]) -> T:
        """What the first process finds by this work, in each; an error of it too. The others do nothing but wait."""
        if self.alone:
            return work()
        said: list[Any] = [None]
        if self.first:
            try:
                said = [(work(), None)]
            except Exception as error:
                with contextlib.suppress(PeerLost):
                    self._tell([(None, _portable(error))])
                raise
        self._tell(said)
        found, wrong = said[0]
        if wrong is not None:
            raise wrong
        return found  # type: ignore[no-any-return]

    def _tell(self, said: list[Any]) -> None:
        with _peers(self):
            distributed.broadcast_object_list(said, group=self.group, group_src=0)

    def _from_first(self, tensor: Tensor) -> None:
        with _peers(self):
            distributed.broadcast(tensor, group=self.group, group_src=0)

    @torch.no_grad()
    def follow(self, tensors: Mapping[str, Tensor]) -> None:
        """In place: the first process' numbers in each."""
        for _, tensor in sorted(tensors.items()) if not self.alone else ():
            self._from_first(tensor)


def current(group: Any = None) -> Processes:
    """Those that torch.distributed has joined; one alone where it has joined none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return Processes()
    return Processes(distributed.get_rank(group), distributed.get_world_size(group), group)


def _portable(error: Exception) -> Exception:
    """The error, or its words, as another process can read them."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return ValueError(str(error))


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    content = plain.view(torch.uint8).numpy().data if plain.numel() else b""
    return sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + bytes(content))


@contextlib.contextmanager
def _peers(processes: Processes) -> Iterator[None]:
    """Around a word between processes: a connection that broke means that another one ended."""
    try:
        yield
    except (distributed.DistError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        first = str(error).strip().partition("\n")[0]
        raise PeerLost(
            f"process {processes.rank} of {processes.world}: another process of this training has ended ({first}). "
            "Start all of them again: training goes on where it stopped"
        ) from error


# Joining -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process."""

    rank: int
    world: int
    local: int
    address: str
    port: int


def place(env: Mapping[str, str] = os.environ) -> Place | None:
    """What torchrun, or srun with several tasks, says about this process; None for one that was started by itself."""
    if "RANK" in env and "MASTER_ADDR" in env:
        rank, world, local, port = (int(env.get(n, "0")) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
        return Place(rank, world, local, env["MASTER_ADDR"], port) if world > 1 else None
    # A batch script has SLURM_NTASKS too and is one process; only what srun starts belongs to a step of several.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost")
        port = int(env.get("MASTER_PORT", 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))
        address = env.get("MASTER_ADDR", first_host(nodes))
        rank, world, local = (int(env[n]) for n in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
        return Place(rank, world, local, address, port)
    return None


def first_host(nodes: str) -> str:
    """The first of SLURM's list of hosts: 'gpu01' of 'gpu[01-04,07],big2'."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^\[,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


@contextlib.contextmanager
def joined(where: Place | None) -> Iterator[Processes]:
    """Inside, this process trains with the others that its launcher started; without one, alone."""
    if where is None or distributed.is_initialized():
        yield current()
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(where.local % gpus)
    each_its_own = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", gpus + 1))
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if each_its_own and distributed.is_nccl_available() else "gloo",
        init_method=f"tcp://{where.address}:{where.port}" if "RANK" not in os.environ else "env://",
        rank=where.rank,
        world_size=where.world,
        timeout=WAIT,
    )
    try:
        yield current()
        gc.collect()  # what still holds a tensor of the group can abort a process at its end
        with contextlib.suppress(RuntimeError):
            distributed.barrier()
    finally:
        distributed.destroy_process_group()
