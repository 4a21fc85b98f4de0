"""What stands beside a step's loss: images mixed in pairs, statistics without dropout, a bound on the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from zeroforget.training.learner import Learner


def partner(batch: Tensor) -> Tensor:
    """The other one of each pair. Batches are shuffled, so the batch in reverse order will do."""
    return batch.flip(0)


def mix(x: Tensor, cutmix: float, mixup: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Mix each image with its partner; returns the images and each one's own share of itself.

    A share `cutmix` of the images gets a rectangle of the partner's in place of its own (Yun et al., 2019), a share
    `mixup` is blended with it (Zhang et al., 2018), the rest stay as they are; how much is drawn evenly.
    `generator` is a CPU generator; without one the draws come from the generator of the images' own device.
    """
    if x.dim() != 4:
        if cutmix:
            raise ValueError(
                f"cutmix cuts images, but this input is {tuple(x.shape)}; use mixup, which blends anything"
            )
        mixed, share = mix(x.flatten(1)[:, :, None, None], 0.0, mixup, generator)
        return mixed.view_as(x), share
    count, height, width = len(x), *x.shape[-2:]
    draws = torch.rand(4, count, 1, generator=generator, device=None if generator is not None else x.device)
    way, own, down, across = draws.to(x.device)
    side = (1 - own).sqrt()  # of the rectangle, as a share of the image's
    inside = []
    for size, middle in ((height, down), (width, across)):
        place = (torch.arange(size, device=x.device) + 0.5) / size
        inside.append((place - middle).abs() < side / 2)
    cut = (inside[0][:, :, None] & inside[1][:, None, :]).to(x.dtype)
    way, own = way[:, :, None], own[:, :, None].to(x.dtype)
    blend = torch.where(way < cutmix + mixup, own, torch.ones_like(own))
    weight = torch.where(way < cutmix, 1 - cut, blend)
    mixed = torch.lerp(partner(x), x, weight[:, None])
    return mixed, weight.expand(count, height, width).mean((1, 2))


@contextmanager
def settling(learner: Learner) -> Iterator[None]:
    """Inside, dropout passes everything on, and batch norms that may move average what they see from now on."""
    moving = {tensor.data_ptr() for tensor in learner.moving().values()}

    def moves(tensor: Tensor | None) -> bool:
        return tensor is not None and tensor.data_ptr() in moving

    learner.train()
    dropouts, norms = list[_DropoutNd](), list[tuple[_BatchNorm, float | None]]()
    for module in learner.modules():
        if isinstance(module, _DropoutNd) and module.training:
            module.training = False
            dropouts.append(module)
        elif isinstance(module, _BatchNorm) and moves(module.running_mean):
            norms.append((module, module.momentum))
            module.reset_running_stats()
            module.momentum = None
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.training = True
        for norm, momentum in norms:
            norm.momentum = momentum


@torch.no_grad()
def clip(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], most: float) -> None:
    """Bound the norm of the whole gradient.

    A fused optimizer divides by a number as it goes, which spares a pass over all gradients: it is told the number.
    """
    parameters = [p for p in parameters if p.grad is not None]
    if not parameters or not all(group.get("fused") for group in optimizer.param_groups):
        nn.utils.clip_grad_norm_(parameters, most)
        return
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    optimizer.grad_scale = ((norm.float() + 1e-6) / most).clamp(min=1.0)  # type: ignore[attr-defined]
