"""The opponent: ternary masks as a first reading of the paper would have them, on a network of full width.

Features are multiplied by their mask, every weight gets a gradient, and the gradients of old weights are set to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NaiveMasks(nn.Module):
    """A plain network whose first features of every layer, `frozen` of them, are old."""

    def __init__(self, net: nn.Module, head: nn.Linear, frozen: float) -> None:
        super().__init__()
        self.net, self.head = net, head
        layers = [m for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        below: Tensor | None = None
        for layer in layers:
            out = layer.weight.shape[0]
            old = torch.arange(out) < round(frozen * out)
            inputs = layer.weight.shape[1]
            if below is None:
                old_in = torch.ones(inputs, dtype=torch.bool)
            else:
                old_in = below.repeat_interleave(inputs // len(below))
            mask = (~(old[:, None] & old_in[None, :])).float().to(layer.weight.device)
            mask = mask.view(*mask.shape, *[1] * (layer.weight.dim() - 2))
            shape = (1, -1, 1, 1) if isinstance(layer, nn.Conv2d) else (1, -1)
            used = torch.ones(out, device=layer.weight.device).view(shape)
            layer.weight.register_hook(lambda g, mask=mask: g * mask)
            new = (~old).float().to(layer.weight.device)
            if layer.bias is not None:
                layer.bias.register_hook(lambda g, new=new: g * new)
            layer.register_forward_hook(lambda _m, _a, y, used=used: y * used.to(y.dtype))
            below = old

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.net(x))
        return out
