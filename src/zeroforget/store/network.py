"""The growing network that a model's files describe: built again, filled with what each task brought, and what the next
would add."""

from __future__ import annotations

import contextlib
import copy
import functools
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zeroforget import nets
from zeroforget.axes.find import Axes, Recipe, find_axes
from zeroforget.data import Preparation
from zeroforget.files.hashes import sha256
from zeroforget.growing.dense import each_dense, fingerprint
from zeroforget.growing.growth import TaskRecord, limits_of
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import libraries, own_code
from zeroforget.nets.registry import MOST_WEIGHTS
from zeroforget.proving.grow import without_head
from zeroforget.store.backbone import Backbone
from zeroforget.store.errors import Damaged, ModelError
from zeroforget.store.folder import MODEL, Chain, Folder
from zeroforget.store.pictures import Lesson
from zeroforget.store.schema import ModelFacts, Preprocessing, TaskFacts
from zeroforget.store.tensors import expected, fill, growing_tensors, parts_of
from zeroforget.store.weights import fill_from, hint_for_ours, needed, prefix_of, read_weights
from zeroforget.training.seeding import seeded

NEVER_MANY = 2**20
"""So many weights are few for any machine."""
MOST_ROOM = 64
"""The whole network has at most so many times the numbers that its tasks have brought: room to grow into."""
Read = Callable[[Path, TaskFacts, str], Mapping[str, Tensor]]
"""Reads one of a task's files of tensors."""
TOLERANCE = 1e-4
"""Elsewhere than where a task was learned, its logits may differ by so much of the largest."""
FEW_WEIGHTS, FEW_VALUES = 2**24, 3 * 256**2
"""A network of so few, and inputs of so few, is run to find its axes: to load what a run without storage needs would
take longer."""


def plain_network(backbone: Backbone, seed: int, most: int = MOST_WEIGHTS) -> nn.Module:
    """The backbone as it comes from its factory, with fresh values. ValueError if there is none like it, or if it has
    more weights than `most`."""
    if backbone.library is not None:
        net = library_network(backbone.network, backbone.options, seed, most)
        return without_head(net, backbone.library.head) if backbone.library.head else net
    if backbone.options.get("width", 1.0) <= 0:
        raise ValueError("a network's width must be above 0")
    return _within_limits(lambda: nets.build(backbone.network, backbone.shape, **backbone.options), seed, most)


def library_network(name: str, options: Mapping[str, Any], seed: int, most: int = MOST_WEIGHTS) -> nn.Module:
    """A classifier of torchvision or timm with fresh values."""
    if name.startswith(f"{own_code.CODE}/"):
        return _within_limits(lambda: own_code.build(name, **options), seed, most)
    libraries.find(name)
    return _within_limits(lambda: libraries.build(name, **options), seed, most)


def _within_limits(build: Callable[[], nn.Module], seed: int, most: int) -> nn.Module:
    """Counted before it is built, where its code can do without storage."""
    size = 0
    with contextlib.suppress(ValueError, RuntimeError), torch.device("meta"):
        size = _weights(build())
    with seeded("backbone", seed):
        made = build() if size <= most else None
    size = _weights(made) if made is not None else size
    if made is None or size > most:
        raise ValueError(f"the network would have {size:,} weights; {most:,} are the most")
    return made


def _weights(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def example(backbone: Backbone) -> Tensor:
    """A batch of its shape, for tracing."""
    return torch.randn(2, *backbone.shape, generator=torch.Generator().manual_seed(0))


def empty_network(facts: ModelFacts, where: Path, most: int = MOST_WEIGHTS) -> GrowingNetwork:
    """The growing network before its first task. Nothing is proved: it was when the model was made."""
    backbone = facts.backbone
    try:
        plain = plain_network(backbone, facts.seed, most)
        axes = _axes(plain, backbone)
        limits = limits_of(plain, axes, backbone.limit, backbone.unit, backbone.align)
        net = GrowingNetwork(plain, axes, backbone.shape, limits, backbone.start, backbone.fn, backbone.bridge)
    except own_code.Untrusted as error:
        raise ModelError(f"{where.parent} cannot be used here: {error}") from error
    except libraries.NoLibrary as error:
        raise ModelError(f"{where.parent} cannot be used here: {error} (it was made with {_made(backbone)})") from error
    except (ValueError, RuntimeError, AttributeError) as error:
        raise Damaged(where, f"its network cannot be built ({error})") from error
    tensors = growing_tensors(net)
    if tensors.keys() != facts.fresh.keys():
        raise Damaged(where, "field 'fresh' does not name the parameters of its network")
    for name, tensor in tensors.items():
        tensor.fresh.copy_(torch.tensor(facts.fresh[name], dtype=torch.float64))
    return net


def _axes(plain: nn.Module, backbone: Backbone) -> Axes:
    library = backbone.library
    if library is None:
        small = _weights(plain) <= FEW_WEIGHTS and prod(backbone.shape) <= FEW_VALUES
        return find_axes(plain, example(backbone), hollowed=not small)
    return Recipe(library.keep, library.care, library.held).find(plain, example(backbone))


def _made(backbone: Backbone) -> str:
    return "" if backbone.library is None else f"{backbone.library.name} {backbone.library.version}"


def _same_library(facts: ModelFacts) -> bool:
    """Whether the network's code is that of the version it was adopted with; our own always is."""
    library = facts.backbone.library
    return library is None or library.name == own_code.CODE or libraries.version(library.name) == library.version


def fresh_values(net: GrowingNetwork) -> dict[str, tuple[float, ...]]:
    """What new values are drawn with, for model.json."""
    return {name: tuple(tensor.fresh.tolist()) for name, tensor in growing_tensors(net).items()}


def assemble(facts: ModelFacts, tasks: Sequence[tuple[TaskFacts, Path]], read: Read, where: Path) -> GrowingNetwork:
    """The network after these tasks, each with the folder of its files, of which one at a time is in memory."""
    try:
        return _assemble(facts, tasks, read, where)
    except Damaged as error:
        if _same_library(facts):
            raise
        own, here = _made(facts.backbone), libraries.version(libraries.library_of(facts.backbone.network))
        raise ModelError(
            f"{where.parent} was made with {own}, and its network of version {here} is another "
            f"({error.found}); pip install {own.replace(' ', '==')}"
        ) from error


def _assemble(facts: ModelFacts, tasks: Sequence[tuple[TaskFacts, Path]], read: Read, where: Path) -> GrowingNetwork:
    net = empty_network(facts, where, _plausible([task for task, _ in tasks]))
    with seeded("assemble"):
        net.replay(_filled_in(net, tasks, read))
    return net.eval()


def _filled_in(net: GrowingNetwork, tasks: Sequence[tuple[TaskFacts, Path]], read: Read) -> Iterator[TaskRecord]:
    """Each task as it was begun; once it has begun, its numbers are put in."""
    parts, numbers = parts_of(net), 0
    for number, (task, path) in enumerate(tasks):
        tensors = read(path, task, "born.safetensors")
        numbers += sum(t.numel() for t in tensors.values())
        _fits(net, task, tensors, numbers, path)
        yield TaskRecord(task.name, len(task.classes), _growth(task), _rank(task))
        try:
            _check_finite(tensors)
            fill(net, number, tensors, parts)
        except ValueError as error:
            raise Damaged(path / "born.safetensors", str(error)) from error


def _plausible(tasks: Sequence[TaskFacts]) -> int:
    """The weights that a network may have whose tasks brought so many bytes: a few do not make it enormous."""
    if not tasks:
        return MOST_WEIGHTS
    return NEVER_MANY + MOST_ROOM * sum(task.files["born.safetensors"].bytes // 2 for task in tasks)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    """ValueError unless all weights are numbers. A buffer, such as a mask, may be infinite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            odd = tensor.isnan() if name.startswith("buffer/") else ~tensor.isfinite()
            if odd.any():
                raise ValueError(f"tensor '{name}' holds NaN or infinite values")


def adds(task: TaskFacts) -> bool:
    """Whether later tasks use what a task brought: features, or a step on older weights."""
    return bool(task.growth or task.rank or any(task.born.values()))


def _growth(task: TaskFacts) -> float | dict[str, float]:
    return task.growth if isinstance(task.growth, (int, float)) else dict(task.growth)


def _rank(task: TaskFacts) -> float | dict[str, float]:
    return task.rank if isinstance(task.rank, (int, float)) else dict(task.rank)


def _fits(net: GrowingNetwork, task: TaskFacts, tensors: Mapping[str, Tensor], numbers: int, path: Path) -> None:
    """Before room is made for a task: its births must follow from its growth, and its file must have the numbers."""
    where, before = path / "task.json", {axis: len(births) for axis, births in net.births.items()}
    wanted = {axis: width + task.born.get(axis, 0) for axis, width in before.items()}
    widths, steps, small = before, 0, bool(net.history) and not adds(task)
    try:
        if not small:
            _, widths = net.plan(task.name, len(task.classes), _growth(task), _rank(task))
            steps = net.rank_numbers(_rank(task)) if net.history else 0
        if widths != wanted and net.limits.spans:
            # A model that began when heads and groups were aligned by their number: it goes on like that.
            net.limits = replace(net.limits, spans=None)
            _, widths = net.plan(task.name, len(task.classes), _growth(task))
    except ValueError as error:
        raise Damaged(where, f"its growth or its rank does not fit the network ({error})") from error
    if widths != wanted or task.born.keys() != before.keys():
        raise Damaged(where, "field 'born' does not follow from its growth")
    head = tensors.get("head/weight")
    room = not small and net.limits.count(widths) + steps > numbers
    if head is None or head.dim() != 2 or len(head) != len(task.classes) or room:
        raise Damaged(path / "born.safetensors", "it does not hold the tensors of the network")


def preparation(preprocessing: Preprocessing) -> Preparation:
    """How bytes become the network's input; values are it."""
    return Preparation(mean=preprocessing.mean, std=preprocessing.std)


# The probe -----------------------------------------------------------------------------------------------------


def environment(backbone: Backbone) -> dict[str, str]:
    """All that bits depend on beside the folder. Probes run on one thread of the CPU, so threads are no part of it."""
    library = backbone.library
    known = library is not None and library.name != own_code.CODE
    return ({} if library is None or not known else {library.name: libraries.version(library.name)}) | {
        "torch": torch.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
    }


@functools.cache
def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    return (found.group(1) if found else platform.processor() or "unknown")[:200]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def probe_logits(dense: nn.Module, images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """A task's logits for its probe, always computed the same way."""
    with _one_thread():
        out: Tensor = dense(preparation(preprocessing).test(images))
    return out.contiguous()


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
    fill_from(net, values, prefix, path, lambda: hint_for_ours(backbone, values, prefix))
    return sha256(path.read_bytes())
