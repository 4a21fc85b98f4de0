"""A network that grows a task at a time and cannot forget."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.find import Axes
from zeroforget.axes.inputs import one_input
from zeroforget.axes.plain_modules import hollow, layout_of, list_weights
from zeroforget.files.imports import MethodFrom
from zeroforget.growing import user_buffers
from zeroforget.growing.convert import live
from zeroforget.growing.dense import CutFrom, fingerprint
from zeroforget.growing.growth import Growth, GrowthLimits, TaskRecord, as_classes, as_growth
from zeroforget.growing.layers import GrowingLayer, GrowingNorm, refresh, tie
from zeroforget.growing.per_task import PerTask, new_head
from zeroforget.growing.rank_births import Rank, as_rank, input_samples, leading, ranks_of
from zeroforget.growing.tensors import GrowingTensor
from zeroforget.growing.training_checks import Begun, Wrapper, check_wrapped, fresh, frozen_buffers, warn_if_untouched
from zeroforget.growing.transaction import all_or_nothing

_CACHED = 4  # dense networks kept for `forward`, the latest made


class GrowingNetwork(CutFrom):
    """A feature extractor with a head for each task. Make one with `zeroforget.grow`.

    Its parameters are exactly what the newest task trains: `torch.optim.SGD(net.parameters(), ...)` cannot reach
    anything older. Tasks are known by name or by number, counted from 0.

    Example:
        >>> import torch, zeroforget
        >>> body = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU())
        >>> net = zeroforget.grow(body, torch.randn(4, 8), start=0.5)
        >>> net.add_task("birds", classes=["robin", "wren"])
        >>> net.add_task("flowers", classes=3, growth=0.25)
        >>> print(net)
        GrowingNetwork from Sequential: 2 tasks
        task             classes  features  new
        birds    2 (robin, wren)        32  +32
        flowers                3        48  +16
        >>> len(list(net.newborn())) > 0  # what the newest task trains
        True
    """

    fit = MethodFrom("zeroforget.training.fit_network", "fit")
    save = MethodFrom("zeroforget.store.saving", "save")

    _wrapper: Wrapper | None = None

    def __init__(
        self,
        net: nn.Module,
        axes: Axes,
        shape: tuple[int, ...],
        limits: GrowthLimits,
        start: float,
        fn: str,
        bridge: str,
        rank: Rank = 0,
        inside: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.axes = axes
        self.shape = shape
        self.limits = limits
        self.start = start
        self.fn = fn
        self.bridge = bridge
        self.rank = as_rank(rank)
        self.history: list[TaskRecord] = []
        self._births: dict[str, Tensor] = {axis: torch.zeros(0, dtype=torch.int64) for axis in axes.sizes}
        self._numbers_of: dict[str, int] = {}
        self._shares: list[dict[str, float]] = []
        self._cache: OrderedDict[int, nn.Module] = OrderedDict()
        # Other threads may ask for earlier tasks at any time; while the network changes its form they wait.
        self.lock = threading.RLock()
        self.heads = PerTask()
        self._begun: Begun | None = None  # of the newest head
        body, self.loose, self._homes = live(net, axes, fn, self.heads, inside)
        self.extras = PerTask()
        # Never a submodule: only the shape of the plain network, without storage, to build dense ones from.
        self._skeleton = (hollow(net, constants=True),)
        self._channels_last = layout_of(net) == torch.channels_last
        self.body = body
        self.inside = tuple(inside)
        self._listing = tuple(module for module in body.modules() if isinstance(module, nn.RNNBase))
        self._filled = user_buffers.numbers_in(self.body, axes.tensors)
        self.register_load_state_dict_post_hook(_forget_cache)  # type: ignore[no-untyped-call]

    # Learning --------------------------------------------------------------------------------------------------

    def plan(
        self, name: str, classes: int | Sequence[str], growth: Growth = None, rank: Rank | None = None
    ) -> tuple[dict[str, float], dict[str, int]]:
        """The shares and widths that `add_task` with these arguments would lead to; every mistake is found here."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"a task needs a name, not {name!r}")
        if name in self._numbers_of:
            raise ValueError(f"there is a task '{name}' already; choose another name")
        as_classes(classes)
        self._wanted_rank(rank)
        widths = {axis: len(births) for axis, births in self._births.items()}
        wanted = self._wanted(growth)
        if isinstance(wanted, Mapping):
            return self.limits.plan_axes(self.shares, widths, wanted)
        return self.limits.plan(self.shares, widths, wanted)

    def added_bytes(self, growth: float, rank: Rank = 0) -> int:
        """What the next task would add, without its head and the normalization of older features: weights in their own
        type, numbers of rank births in two bytes."""
        _, widths = self.plan(" ", 2, growth)
        values = {name: tensor.value for name, tensor in self.leaning().items()}
        each = next((value.element_size() for value in values.values()), 4)
        weights = round(self.limits.count(widths) - self.limits.count(self.widths()))
        return each * weights + 2 * self.rank_numbers(rank)

    def _wanted(self, growth: Growth) -> float | Mapping[str, float]:
        wanted: float | Mapping[str, float] = as_growth(growth)
        return wanted if growth is not None else 0.0 if self.history else self.start

    @torch.inference_mode(False)  # what is made in inference mode could never learn
    @all_or_nothing
    def add_task(
        self,
        name: str,
        classes: int | Sequence[str],
        growth: Growth = None,
        rank: Rank | None = None,
        *,
        images: Tensor | None = None,
        quiet: bool = False,
    ) -> None:
        """Begin a task of so many classes, or of these names; from now on the network trains what is born with it.

        The first task begins with the network's `start`; later ones add `growth`, a share of the full width of every
        axis, or for the axes named a number of features (a share if it is a float). 0 (the default) adds none: the
        task then learns its head and its normalization. If a growth above 0 is too small to add any, a warning says so,
        unless this is to be `quiet`.

        A `rank` lets what is old lean towards the task: each weight gets a step of this rank, which older tasks never
        see (`grow` sets the default). It is a number, a share of the full rank, or one of these for each weight named
        (`leaning()` lists them). Given some `images` of the task, a few hundred inputs as the network takes them, steps
        begin in the directions in which each layer's inputs are largest, else in random ones.
        """
        self._withdraw()
        shares, widths = self.plan(name, classes, growth, rank)
        count, names = as_classes(classes)
        record = TaskRecord(name, count, self._wanted(growth), self._wanted_rank(rank), names)
        warn_if_untouched(self.heads, self._begun, self.tasks)
        if not quiet:
            self.limits.warn_if_idle(record.growth, self.widths(), widths)
        self._begin(record, shares, widths)
        if record.rank:
            self._lean(record.rank, images)
        self._begun = fresh(self.heads)

    @torch.inference_mode(False)
    @all_or_nothing
    def replay(self, records: Iterable[TaskRecord]) -> None:
        """Begin tasks as they were begun, without numbers of their own: these are put in afterwards."""
        for record in records:
            shares, widths = self.plan(record.name, record.classes, record.growth, record.rank)
            self._begin(record, shares, widths, draw=False)
            if record.rank:
                for tensor in self.tensors():
                    tensor.advance(len(self.history) - 1)
                self._lean(record.rank, None, draw=False)
        for tensor in self.tensors():
            tensor.advance(len(self.history) - 1)
        if self.history:
            self._begun = fresh(self.heads)

    def _begin(
        self, record: TaskRecord, shares: dict[str, float], widths: dict[str, int], *, draw: bool = True
    ) -> None:
        """The structure of a task. Without draws, what does not grow stays behind: `advance` is for the end."""
        task, self._wrapper = len(self.history), None
        wider = not task or any(width > len(self._births[axis]) for axis, width in widths.items())
        for axis, width in widths.items() if wider else ():
            old = self._births[axis]
            self._births[axis] = torch.cat([old, torch.full((width - len(old),), task, dtype=torch.int64)])
        bridge = None if not draw else 1.0 if self.bridge == "random" else 0.0
        for tensor in self.tensors() if wider or draw else ():
            tensor.grow(self._births, task, bridge=bridge) if task else tensor.begin(self._births)
        if self.history:
            self.extras.append(user_buffers.kept(self.body))
        for path, module in self.body.named_modules():
            if isinstance(module, GrowingLayer):
                module.add_task(self._births, task)
            elif isinstance(module, GrowingNorm):
                parts = module.template.named_modules()
                module.add_task(
                    self._births, task, {n: self._numbers(user_buffers.joined(path, n), m, widths) for n, m in parts}
                )
        tie(self._norms())
        if wider:
            self._resize(task, self._filled)
        self.history.append(record)
        self._numbers_of[record.name] = task
        self._shares.append(shares)
        self.heads.append(self._new_head(record.classes))

    def _wanted_rank(self, rank: Rank | None) -> Any:
        """The rank of the next task, in Python's own numbers; every mistake is found here."""
        if not self.history:
            if rank:
                raise ValueError(
                    "the first task has nothing older to lean on: leave out rank; later tasks may have one"
                )
            return 0
        wanted = as_rank(self.rank if rank is None else rank)
        ranks_of(wanted, dict.fromkeys(self.leaning(), 1))
        return wanted

    def _lean(self, rank: Any, images: Tensor | None, *, draw: bool = True) -> None:
        """Give the newest task rank births, aimed at what its images have most of."""
        weights = self.leaning()
        ranks = ranks_of(rank, {name: min(weight.old_block()) for name, weight in weights.items()})
        for name, wanted in ranks.items():
            if wanted:
                weights[name].lean(wanted, draw=draw)
        if images is not None:
            with torch.no_grad():
                samples = input_samples(self.cut(len(self.history) - 1), images)
                for name, birth in self._rank_births(len(self.history) - 1).items():
                    if name in samples:
                        inputs = weights[name].old_inputs(samples[name])
                        birth.down.copy_(leading(inputs.to(birth.down.dtype), birth.rank))

    @torch.inference_mode(False)
    @all_or_nothing
    def drop_task(self) -> None:
        """Take back the newest task: the network is as it was before its `add_task`, bit for bit."""
        if not self.history:
            raise ValueError("there is no task to drop")
        if len(self.history) == 1:
            raise ValueError("the first task cannot be dropped: it is what the network is made of; grow a new one")
        task = len(self.history) - 1
        self.heads.drop()
        self._begun = self._wrapper = None
        for module in self.body.modules():
            if isinstance(module, (GrowingLayer, GrowingNorm)):
                module.drop_task()
        tie(self._norms())
        for tensor in self.tensors():
            tensor.shrink()
        self._births = {axis: births[births < task] for axis, births in self._births.items()}
        self._resize(task - 1, self._filled)
        user_buffers.put_back(self.body, self.extras[-1])
        self.extras.drop()
        del self._numbers_of[self.history.pop().name]
        self._shares.pop()
        self.forget_dense()

    def newborn(self, task: str | int | None = None) -> Iterator[nn.Parameter]:
        """All that the newest task trains, and nothing else.

        Equation 5 would also let an earlier task train its own weights again; this refuses, because later tasks read
        those weights and would change with them.
        """
        if not self.history:
            raise ValueError("there is no task yet; call add_task first")
        if task is not None and (number := self.number(task)) < len(self.history) - 1:
            later = ", ".join(f"'{n}'" for n in self.tasks[number + 1 :])
            raise ValueError(
                f"task '{self.tasks[number]}' is finished: its features are read by {later}, which would change if it "
                "were trained again. Add a new task for the new data, or drop the later ones first"
            )
        yield from self.parameters()

    def train(self, mode: bool = True) -> GrowingNetwork:
        """Training mode or not, as for any module."""
        self._withdraw()
        super().train(mode)
        if mode:
            refresh(module for module in self.body.modules() if isinstance(module, GrowingLayer))
        return self

    def moving(self) -> dict[str, Tensor]:
        """Every tensor that learning the newest task changes: what is newborn, and that task's statistics."""
        moving = {name: p.detach() for name, p in self.named_parameters()}
        for path, module in self.body.named_modules():
            if isinstance(module, GrowingNorm):
                moving |= {f"body.{path}.{name}": buffer for name, buffer in module.tasks[-1].named_buffers()}
        return moving | dict(self.user_buffers())

    # Use -------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, task: str | int | None = None, **named: Any) -> Tensor:
        """A task's logits: `net(x, task)`, or `net(**batch, task=task)` of a network that takes several inputs.

        In training mode the newest task runs with gradients for its newborn parts. Everything else goes through
        `dense(task)`, so it is bit-equal to it; earlier tasks always do. Those are kept for the next call. The newest
        task's is made anew each time, since its weights may have changed: to ask it often, call `dense` once.
        """
        if task is None:
            last = inputs[-1] if inputs and len(inputs) + len(named) > 1 else None
            if last is None or (self.takes_several and isinstance(last, (Tensor, Mapping, tuple, list))):
                known = ", ".join(map(repr, self.tasks)) or "none yet; call add_task first"
                raise ValueError(f"name the task: net(x, task), or net(x, task='name'); the tasks are {known}")
            *inputs, task = inputs  # type: ignore[assignment]
        number = self.number(task)
        x = one_input(self._skeleton[0], inputs, named)
        newest = number == len(self.history) - 1
        try:
            if newest and self.training:
                out = self.newest_logits(x)
            elif newest:
                out = self.dense(number)(x)
            else:
                out = self._cached(number)(x)
        except torch.OutOfMemoryError:
            raise
        except StopIteration as error:
            raise ValueError(f"the network does not run with nothing newborn: {user_buffers.ASKS}") from error
        except (RuntimeError, ValueError, IndexError) as error:
            if tuple(x.shape[1:]) == self.shape:
                raise
            expected, why = ", ".join(map(str, ("batch", *self.shape))), str(error).partition("\n")[0]
            raise ValueError(
                f"input of shape {tuple(x.shape)} does not fit; the network takes ({expected}): {why}"
            ) from error
        return out

    def newest_logits(self, x: Any) -> Tensor:
        """The newest task's logits, with gradients to what is newborn."""
        self._wrapper = check_wrapped(self, self._wrapper)
        self._inject()
        features = self.body(x)
        if not isinstance(features, Tensor):
            returned = type(features).__name__
            raise ValueError(f"in training mode the network returns {returned}; let it return its features alone")
        out: Tensor = features if self.inside else self.heads[-1](features)
        return out

    @torch.no_grad()
    def dense(self, task: str | int) -> nn.Module:
        """A task's own network: plain layers of its widths, normalization folded in, frozen, in eval mode.

        It shares nothing with this one. What it answers today it answers for ever.
        """
        with self.lock:
            number = self.number(task)
            if number == len(self.history) - 1:
                warn_if_untouched(self.heads, self._begun, self.tasks)
                user_buffers.warn_if_moved(self.body, self._skeleton[0])
            return self.cut(number)

    def fingerprint(self, task: str | int) -> str:
        """A short name for every bit of the state dict of `dense(task)`: written down when a task is learned, it tells
        later whether anything has changed there."""
        return fingerprint(self.dense(task))

    # Inside ----------------------------------------------------------------------------------------------------

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Said to DistributedDataParallel: `check_wrapped` finds them the same in every process."""
        return [name for name, _ in frozen_buffers(self)]

    def forget_dense(self) -> None:
        """Cut earlier tasks' networks anew when they are next asked: what they are cut from has changed."""
        self._cache.clear()

    def tensors(self) -> Iterator[GrowingTensor]:
        """Every parameter that grows."""
        for module in self.modules():
            if isinstance(module, GrowingTensor):
                yield module

    def _inject(self) -> None:
        """Give modules of the user's own their loose parameters, whole, with gradients to the newborn parts. They stay
        until the next step or copy: a backward that computes activations again needs them."""
        for key, (path, name) in self._homes.items():
            tensor = self.loose[key]
            assert isinstance(tensor, GrowingTensor)
            self.body.get_submodule(path).__dict__[name] = tensor.whole()
        for module in self._listing:
            list_weights(module)

    def _withdraw(self) -> None:
        for path, name in self._homes.values():
            self.body.get_submodule(path).__dict__.pop(name, None)

    def user_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of the user's own modules, by the names that they have in `extras`."""
        return ((user_buffers.key(name), buffer) for name, buffer in user_buffers.buffers(self.body))

    def _new_head(self, classes: int) -> nn.Module:
        held = [*(tensor.value for tensor in self.tensors()), *self.body.parameters(), torch.empty(0)]
        like = held[0] if self.axes.ends_in is None else held[0].to(self.axes.ends_in)
        return new_head(self.body, self.axes.output, self._births, classes, like)

    def _cached(self, number: int) -> nn.Module:
        if (kept := self._cache.get(number)) is not None:  # without the lock: compiled code cannot follow one
            return kept
        with self.lock, torch.inference_mode(False):  # else it would be of use in inference mode alone
            if number not in self._cache:  # another thread may have made it meanwhile
                self._cache[number] = self.dense(number)
            dense = self._cache[number]
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
            return dense

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module; the tasks must be those of the network that it was saved from."""
        heads = {name.split(".")[1] for name in state_dict if name.startswith("heads.")}
        if strict and len(heads) != len(self.history):
            raise ValueError(
                f"the state dict holds {len(heads)} tasks and this network has {len(self.history)}: first add the "
                "tasks as they were added where it was saved (`history` there tells how)"
            )
        with self.lock:
            return super().load_state_dict(state_dict, strict, assign)

    def _apply(self, fn: Any, recurse: bool = True) -> GrowingNetwork:
        with self.lock:
            self.forget_dense()
            self._withdraw()
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        self._withdraw()
        user_buffers.let_go(self.body)
        held = {name: value for name, value in vars(self).items() if name not in {"lock", "_wrapper"}}
        return held | {"_cache": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.lock = threading.RLock()
        self._numbers_of = {record.name: number for number, record in enumerate(self.history)}
        for module in [self, *self.body.modules()]:  # what was pickled before had lists of modules here
            for name, part in list(module._modules.items()):
                ours = module is self or isinstance(module, (GrowingLayer, GrowingNorm))
                if ours and isinstance(part, nn.ModuleList):
                    module._modules[name] = PerTask(part)


def _forget_cache(module: nn.Module, _keys: Any) -> None:
    assert isinstance(module, GrowingNetwork)
    module.forget_dense()
