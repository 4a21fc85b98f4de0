"""What a trial in numbers is made on: a narrow copy of a large network in float64, and then the network as it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.find import Axes, two_rows
from zeroforget.axes.plain_modules import layout_of, narrowed, plain_layout
from zeroforget.axes.trace import unchanged, without_caches
from zeroforget.proving.trial import ERRORS, Broke, Trial, Unlike, give_back

Find = Callable[[nn.Module, Tensor], Axes]
"""Finds the axes of a network like the given one, on an input like the given one."""
LARGE = 250_000
"""Weights from which a narrow copy is worth its while."""


@dataclass(frozen=True)
class Subject:
    """A network to try growth on, with its answer and how near to it others must come."""

    net: nn.Module
    axes: Axes | None
    """Its own, if its widths are not those of the given network."""
    x: Tensor
    expected: Tensor
    tolerance: float

    def check(self, axes: Axes) -> dict[str, str]:
        """Axis → what is wrong with it."""
        return Trial(self.net, self.axes or axes, self.x).check(self.expected, self.tolerance)


class Subjects:
    """The trials in numbers of one network.

    Of a large one, a copy with a few features on each axis shows exactly, in float64, that old features compute what
    they did and that new ones are felt. A trial growth of the whole then shows the same in its own numbers: its first
    answers stay the same bits, old features compute what they did, new ones are felt and learn. Wherever the narrow
    copy is not the same network or either finds a fault, the whole is tried in float64 instead, and that decides.
    """

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        self.net, self.example = net, example
        self._corner: Tensor | None = None
        self._whole: Subject | None = None
        self._slims = sum(p.numel() for p in net.parameters()) >= LARGE

    def check(self, axes: Axes, find: Find) -> dict[str, str]:
        """Axis → what is wrong with it.

        Raises:
            Unlike: something differs that no choice of axes explains.
            Broke: the wider network does not run.
        """
        if self._corner is None:
            self._corner = pair(_corner(self.net, self.example, axes, find))
        if self._slims and (slim := _slim(self.net, axes, self._corner, find)):
            try:
                if not slim.check(axes):
                    give_back()
                    _confirm(self.net, axes, self._corner)
                    return {}
            except (Unlike, Broke):
                pass
        self._whole = self._whole or _exact(self.net, self._corner)
        return self._whole.check(axes)


def pair(x: Any) -> Any:
    """Two rows of a batch."""
    return two_rows(x)


def _corner(net: nn.Module, example: Tensor, axes: Axes, find: Find) -> Tensor:
    """A corner of large images, where the network takes it and its features are the same."""
    for side in (64, 96, 128):
        if example.dim() != 4 or min(example.shape[2:]) <= side:
            break
        corner = example[:2, :, :side, :side]
        try:
            again = find(net, corner)
        except ERRORS:
            continue
        if again.tensors == axes.tensors and again.output == axes.output:
            return corner
    return example


def _slim(net: nn.Module, axes: Axes, x: Tensor, find: Find) -> Subject | None:
    """A copy with a few features on each axis, if that shows the same axes and runs in float64."""
    # Neighbours get different numbers, so that none is taken for another.
    widths = {axis: min(size, 5 + i % 4) for i, (axis, size) in enumerate(axes.sizes.items())}
    try:
        slim = narrowed(net, axes.tensors, axes.attributes, axes.sizes, widths, torch.float64)
        again = find(slim, x.to(torch.float64) if x.is_floating_point() else x)
        if again.tensors != axes.tensors or dict(again.sizes) != widths or again.output != axes.output:
            return None
        subject = _shaken(slim, dataclasses.replace(axes, sizes=widths), x, torch.float64, 1e-9)
        exact = subject.expected.dtype == torch.float64 and bool(subject.expected.isfinite().all())
        return subject if exact else None
    except ERRORS:
        return None


def _exact(net: nn.Module, x: Tensor) -> Subject:
    """A copy in float64, where the network works in it to its end; else in its own numbers, less exactly."""
    for kind, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        try:
            exact = _shaken(copy.deepcopy(net).to(kind), None, x, kind, tolerance)
        except RuntimeError:
            continue
        if exact.expected.dtype == kind and bool(exact.expected.isfinite().all()):
            return exact
    return _shaken(copy.deepcopy(net), None, x, None, 1e-4)


def _shaken(net: nn.Module, axes: Axes | None, x: Tensor, dtype: torch.dtype | None, tolerance: float) -> Subject:
    """The network, frozen. A parameter whose values are all the same (a scale that starts at zero) would hide what lies
    behind it: these are shaken."""
    net.requires_grad_(False).eval()
    given = x if dtype is None or not x.is_floating_point() else x.to(dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), without_caches(net):
        torch.manual_seed(0)
        for parameter in net.parameters():
            parameter.data = plain_layout(parameter)
            if (
                parameter.is_floating_point()
                and parameter.numel()
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return Subject(net, axes, given, net(given), tolerance)


def _confirm(net: nn.Module, axes: Axes, x: Tensor) -> None:
    """A trial growth of the network as it is."""
    plain = net
    if layout_of(net) != torch.contiguous_format or not all(p.is_contiguous() for p in net.parameters()):
        plain = copy.deepcopy(net)
        for parameter in plain.parameters():
            parameter.data = plain_layout(parameter)
    with in_service(plain):
        expected = plain(x)
        tolerance = min(0.05, 1000 * torch.finfo(expected.dtype).eps)
        trial = Trial(plain, axes, x)
    trial.confirm(expected, tolerance)


@contextmanager
def in_service(net: nn.Module) -> Iterator[None]:
    """The network answers as in service: in eval mode, its parameters frozen.

    Some kernels are chosen by whether parameters want gradients, even where none are computed.
    """
    learning = [p for p in net.parameters() if p.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        with torch.no_grad(), unchanged(net):
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
