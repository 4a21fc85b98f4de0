"""Networks out of a model's files, what a task adds to them, and the weights that a first one may start from."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zeroforget.files.hashes import sha256
from zeroforget.growing.dense import each_dense, fingerprint
from zeroforget.growing.network import GrowingNetwork
from zeroforget.store import mismatch
from zeroforget.store.backbone import Backbone
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import MODEL, Chain, Folder
from zeroforget.store.network import adds, assemble
from zeroforget.store.pictures import Lesson
from zeroforget.store.schema import TaskFacts
from zeroforget.store.tensors import expected
from zeroforget.store.weights import fill_from, needed, prefix_of, read_weights
from zeroforget.training.seeding import seeded


@dataclass(frozen=True)
class Addition:
    """What a task adds to a model."""

    growth: float
    rank: float
    features: Mapping[str, tuple[int, int]]
    """Axis → features before and after."""
    weights: int
    bytes: int
    operations: int
    before: int | None
    """Operations of the newest network before it."""

    def __str__(self) -> str:
        new = sum(after - before for before, after in self.features.values())
        text = f"{new} feature{'s' * (new != 1)}, {self.weights:,} weights, {self.bytes:,} bytes"
        if self.before is None:
            return f"{text}; {self.operations:,} operations a picture"
        more = round(100 * (self.operations / self.before - 1), 1)
        how = f"{abs(more):.1f} % {'more' if more > 0 else 'less'} than" if more else "as much as"
        return f"{text}; a picture costs {how} in the task before"


def prove(folder: Folder, chain: Chain, more: Sequence[tuple[TaskFacts, Path]]) -> list[nn.Module]:
    """Read a chain and tasks to come after it from disk; every network must be the one that was written down.

    Gives the dense networks of the tasks to come.
    """
    net = assemble_chain(folder, chain, more)
    for one, task in zip(each_dense(net), [*chain.tasks, *(facts for facts, _ in more)], strict=True):
        if fingerprint(one) != task.network:
            raise ModelError(
                f"task '{task.name}' would not be the network it was; nothing was changed. Please report this"
            )
    return [net.dense(task.number - 1) for task, _ in more]


def assemble_chain(folder: Folder, chain: Chain, more: Sequence[tuple[TaskFacts, Path]] = ()) -> GrowingNetwork:
    """The network of a chain and of tasks to come after it, from their files."""
    places = [(task, folder.task(task)) for task in chain.tasks] + list(more)
    return assemble(chain.model, places, folder.tensors, folder.path / MODEL)


def dense_alone(folder: Folder, chain: Chain, task: TaskFacts) -> nn.Module:
    """A task's own network, of nothing but what it uses: tasks that added no features and no step are left out."""
    used = [one for one in chain.tasks[: task.number] if one is task or one.number == 1 or adds(one)]
    net = assemble(chain.model, [(one, folder.task(one)) for one in used], folder.tensors, folder.path / MODEL)
    return net.dense(len(used) - 1)


def addition(net: GrowingNetwork, ready: Lesson, growth: float, rank: float = 0) -> Addition:
    """What a task of this growth and rank would add, found by growing and taking it back; a first task on a copy."""
    index = len(net.history)
    before = operations(net.dense(index - 1), net.shape) if index else None
    widths = net.widths()
    trial = net if index else copy.deepcopy(net)
    with seeded("trial"):
        trial.add_task(ready.task.name, len(ready.task.classes), growth, rank if index else 0, quiet=True)
    try:
        numbers = [(dtype.itemsize, torch.Size(shape).numel()) for dtype, shape in expected(trial, index).values()]
        return Addition(
            growth=growth,
            rank=rank,
            features={axis: (widths[axis], width) for axis, width in trial.widths().items()},
            weights=sum(count for _, count in numbers),
            bytes=sum(size * count for size, count in numbers),
            operations=operations(trial.dense(index), net.shape),
            before=before,
        )
    finally:
        if index:
            trial.drop_task()


@torch.no_grad()
def operations(dense: nn.Module, shape: Sequence[int]) -> int:
    """Multiplications and additions for one picture."""
    x = torch.zeros(1, *shape)
    with FlopCounterMode(display=False) as counter:
        dense(x)
    return int(counter.get_total_flops())


def load_weights(net: nn.Module, backbone: Backbone, path: Path) -> str:
    """Fill a plain network from a file of weights; its sha256. Extra tensors, such as a head's, are left out."""
    values = read_weights(path)
    prefix = prefix_of(values, needed(net), path, f"'{backbone.network}'")
    fill_from(net, values, prefix, path, lambda: mismatch.of_ours(backbone, values, prefix))
    return sha256(path.read_bytes())
