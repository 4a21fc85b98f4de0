"""What a network does in training mode that its answers would have to know of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.find import CannotGrow
from zeroforget.axes.plain_modules import MODULE_ATTRIBUTES
from zeroforget.axes.trace import in_eval, unchanged
from zeroforget.growing.user_buffers import joined


@torch.no_grad()
def refuse_training_state(net: nn.Module, x: Tensor) -> None:
    """Raise CannotGrow if what training leaves in plain attributes changes the answers: it belongs to no task.

    A plain float alone is warned of when it has changed (`user_buffers.warn_if_moved`).
    """
    trained = copy.deepcopy(net)
    try:
        with torch.random.fork_rng(devices=[]):
            trained.train()
            for given in (x, x * 0.5 if x.is_floating_point() else x):
                trained(given)
    except Exception:  # it needs more than the example for that
        return
    for path, module in net.named_modules():
        other = trained.get_submodule(path)
        other._buffers, other._parameters = copy.deepcopy(module._buffers), dict(module._parameters)
    changed = _changed(trained, net)
    if not changed or all(type(value) in (float, int) for _, value in changed):
        return
    with in_eval(trained), unchanged(net):
        expected = net(x)
        try:
            same = torch.equal(trained(x), expected)
        except Exception:
            same = False
        repeats = torch.equal(torch.nan_to_num(net(x)), torch.nan_to_num(expected))
    if not same and repeats:
        names = ", ".join(f"'{name}'" for name, _ in changed[:4])
        raise CannotGrow(
            f"the network keeps what it saw in training in {names}, and its answers depend on it, but a plain "
            "attribute belongs to no task and is not saved: make it a tensor and a buffer "
            "(register_buffer) that is written in training mode alone"
        )


def _changed(after: nn.Module, before: nn.Module) -> list[tuple[str, Any]]:
    """Plain attributes with another value, by their full names."""
    others = dict(before.named_modules())
    return [
        (joined(path, name), value)
        for path, module in after.named_modules()
        for name, value in vars(module).items()
        if name not in MODULE_ATTRIBUTES and not _same(value, vars(others[path]).get(name), 0)
    ]


def _same(a: Any, b: Any, depth: int) -> bool:
    """Whether two values are the same, as far as that can be told; what cannot be compared counts as the same."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.layout == torch.strided
        return bool(both and torch.equal(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and (depth > 3 or all(_same(x, y, depth + 1) for x, y in zip(a, b, strict=True)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and (depth > 3 or all(_same(a[k], b[k], depth + 1) for k in a))
    if isinstance(a, (int, float, str, bool, type(None))):
        return bool(a == b)
    return depth > 3 or not hasattr(a, "__dict__") or isinstance(a, nn.Module) or _same(vars(a), vars(b), depth + 1)
