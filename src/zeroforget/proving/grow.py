"""From a plain network to one that grows, proved on a copy before it is handed over."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from zeroforget.axes.find import Axes, CannotGrow
from zeroforget.axes.plain_modules import plain_layout
from zeroforget.growing.growth import GrowthLimits, is_share, limits_of
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.rank_births import Rank
from zeroforget.proving.input_checks import one_input_and_output, taking
from zeroforget.proving.memory import give_back
from zeroforget.proving.prove import check_start, proven_axes


def grow(
    net: nn.Module,
    example: Any,
    *,
    start: float = 1.0,
    limit: float | None = None,
    unit: str = "features",
    align: int = 1,
    keep: Collection[str] = (),
    fn: str = "reused",
    bridge: str = "zero",
    unknown: str = "refuse",
    output: str | int | None = None,
    rank: Rank = 0,
) -> GrowingNetwork:
    """Turn a plain feature extractor (no head; it returns (batch, features)) into a network that grows by tasks.

    The given network is left as it is. It sets the full width of each layer, and the values that the first task has.

    Args:
        net: any module; its axes are found by watching it run, not by its class.
        example: a batch of inputs: a tensor, a tuple of arguments, or a dictionary of named ones (then the network is
            asked by `net(**batch, task=...)`).
        output: where an answer has several parts, the name or the place of the features among them.
        start: the share of the full network that the first task begins with.
        limit: how far the network may grow, as a share of its full width; by default 1 if start < 1, else no limit.
        unit: "features" or "weights": what shares are shares of.
        align: keep the widths of layers at multiples of this (8 keeps a GPU's tensor cores busy). Heads and groups
            count by their channels.
        keep: paths of modules whose features shall not grow.
        fn: feature normalization of "reused" features, of "all", or of "none".
        bridge: "zero" starts what old features read of new ones at zero, so that growing changes nothing at first;
            "random" starts it as a fresh network would.
        unknown: "refuse" a network if some of its features cannot be followed, naming what to pass as `keep`; or "keep"
            those features as they are, with a warning.
        rank: the rank of the step that each later task adds to older weights, unless its `add_task` says otherwise.

    Example:
        >>> import torch, zeroforget
        >>> net = zeroforget.grow(torch.nn.Linear(8, 64), torch.randn(4, 8), start=0.5)
        >>> net.add_task("birds", classes=3)
        >>> net.eval()(torch.randn(2, 8), "birds").shape
        torch.Size([2, 3])

    Raises:
        CannotGrow: an operator cannot be followed; the message names it and what to pass as `keep`.
        ValueError: an argument is out of range.
    """
    check_growth(start, fn, bridge, unknown, unit, align, keep)
    net, example = one_input_and_output(net, example, output)
    shares = (start, limit, unit, align)
    return growing(net, plain_layout(example), shares, (fn, bridge, rank), keep=keep, unknown=unknown)


def growing(
    net: nn.Module,
    example: Any,
    shares: tuple[float, float | None, str, int],
    ways: tuple[str, str, Rank],
    *,
    keep: Collection[str],
    unknown: str,
    inside: Sequence[str] = (),
) -> GrowingNetwork:
    """A network of one input and output, proved and growing: `shares` are start, limit, unit and align; `ways` are fn,
    bridge and rank; `inside` are the layers that each task has for itself, as its head."""
    start, limit, unit, align = shares
    fn, bridge, rank = ways
    keep = [*keep, *inside]
    with torch.inference_mode(False), taking(net, example):  # what is made in inference mode could never learn
        axes = proven_axes(net, example, keep=keep, unknown=unknown)
        axes = dataclasses.replace(axes, kept=tuple(path for path in axes.kept if path not in inside))
    limits = _checked_limits(net, axes, start, limit, unit, align)
    if start < 1:
        none = dict.fromkeys(axes.sizes, 0)
        with torch.inference_mode(False), taking(net, example):
            check_start(net, axes, example, limits.plan(dict.fromkeys(axes.sizes, 0.0), none, start)[1])
    give_back()
    with torch.inference_mode(False):
        grown = GrowingNetwork(net, axes, tuple(example.shape[1:]), limits, start, fn, bridge, rank, inside)
    idle = {name.rpartition(".")[0] or name for name in axes.idle if name not in axes.elsewhere}
    unread = {name.rpartition(".")[0] or name for name in axes.unread}
    _notice(axes, [*keep, *idle])
    _warn_of_silent(axes, [*keep, *axes.idle])
    _warn_of_idle(idle & unread, idle - unread)
    return grown


def _checked_limits(
    net: nn.Module, axes: Axes, start: float, limit: float | None, unit: str, align: int
) -> GrowthLimits:
    if not axes.sizes and start < 1:
        raise ValueError(
            f"nothing in this network can grow, so a first task cannot start with {start} of it: pass start=1"
        )
    limits = limits_of(net, axes, 1.0 if limit is None and start < 1 else limit, unit, align)
    if limits.limit is not None and limits.limit < start:
        raise ValueError(f"limit {limit} is below start {start}; nothing could be learned")
    return limits


def check_growth(
    start: float, fn: str, bridge: str, unknown: str, unit: str, align: int, keep: Collection[str]
) -> None:
    """ValueError for arguments that are out of range."""
    if isinstance(keep, str):
        raise ValueError(f"keep takes a list of module paths: keep=['{keep}']")
    if not is_share(start) or not 0 < start <= 1:
        raise ValueError(f"start is a share of the full network, above 0 and at most 1, not {start!r}")
    if fn not in {"reused", "all", "none"}:
        raise ValueError(f"fn is 'reused', 'all' or 'none', not '{fn}'")
    if bridge not in {"zero", "random"}:
        raise ValueError(f"bridge is 'zero' or 'random', not '{bridge}'")
    if unknown not in {"refuse", "keep"}:
        raise ValueError(f"unknown is 'refuse' or 'keep', not '{unknown}'")
    GrowthLimits({}, lambda widths: 0.0, unit=unit, align=align)  # checks these two, with no network yet


def _warn_of_idle(unread: Collection[str], cut_off: Collection[str]) -> None:
    """Say which parameters stay as they are because the example does not show what they are for."""
    if unread:
        warnings.warn(
            f"{_quoted(unread)} took no part in the answer to the example and gets no features of its own. What runs "
            "only for other inputs does not fit the network once it has grown: pass an example that reaches it, or "
            "switch it off first (torchvision: aux_logits=False)",
            stacklevel=4,
        )
    if cut_off:
        warnings.warn(
            f"no gradient from the answer reaches {_quoted(cut_off)} (torch.no_grad, detach, a branch whose output is "
            "not returned), so nothing could be learned there and no feature is added",
            stacklevel=4,
        )


def _quoted(paths: Collection[str]) -> str:
    shown = sorted(paths)
    return ", ".join(f"'{path}'" for path in shown[:6]) + (" and more" if len(shown) > 6 else "")


def _notice(axes: Axes, keep: Collection[str]) -> None:
    """Say which layers keep their width though nobody asked for it."""
    fixed = [path or "parameters of its own" for path in axes.kept if not _below(path, keep)]
    if fixed:
        why = next(iter(axes.unfollowed.values()), "their output is tied to a fixed size")
        warnings.warn(f"these layers keep their width, {why}: {_some(fixed)}", stacklevel=4)


def _warn_of_silent(axes: Axes, known: Collection[str]) -> None:
    """Say which parameters keep their shape though nothing speaks against their growing."""
    names = [name for name in axes.silent if not _below(name, known)]
    if names:
        warnings.warn(
            "these parameters keep their shape, for it does not show which of their numbers are features: "
            f"{_some(names)}. A matrix in x @ weight or weight @ x grows",
            stacklevel=4,
        )


def _below(path: str, places: Collection[str]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


__all__ = ["CannotGrow", "grow"]
