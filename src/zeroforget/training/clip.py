"""A bound on the gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


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
