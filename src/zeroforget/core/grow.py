"""From a plain network to one that grows, proved on a copy before it is handed over."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Collection

import torch
from torch import Tensor, nn

from zeroforget.core.axes import Axes, CannotGrow, find_axes
from zeroforget.core.births import select
from zeroforget.core.growth import Room
from zeroforget.core.labels import births_of
from zeroforget.core.network import GrowingNetwork, count_weights


def grow(
    net: nn.Module,
    example: Tensor,
    *,
    start: float = 1.0,
    limit: float | None = None,
    unit: str = "features",
    align: int = 1,
    keep: Collection[str] = (),
    fn: str = "reused",
    bridge: str = "zero",
) -> GrowingNetwork:
    """Turn a plain feature extractor (no head; it returns (batch, features)) into a network that grows by tasks.

    The given network, which is left as it is, sets the full width of every feature axis and the values that the first
    task starts from.

    Args:
        net: any module; its axes are found by watching it run, not by its class.
        example: a batch of inputs.
        start: the share of the full network that the first task begins with.
        limit: how far the network may grow, as a share of its full width; by default 1 if start < 1, else no limit.
        unit: "features" or "weights": what shares are shares of.
        align: keep widths at multiples of this (8 keeps a GPU's tensor cores busy).
        keep: paths of modules whose features shall not grow.
        fn: feature normalization of "reused" features, of "all", or of "none".
        bridge: "zero" starts what old features read of new ones at zero, so that growing changes nothing at first;
            "random" starts it as a fresh network would.

    Raises:
        CannotGrow: an operator cannot be followed; the message names it and what to pass as `keep`.
        ValueError: an argument is out of range.
    """
    if not 0 < start <= 1:
        raise ValueError(f"start is a share of the full network, above 0 and at most 1, not {start}")
    if fn not in {"reused", "all", "none"}:
        raise ValueError(f"fn is 'reused', 'all' or 'none', not '{fn}'")
    if bridge not in {"zero", "random"}:
        raise ValueError(f"bridge is 'zero' or 'random', not '{bridge}'")
    if example.dim() < 2:
        raise ValueError(f"example must be a batch of inputs, not a tensor of shape {tuple(example.shape)}")
    axes = find_axes(net, example, keep=keep)
    names = [name for name, _ in net.named_parameters()]
    limit = 1.0 if limit is None and start < 1 else limit
    if limit is not None and limit < start:
        raise ValueError(f"limit {limit} is below start {start}; nothing could be learned")
    room = Room(axes.sizes, functools.partial(count_weights, axes, names), limit, unit, align)
    _prove(net, axes, example)
    fixed = [path for path in axes.kept if not any(path == k or path.startswith(k + ".") for k in keep)]
    if fixed:
        warnings.warn(
            f"these layers keep their width, their output is tied to a fixed size: {', '.join(fixed)}", stacklevel=2
        )
    return GrowingNetwork(net, axes, tuple(example.shape[1:]), room, start, fn, bridge)


def _prove(net: nn.Module, axes: Axes, example: Tensor) -> None:
    """A trial growth on a copy, in float64: old features compute what they did, new ones reach the output.

    A trace cannot show a size that is baked into Python code; running the wider network does.
    """
    plain = copy.deepcopy(net).double().eval()
    x = example[:2].double() if example.is_floating_point() else example[:2]
    with torch.no_grad():
        expected = plain(x)
    trial = _trial(plain, axes, x, "zero", tuple(axes.sizes))
    old = births_of(axes.output, trial.births) == 0
    with torch.no_grad():
        try:
            got = trial.dense("wider").get_submodule("features")(x)
            narrow = trial.dense("narrow").get_submodule("features")(x)
        except (RuntimeError, ValueError, TypeError) as error:
            raise _blame(plain, axes, x, error) from error
    if not torch.equal(narrow, expected):
        raise CannotGrow("the network rebuilt at its own width gives other outputs: it has state that was not copied")
    same = select(got, [(1, old)])
    if not axes.coupled and not torch.allclose(same, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max())):
        raise CannotGrow(
            "a trial growth changed what old features compute, so some size was not followed; "
            f"pass keep=[...] for some of {', '.join(axes.sizes)}"
        )


def _trial(plain: nn.Module, axes: Axes, x: Tensor, bridge: str, chosen: Collection[str]) -> GrowingNetwork:
    room = Room(axes.sizes, lambda widths: 0.0)
    trial = GrowingNetwork(plain, axes, tuple(x.shape[1:]), room, 1.0, "reused", bridge)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trial.add_task("narrow", 2)
        trial.add_task("wider", 2, growth=dict.fromkeys(chosen, 2))
    return trial.eval()


def _blame(plain: nn.Module, axes: Axes, x: Tensor, error: Exception) -> CannotGrow:
    """Which axes cannot be widened: try them one at a time."""
    bad = []
    for axis in axes.sizes:
        try:
            with torch.no_grad():
                _trial(plain, axes, x, "zero", [axis]).dense("wider")(x)
        except (RuntimeError, ValueError, TypeError):
            bad.append(axis)
    named = bad or list(axes.sizes)
    return CannotGrow(
        f"a wider network does not run ({error}): some code has the old width of {', '.join(named)} baked in, such as "
        f"view(-1, 400). Take the size from the tensor's shape there, or pass keep={named!r}."
    )


__all__ = ["CannotGrow", "grow"]
