"""How tensors lie in memory: bits depend on it, so a network keeps its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def plain_layout(tensor: Tensor) -> Tensor:
    """A copy that lies in memory in the usual order, with the usual strides even where a dimension is one long."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def layout_of(net: nn.Module) -> torch.memory_format:
    """How a network's convolutions lie in memory."""
    last = any(
        p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
        for p in net.parameters()
    )
    return torch.channels_last if last else torch.contiguous_format


def laid_out(net: nn.Module, layout: torch.memory_format) -> nn.Module:
    """The network with its convolutions laid out so, in place."""
    if layout != torch.contiguous_format:
        for parameter in net.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=layout)
    return net
