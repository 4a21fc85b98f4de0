"""The passes over all weights that some methods make in every step, each as one kernel on a GPU.

A network's weights may be most of what a step reads and writes, so it counts how often. The functions here are plain
torch, and the tests hold the GPU's kernels (`gpu_passes.py`) to them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroforget.operators import reference as kernels

LARGE = 2**18
"""A tensor of so many weights is worth a kernel of its own; smaller ones are looked at together."""


def on_gpu(*tensors: Tensor) -> bool:
    """Whether these, all of one shape, are the kernels' to work on: they must lie in memory alike, and without gaps."""
    first = tensors[0]
    alike = all(t.dtype == torch.float32 and t.stride() == first.stride() for t in tensors)
    return alike and first.numel() > 0 and kernels.on_gpu(first) and _dense(first)


def _dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


def in_order(x: Tensor, like: Tensor) -> Tensor:
    """One number after the other, in the order in which `like` lies in memory: no copy, if x lies alike."""
    return x.permute(0, 2, 3, 1).reshape(-1) if like.dim() == 4 and not like.is_contiguous() else x.reshape(-1)


def spring(thetas: Sequence[Tensor], anchors: Sequence[Tensor], firm: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The forces k (θ − θ*), and Σ k (θ − θ*)² over everything."""
    given = list(zip(thetas, anchors, firm, strict=True))
    large = [i for i, each in enumerate(given) if each[0].numel() >= LARGE and on_gpu(*each)]
    if not large:
        away = [theta - anchor for theta, anchor, _ in given]
        forces = [k * a for (_, _, k), a in zip(given, away, strict=True)]
        parts = [torch.dot(in_order(f, a), in_order(a, a)) for f, a in zip(forces, away, strict=True)]
        return forces, torch.stack(parts).sum()
    from zeroforget.operators import triton_passes as gpu_passes

    found, total = gpu_passes.spring([given[i] for i in large])
    made = dict(zip(large, found, strict=True))
    if few := [each for i, each in enumerate(given) if i not in made]:
        away = list(torch._foreach_sub([t for t, _, _ in few], [a for _, a, _ in few]))
        forces = list(torch._foreach_mul(away, [k for _, _, k in few]))
        flat = (torch.cat([in_order(t, a) for t, a in zip(each, away, strict=True)]) for each in (forces, away))
        total = total + torch.dot(*flat)
        made |= zip((i for i in range(len(given)) if i not in made), forces, strict=True)
    return [made[i] for i in range(len(given))], total


@dataclass(frozen=True, eq=False)
class Held:
    """How firmly each weight of a tensor is held, from 0 to 1: the lesser of what its place along the first dimension
    says, and its place along all others."""

    first: Tensor
    rest: Tensor
    """Of the shape of the other dimensions."""

    @functools.cached_property
    def share(self) -> Tensor:
        """Of each weight."""
        return torch.minimum(self.first.view((*self.first.shape, *(1,) * self.rest.dim())), self.rest)

    @functools.cached_property
    def free(self) -> Tensor:
        """The part of each weight that may move."""
        return 1 - self.share

    @functools.cached_property
    def channels_last(self) -> Tensor:
        """The rest in the order in which weights with their channels last lie in memory."""
        return self.rest.permute(1, 2, 0).reshape(-1)

    def along(self, weight: Tensor) -> Tensor:
        """The rest, one number after the other, in the order of this weight's memory."""
        return self.rest.reshape(-1) if weight.is_contiguous() else self.channels_last


Gradient = tuple[Tensor, Tensor, Held]
"""A gradient, its weight, and how firmly that is held."""


def free_squares(gradients: Iterable[Gradient]) -> Tensor:
    """Σ (free · g)² over everything, before anything is restrained."""
    quick, plain = list[Gradient](), list[Gradient]()
    for each in gradients:
        (quick if on_gpu(*each[:2]) else plain).append(each)
    parts = [(g * held.free).square().sum() for g, _, held in plain]
    if quick:
        from zeroforget.operators import triton_passes as gpu_passes

        parts.append(gpu_passes.free_squares(quick))
    return torch.stack(parts).sum()


def restrain(gradients: Iterable[Gradient], scale: Tensor, decay: float) -> None:
    """g ← scale · free · g − decay · share · weight, in place: what is held neither follows the loss nor decays."""
    for g, weight, held in gradients:
        if on_gpu(g, weight):
            from zeroforget.operators import triton_passes as gpu_passes

            gpu_passes.restrain(g, weight, held, scale, decay)
            continue
        g.mul_(held.free).mul_(scale)
        if decay:
            g.addcmul_(held.share, weight, value=-decay)
