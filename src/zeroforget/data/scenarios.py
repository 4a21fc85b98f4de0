"""Scenarios: which data sets they come from and how their classes become tasks, by name or by a written plan."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zeroforget.data.loading import Root, find, load, source
from zeroforget.data.readers.folders import stands_alone
from zeroforget.data.sources import SOURCES
from zeroforget.data.stream import local
from zeroforget.data.values import Collection, OnRead, Scenario, Split, Task

VALIDATION_SHARE = 0.1
Rows = npt.NDArray[np.int64]


def equal_sizes(classes: int, tasks: int) -> tuple[int, ...]:
    """As equal as possible, the larger ones first: 102 classes in 4 tasks are 26, 26, 25, 25."""
    if tasks < 1 or classes < 2 * tasks:
        raise ValueError(f"cannot cut {classes} classes into {tasks} tasks: each task needs at least 2 classes")
    share, rest = divmod(classes, tasks)
    return tuple(share + (task < rest) for task in range(tasks))


def grouped(classes: int, sizes: Sequence[int], seed: int | None) -> list[list[int]]:
    """Classes 0..n-1 in groups of these sizes: shuffled by the seed, or in their own order where it is None."""
    if sum(sizes) != classes or min(sizes, default=0) < 1:
        raise ValueError(f"tasks of {list(sizes)} classes make {sum(sizes)}, but there are {classes} classes")
    order = np.arange(classes) if seed is None else np.random.RandomState([seed, 0]).permutation(classes)
    ends = np.cumsum(sizes)
    return [order[end - size : end].tolist() for size, end in zip(sizes, ends, strict=True)]


def named_groups(collection: Collection, groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """A written list of classes, by name or by code, as numbers. A class may be in one group only, and may be left
    out."""
    number = {name: index for index, name in enumerate(collection.codes)}
    number |= {name: index for index, name in enumerate(collection.classes)}
    seen: set[int] = set()
    for name in (name for group in groups for name in group):
        if name not in number:
            raise ValueError(f"data set '{collection.name}' has no class '{name}'; it has {_shown(collection.classes)}")
        if number[name] in seen:
            raise ValueError(f"class '{name}' is in two tasks; a class belongs to one task only")
        seen.add(number[name])
    return [[number[name] for name in group] for group in groups]


def _shown(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def cut(collection: Collection, groups: Sequence[Sequence[int]], names: Sequence[str], seed: int) -> tuple[Task, ...]:
    """One task for each group of classes; its labels are positions in the group. All share the collection's images."""
    members = _members(collection)
    return tuple(_task(collection, members, group, name, seed) for group, name in zip(groups, names, strict=True))


def _members(collection: Collection) -> list[Rows]:
    """The images of each class, in order; found at once, since there may be as many classes as a search takes long."""
    labels = collection.labels.numpy()
    order = np.argsort(labels, kind="stable")
    ends = np.searchsorted(labels, np.arange(len(collection.classes) + 1), sorter=order)
    return [order[start:end] for start, end in itertools.pairwise(ends)]


def _task(collection: Collection, members: list[Rows], group: Sequence[int], name: str, seed: int) -> Task:
    parts = [_parts(collection, members[label], label, seed) for label in group]
    train, val, test = (_split(collection, part) for part in zip(*parts, strict=True))
    classes = tuple(collection.classes[label] for label in group)
    return Task(name, classes, train, val, test, collection.prepare)


def _parts(collection: Collection, members: Rows, label: int, seed: int) -> tuple[Rows, Rows, Rows]:
    """Training, validation and test images of one class. Those for validation are drawn where the data name none."""
    test = collection.test.numpy()[members]
    val = np.zeros_like(test) if collection.val is None else collection.val.numpy()[members]
    train, final = members[~test & ~val], members[test]
    if not len(train) or not len(final):
        raise ValueError(
            f"data set '{collection.name}': class '{collection.classes[label]}' has {len(train)} training and "
            f"{len(final)} test images; each class needs some of both"
        )
    return (train, members[val], final) if val.any() else (*hold_out(train, label, seed), final)


def hold_out(members: Rows, label: int, seed: int) -> tuple[Rows, Rows]:
    """Training and validation images of one class. The draw depends on the seed and the class alone, so that every
    scenario of one seed keeps the same images apart. A class of two images or more gives at least one."""
    count = max(round(len(members) * VALIDATION_SHARE), 1 if len(members) > 1 else 0)
    held = np.zeros(len(members), dtype=bool)
    held[np.random.RandomState([seed, 1, label]).permutation(len(members))[:count]] = True
    return members[~held], members[held]


def _split(collection: Collection, parts: Sequence[Rows]) -> Split:
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Split(collection.images, torch.from_numpy(labels), torch.from_numpy(np.concatenate(parts)))


OWN = ("folder:", "shards:")
"""How the names of people's own data begin."""


@dataclass(frozen=True)
class Plan:
    """How data become tasks.

    `data`: one data set to cut into tasks, or several that are a task each. For one: `tasks` of equal size, or tasks
    of the `sizes` given, or the `groups` of classes written out. Without any, the whole is one task. Classes are
    shuffled by the seed unless `shuffle` is off. `names` are the tasks' names. `size`: pixels, for `folder:` data.

    `flip`, `pad`, `zoom`, `erase` and `alter` change how training images are varied (see `Preparation`), where the data
    set's own way is not wanted.
    """

    name: str
    data: tuple[str, ...]
    tasks: int | None = None
    sizes: tuple[int, ...] | None = None
    groups: tuple[tuple[str, ...], ...] | None = None
    names: tuple[str, ...] | None = None
    shuffle: bool = True
    size: int = 224
    flip: bool | None = None
    pad: int | None = None
    zoom: float | None = None
    erase: int | None = None
    alter: float | None = None

    def __post_init__(self) -> None:
        ways = [way for way in ("tasks", "sizes", "groups") if getattr(self, way) is not None]
        if not self.data:
            raise ValueError(f"scenario '{self.name}' names no data set")
        for name in self.data:
            if not name.startswith(OWN):
                source(name)
            elif name in OWN:
                raise ValueError(f"scenario '{self.name}': '{name}' names no folder; say {name}PATH")
        if len(ways) > 1:
            raise ValueError(f"scenario '{self.name}' says both '{ways[0]}' and '{ways[1]}'; one is enough")
        if ways and len(self.data) > 1:
            raise ValueError(
                f"scenario '{self.name}': '{ways[0]}' cuts one data set, but {len(self.data)} are named; "
                "in a chain of data sets each is one task"
            )
        self._check_kinds()

    def _check_kinds(self) -> None:
        """A plan may come from a file, where anything can be written."""
        for key, wanted, right in (
            ("tasks", "a number of 1 or more", self.tasks is None or _counts(self.tasks)),
            ("sizes", "numbers of 2 or more", self.sizes is None or _some(self.sizes, _several)),
            ("groups", "lists of 2 class names or more", self.groups is None or _some(self.groups, _classes)),
            ("names", "a list of different names", self.names is None or _names(self.names)),
            ("shuffle", "true or false", isinstance(self.shuffle, bool)),
            ("size", "a number of pixels", _counts(self.size)),
            ("flip", "true or false", isinstance(self.flip, bool | None)),
            ("pad", "a number of pixels", self.pad is None or self.pad == 0 or _counts(self.pad)),
            ("erase", "a number of pixels", self.erase is None or self.erase == 0 or _counts(self.erase)),
            ("zoom", "a share of the area above 0, up to 1", self.zoom is None or _share(self.zoom)),
            ("alter", "a strength from 0 to 1", self.alter is None or self.alter == 0 or _share(self.alter)),
        ):
            if not right:
                raise ValueError(f"scenario '{self.name}': '{key}' is {getattr(self, key)!r}; it should be {wanted}")


def _all(values: object, right: Callable[[object], bool]) -> bool:
    return isinstance(values, tuple) and all(map(right, values))


def _some(values: object, right: Callable[[object], bool]) -> bool:
    return bool(values) and _all(values, right)


def _several(value: object) -> bool:
    return _counts(value) and value != 1


def _classes(values: object) -> bool:
    return isinstance(values, tuple) and len(values) > 1 and _texts(values)


def _names(values: object) -> bool:
    return isinstance(values, tuple) and _texts(values) and len(set(values)) == len(values)


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _texts(values: object) -> bool:
    return _all(values, lambda value: isinstance(value, str))


@cache
def semantic_groups() -> dict[str, tuple[str, ...]]:
    """The ten groups of Tiny ImageNet's classes in the paper's appendix: name of the group to its class codes."""
    groups: dict[str, list[str]] = {}
    for line in (files("zeroforget.data") / "tiny_semantic.tsv").read_text(encoding="utf-8").splitlines():
        code, group, _ = line.split("\t")
        groups.setdefault(group, []).append(code)
    return {name: tuple(codes) for name, codes in groups.items()}


@cache
def superclasses() -> dict[str, tuple[str, ...]]:
    """CIFAR-100's twenty superclasses of five classes each, as its makers' coarse labels give them."""
    groups: dict[str, list[str]] = {}
    table = (files("zeroforget.data") / "cifar100_superclasses.tsv").read_text(encoding="utf-8")
    for line in table.splitlines():
        fine, coarse = line.split("\t")
        groups.setdefault(coarse, []).append(fine)
    return {name: tuple(classes) for name, classes in groups.items()}


MULTI = ("flowers", "scenes", "birds", "cars", "aircraft", "actions")


@cache
def named_plans() -> dict[str, Plan]:
    """The scenarios of the paper, and smaller ones to try things with."""
    semantic, coarse = semantic_groups(), superclasses()
    plans = (
        Plan("digits/5", ("digits",), tasks=5, shuffle=False),
        Plan("fashion-mnist/5", ("fashion-mnist",), tasks=5, shuffle=False),
        Plan("cifar100/10", ("cifar100",), tasks=10),
        Plan("cifar100/20", ("cifar100",), tasks=20),
        Plan("cifar100/superclasses", ("cifar100",), groups=tuple(coarse.values()), names=tuple(coarse)),
        Plan("tiny-imagenet/random", ("tiny-imagenet",), tasks=10),
        Plan("tiny-imagenet/semantic", ("tiny-imagenet",), groups=tuple(semantic.values()), names=tuple(semantic)),
        Plan("tiny-imagenet/large-first", ("tiny-imagenet",), sizes=(110, *(10,) * 9)),
        Plan("tiny-imagenet/40", ("tiny-imagenet",), tasks=40),
        Plan("flowers/4", ("flowers",), tasks=4),
        Plan("birds/4", ("birds",), tasks=4),
        Plan("actions/4", ("actions",), tasks=4),
        Plan("imagenet/10", ("imagenet",), tasks=10),
        Plan("multi", MULTI),
    )
    return {plan.name: plan for plan in plans}


def plan(wanted: str | Mapping[str, Any] | Plan) -> Plan:
    """A plan out of a scenario's name, of `DATA/N` (a data set in N tasks), or of the keys of a plan.

    `folder:PATH/N` is the folder PATH/N in one task where that is there and holds class folders.
    """
    if isinstance(wanted, Plan):
        return wanted
    if isinstance(wanted, Mapping):
        return _from_mapping(wanted)
    known = named_plans()
    if wanted in known:
        return known[wanted]
    name, _, count = wanted.rpartition("/")
    if count.isdecimal() and (name in SOURCES or _cuts_folder(name, count) or _cuts_shards(name, count)):
        return Plan(wanted, (name,), tasks=int(count))
    if wanted in SOURCES or wanted.startswith(OWN):
        return Plan(wanted, (wanted,))
    near = difflib.get_close_matches(wanted, [*known, *SOURCES], 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ValueError(f"no scenario '{wanted}'{hint} (`zeroforget scenarios` lists all)")


def _cuts_folder(name: str, count: str) -> bool:
    """Whether `folder:PATH/N` means PATH in N tasks; ValueError if it may as well be the folder PATH/N."""
    if not name.startswith("folder:") or name == "folder:":
        return False
    whole = Path(name.removeprefix("folder:")).expanduser()
    alone = stands_alone(whole, count)
    if alone is None:
        raise ValueError(
            f"scenario '{name}/{count}' is the folder {whole / count}, or {whole} in {count} tasks; say "
            f'{{ data = "{name}/{count}" }} for the one, {{ data = "{name}", tasks = {count} }} for the other'
        )
    return not alone


def _cuts_shards(name: str, count: str) -> bool:
    """Whether `shards:DIR/N` means DIR in N tasks, not the shards in a folder DIR/N."""
    if not name.startswith("shards:") or name == "shards:":
        return False
    inner = local(f"{name.removeprefix('shards:')}/{count}")
    return inner is None or not inner.is_dir()


def _from_mapping(wanted: Mapping[str, Any]) -> Plan:
    fields = [field.name for field in dataclasses.fields(Plan)]
    for key in wanted:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            raise ValueError(
                f"a scenario has no '{key}'; " + (f"did you mean '{near[0]}'?" if near else f"it has {fields}")
            )
    known = named_plans()
    if "data" not in wanted and wanted.get("name") in known:
        return dataclasses.replace(known[wanted["name"]], **{key: _frozen(value) for key, value in wanted.items()})
    if "data" not in wanted:
        raise ValueError("a scenario needs 'data': the name of a data set, or a list of names")
    data = wanted["data"]
    names = (data,) if isinstance(data, str) else _frozen(data)
    if not _texts(names):
        raise ValueError(f"a scenario's 'data' is {data!r}; it should be the name of a data set, or a list of names")
    settled = {key: _frozen(value) for key, value in wanted.items()}
    return Plan(**{"name": "+".join(names), **settled, "data": names})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def missing(wanted: str | Mapping[str, Any] | Plan, root: Root = None) -> list[str]:
    """The data sets of a scenario that are not on this disk: none, and it is ready."""
    names = [name for name in plan(wanted).data if not name.startswith(OWN)]
    return [name for name in names if find(source(name), root) is None]


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that numpy's generator does not take."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"a scenario's seed is 0 or more, and below 4,294,967,296; got {seed}")


def scenario(
    wanted: str | Mapping[str, Any] | Plan,
    seed: int = 0,
    root: Root = None,
    progress: OnRead | None = None,
    *,
    order: int | None = None,
    split: int | None = None,
) -> Scenario:
    """The tasks of a scenario. The seed decides which classes go together (where they are shuffled) and which training
    images are kept for validation. `order` is a seed of its own for the former, which also shuffles written groups;
    `split` is one for the latter. `root` is the folder with the data sets (else ZEROFORGET_DATA, else the user's
    cache folder); `progress` hears how far decoding is.

    Example:
        >>> import zeroforget
        >>> digits = zeroforget.scenario("digits/5", seed=0)
        >>> [len(task.classes) for task in digits.tasks]
        [2, 2, 2, 2, 2]
    """
    order_seed, split_seed = (seed if own is None else own for own in (order, split))
    for each in (seed, order_seed, split_seed):
        check_seed(each)
    settled = plan(wanted)
    collections = [load(name, root, progress, settled.size) for name in settled.data]
    first = collections[0].shape
    for collection in collections:
        if collection.shape != first:
            raise ValueError(
                f"scenario '{settled.name}': images of '{collection.name}' are {_by(collection.shape)}, those of "
                f"'{collections[0].name}' {_by(first)}; all tasks of a scenario need one shape"
            )
    collections = [_varied(collection, settled) for collection in collections]
    if len(collections) > 1:
        tasks = _chain(collections, settled, split_seed)
    else:
        if order is not None and settled.groups is not None:
            settled = _reordered(settled, order)
        tasks = _pieces(collections[0], settled, order_seed, split_seed)
    return Scenario(settled.name, first, tasks)


def _varied(collection: Collection, settled: Plan) -> Collection:
    """The collection with the plan's own ways to vary images."""
    keys = ("flip", "pad", "zoom", "erase", "alter")
    changes = {key: value for key in keys if (value := getattr(settled, key)) is not None}
    if not changes:
        return collection
    return dataclasses.replace(collection, prepare=dataclasses.replace(collection.prepare, **changes))


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _chain(collections: Sequence[Collection], settled: Plan, seed: int) -> tuple[Task, ...]:
    names = settled.names or [collection.name for collection in collections]
    _same_length(settled, names, len(collections))
    return tuple(whole_task(each, seed, name) for each, name in zip(collections, names, strict=True))


def whole_task(collection: Collection, seed: int = 0, name: str | None = None) -> Task:
    """A data set as one task."""
    return cut(collection, [range(len(collection.classes))], [name or collection.name], seed)[0]


def _reordered(settled: Plan, order: int) -> Plan:
    """Written groups in another order. Tasks are then called by their place, so that orders can share a table."""
    groups = settled.groups or ()
    (places,) = grouped(len(groups), [len(groups)], order)
    return dataclasses.replace(settled, groups=tuple(groups[place] for place in places), names=None)


def _pieces(collection: Collection, settled: Plan, order: int, split: int) -> tuple[Task, ...]:
    count = len(collection.classes)
    if settled.groups is not None:
        groups = named_groups(collection, settled.groups)
    else:
        sizes = settled.sizes or equal_sizes(count, settled.tasks or 1)
        groups = grouped(count, sizes, order if settled.shuffle and len(sizes) > 1 else None)
    names = settled.names or [f"{collection.name}-{place}" for place in range(1, len(groups) + 1)]
    _same_length(settled, names, len(groups))
    return cut(collection, groups, names, split)


def _same_length(settled: Plan, names: Sequence[str], tasks: int) -> None:
    if len(names) != tasks:
        raise ValueError(f"scenario '{settled.name}' names {len(names)} tasks but has {tasks}")
