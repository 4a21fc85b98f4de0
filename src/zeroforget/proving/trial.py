"""One trial growth in numbers: old features compute what they did, new ones reach the output and are learned."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.find import Axes
from zeroforget.axes.labels import Clash, axis_names, births_of
from zeroforget.axes.trace import same_bits
from zeroforget.growing.growth import GrowthLimits
from zeroforget.growing.layers import GrowingLayer, GrowingNorm
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.tensors import GrowingTensor
from zeroforget.growing.user_buffers import ASKS, buffers
from zeroforget.operators.places import Places, select
from zeroforget.proving.input_checks import hints, wavers


class Unlike(Exception):
    """Something differs that no choice of axes explains."""


class Broke(Exception):
    """The wider network does not run; the module in which it broke off, and why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


_ATTEMPTS = 12
_BY = 3  # new features on each axis: of a single one, a ReLU may hide the effect again and again
_SHIFTS = (4.0, -8.0)
"""How far the biases and gains of new features are moved: off the flat side of whatever follows, both ways."""
_OTHERWISE = (
    ": some code there asks whether gradients are wanted, changes a tensor in place, or reads a layer's weight by "
    "other means than its module. Compute the same either way, or grow the part of it that does"
)
ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, IndexError, AttributeError, StopIteration, Clash)
"""What a network of the wrong width raises."""


def short(error: Exception) -> str:
    """An error's first line."""
    if isinstance(error, StopIteration):
        return ASKS
    return (str(error).strip() or repr(error)).splitlines()[0][:200]


def where(net: nn.Module, x: Tensor) -> str:
    """The innermost module in which a network breaks off."""
    inside: list[str] = []
    handles = []
    for path, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, path=path: inside.append(path)))
        handles.append(module.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        with torch.no_grad():
            net(x)
    except ERRORS:
        return inside[-1] if inside else ""
    finally:
        for handle in handles:
            handle.remove()
    return ""


class Trial:
    """A growing copy of a plain network with three tasks: narrow, with free axes wider, with all of them wider."""

    def __init__(self, plain: nn.Module, axes: Axes, x: Tensor) -> None:
        self.plain, self.axes, self.x = plain, axes, x
        self.free = [axis for axis in axes.sizes if axis not in axes.coupled]
        self.net = self._grow(self.free, ["free", "all"] if axes.coupled else ["free"])

    def _grow(self, free: Collection[str], tasks: list[str]) -> GrowingNetwork:
        limits = GrowthLimits(self.axes.sizes, lambda widths: 0.0)
        net = GrowingNetwork(self.plain, self.axes, tuple(self.x.shape[1:]), limits, 1.0, "reused", "zero")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net.add_task("narrow", 2)
            for task in tasks:
                chosen = free if task == "free" else list(self.axes.sizes)
                net.add_task(task, 2, growth=dict.fromkeys(chosen, _BY))
                give_back()
        return net.eval()

    @torch.no_grad()
    def _run(self, features: nn.Module) -> Tensor:
        try:
            out: Tensor = features(self.x)
        except ERRORS as error:
            raise Broke(where(features, self.x), short(error)) from error
        return out

    def check(self, expected: Tensor, tolerance: float) -> dict[str, str]:
        """Axis → what is wrong with it."""
        self._rebuilt(expected)
        if not self._same(self.net, expected, tolerance):
            return self._guilty(expected, tolerance, self.free)
        if unfelt := self._learns(tolerance):
            return unfelt
        self._runs_in_training_mode()
        return {}

    def confirm(self, expected: Tensor, tolerance: float) -> None:
        """After growth the first task's outputs are what they were, bit for bit; the wider network's old features are,
        too, as far as its numbers tell; all that is newborn learns, and every axis is felt."""
        self._rebuilt(expected)
        if not self._same(self.net, expected, tolerance):
            raise Unlike("new features change what old ones compute")
        if unfelt := self._learns(tolerance):
            raise Unlike(next(iter(unfelt.values())))

    def _rebuilt(self, expected: Tensor) -> None:
        if not torch.equal(self._run(self.net.dense("narrow").get_submodule("features")), expected):
            if wavers(self.plain, self.x):
                raise Unlike(
                    "in eval mode the network answers one input in two ways: it draws random numbers, or remembers its "
                    "last input. Let it do so in training mode only"
                )
            raise Unlike(
                "the network rebuilt at its own width gives other outputs: it has state that was not copied"
                + hints(self.plain)
            )

    def _same(self, net: GrowingNetwork, expected: Tensor, tolerance: float) -> bool:
        """Whether the wider network's old features are what they were; statistics over features are exempt.

        New features are tried at several values: what one draw hides (behind a ReLU, below a maximum) another shows.
        """
        births = {axis: b[b <= 1] for axis, b in net.births.items()}
        old = births_of(self.axes.output, births) == 0
        give_back()  # what an earlier dense form had does not fit this one's tensors
        features = net.dense("free").get_submodule("features")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            for shift in (None, *_SHIFTS):
                if shift is not None:
                    _redraw(features, self.axes, births, shift)
                got = select(self._run(features), [(1, old)])
                near = torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
                if not near and (shift is None or bool(got.isfinite().all())):
                    return False
        return True

    def _guilty(self, expected: Tensor, tolerance: float, suspects: list[str]) -> dict[str, str]:
        """The first axis whose growth changes what old features compute, found by halving."""
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            fine = self._same(self._grow(half, ["free"]), expected, tolerance)
            suspects = suspects[len(half) :] if fine else half
        why = f"new features of '{suspects[0]}' change what old ones compute, so some size was not followed"
        return {suspects[0]: why}

    # Learning --------------------------------------------------------------------------------------------------

    def _learns(self, tolerance: float) -> dict[str, str]:
        """With random bridges: the learning network computes what its dense form does, and every axis is felt."""
        unfelt = set(self.axes.sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for attempt in range(_ATTEMPTS):
                self._shake(attempt)
                self._backward(tolerance, compare=attempt == 0)
                unfelt -= self._felt(unfelt)
                if not unfelt:
                    break
        return {axis: f"new features of '{axis}' do not reach the output" for axis in sorted(unfelt)}

    @torch.no_grad()
    def _runs_in_training_mode(self) -> None:
        """Wider, it runs there as well, if it does at its own width."""
        with torch.random.fork_rng(devices=[]):
            try:
                trained = copy.deepcopy(self.plain).train()(self.x)
            except Exception:  # it wants more than the example
                return
            if not isinstance(trained, Tensor):  # of which one is told when it learns
                return
            self.net.train()
            try:
                self.net.newest_logits(self.x)
            except ERRORS as error:
                raise Broke(where(self.net.body, self.x), short(error)) from error
            finally:
                self.net.eval()

    @torch.no_grad()
    def _shake(self, attempt: int) -> None:
        """Fresh bridges, and a feature normalization that is not the identity; from the second attempt on other new
        features too, which wakes those behind a ReLU."""
        for layer in self.net.body.modules():
            for parameter in layer.norms[-1].parameters() if isinstance(layer, GrowingLayer) else ():
                parameter.add_(torch.rand_like(parameter), alpha=0.2)
        for tensor in self.net.tensors():
            spread = float(tensor.fresh[0]) or 0.1
            if tensor.cols is not None:
                tensor.cols.normal_(0.0, spread)
            if attempt and tensor.rows is not None:
                tensor.rows.normal_(0.0, spread)
        if attempt:
            for norm in self._norms():
                for parameter in norm.tasks[-1].parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)

    def _norms(self) -> list[GrowingNorm]:
        return [m for m in self.net.body.modules() if isinstance(m, GrowingNorm)]

    def _backward(self, tolerance: float, *, compare: bool) -> None:
        # The dense form comes first: it is gone when backward keeps what it needs.
        answered, state = (self._answer() if compare else None), self._state()
        give_back()
        ran: set[int] = set()
        norms = self._norms()
        handles = [m.register_forward_hook(lambda m, *_: ran.add(id(m))) for m in norms]
        self.net.zero_grad()
        try:
            live = self.net.newest_logits(self.x)
        except ERRORS as error:
            raise Broke(where(self.net.body, self.x), short(error)) from error
        finally:
            for handle in handles:
                handle.remove()
        if compare and not _same_state(state, self._state()):  # what it remembers now belongs to its answer
            answered = self._answer()
        if isinstance(answered, Broke):
            raise answered
        dense = live.detach() if answered is None else answered
        if not dense.isfinite().all():
            raise Unlike("the wider network computes NaN or infinity" + hints(self.plain))
        if not torch.allclose(live.detach(), dense, rtol=tolerance, atol=tolerance * float(dense.abs().max())):
            raise Unlike(
                "the network computes other things while it learns than when it answers, both in eval mode"
                + _OTHERWISE
                + hints(self.plain)
            )
        try:
            (live * torch.randn_like(live)).sum().backward()
        except RuntimeError as error:
            raise Unlike(f"the network has no gradients to learn by ({short(error)}){_OTHERWISE}") from error
        idle = {id(p) for m in norms if id(m) not in ran for p in m.parameters()}  # used in training only, if ever
        for name, parameter in self.net.named_parameters():
            if parameter.grad is None and id(parameter) not in idle and not without_gradient(self.axes, name):
                raise Unlike(
                    f"no gradient reaches what '{_path(name)}' would learn: its output is cut off (torch.no_grad, "
                    f"detach, numpy). Let gradients pass there, or pass keep=['{_path(name)}']"
                )

    def _state(self) -> dict[str, Tensor]:
        """Copies of the buffers of the user's own modules."""
        return {name: buffer.detach().clone() for name, buffer in buffers(self.net.body)}

    @torch.no_grad()
    def _answer(self) -> Tensor | Broke:
        """What the dense form answers, or how it broke off."""
        give_back()
        dense = self.net.dense(len(self.net.history) - 1)
        try:
            out: Tensor = dense(self.x)
        except ERRORS as error:
            return Broke(where(dense.get_submodule("features"), self.x), short(error))
        return out

    def _felt(self, axes: Collection[str]) -> set[str]:
        """Of these axes, those where some gradient of the newest features is not zero."""
        newest = len(self.net.history) - 1
        felt: set[str] = set()
        for tensor in self.net.tensors():
            for part, dim, places in _newborn(tensor):
                for axis in set(axis_names(tensor.labels[dim])) & set(axes) - felt:
                    marks: dict[str, Any] = {a: (b == newest) & (a == axis) for a, b in self.net.births.items()}
                    own = births_of(tensor.labels[dim], {a: m.long() for a, m in marks.items()}) > 0
                    if bool(part.index_select(dim, own[places.index].nonzero().squeeze(1)).any()):
                        felt.add(axis)
        return felt


def _same_state(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(tensor, b[name]) for name, tensor in a.items())


def without_gradient(axes: Axes, name: str) -> bool:
    """Whether a parameter of a growing network belongs to one that got no gradient in the given network either."""
    path, given = _path(name), {part for idle in axes.idle for part in (idle, idle.rpartition(".")[0])}
    return path in given or (path.startswith("loose.") and path.split(".")[1].replace("/", ".") in given)


def _path(name: str) -> str:
    """The path in the plain network of what a parameter of a growing one belongs to."""
    return name.removeprefix("body.").split(".grown")[0].split(".norms.")[0].split(".tasks.")[0]


def _newborn(tensor: GrowingTensor) -> list[tuple[Tensor, int, Places]]:
    parts = []
    if tensor.rows is not None and tensor.rows.grad is not None:
        parts.append((tensor.rows.grad, tensor.row, tensor.block.new_out))
    if tensor.cols is not None and tensor.cols.grad is not None:
        parts.append((tensor.cols.grad, tensor.col, tensor.block.new_in))
    return parts


@torch.no_grad()
def _redraw(features: nn.Module, axes: Axes, births: Mapping[str, Tensor], shift: float) -> None:
    """Other values for all that belongs to new features of a plain network: weights into them drawn again, what they
    have one number of moved by `shift`. What old features read of them stays zero."""
    for name, parameter in features.named_parameters():
        labels = axes.tensors.get(name, ())  # none for a bias that only feature normalization has made
        writes = axes.writes.get(name, 0) if parameter.dim() > 1 else -1
        dims = [d for d, label in enumerate(labels) if any(axis_names(label)) and writes in (-1, d)]
        spread = float(parameter.double().std(correction=0)) if parameter.numel() else 0.0
        for dim in dims:
            new = Places.where(births_of(labels[dim], births) > 0)
            part = new.take(parameter, dim)
            new.put(parameter, dim, part + shift if writes == -1 else torch.randn_like(part) * spread)


def give_back() -> None:
    """Let the C library give back what is free in its heap.

    It keeps tensors' memory there in pieces, and those that a trial leaves do not fit the tensors of the next: without
    this, a process grows to several times what is in use at any time.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """The GNU C library's `malloc_trim`, where that is the one in use."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found
