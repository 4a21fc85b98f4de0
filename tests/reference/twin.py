"""The slow twin of a growing network: equations 3 to 9 and algorithm S1 with explicit masks at full width, in float64.

It knows nothing of births. Each layer has one mask m and one mask n for every task, grown as algorithm S1 says; weights
are full width from the start; every product is masked, every gradient is masked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class TwinLayer:
    """A linear or convolution layer at full width, with its masks."""

    weight: Tensor
    bias: Tensor | None
    convolution: dict[str, int] | None = None
    ternary: list[Tensor] = field(default_factory=list)
    """Algorithm S1: one ternary mask for each task."""
    steps: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Rank births: task → `up` (outputs × rank) and `down` (rank × inputs × kernel) at full width."""
    below: list[Tensor] = field(default_factory=list)
    """Ternary masks of this layer's inputs for each task; empty where all inputs are old."""
    scale: dict[int, Tensor] = field(default_factory=dict)
    shift: dict[int, Tensor] = field(default_factory=dict)

    def add_task(self, grown: int) -> None:
        """Algorithm S1: old_size ← current size, new_size ← old_size + s."""
        old = len(self.ternary[-1]) if self.ternary else 0
        for k, mask in enumerate(self.ternary):
            self.ternary[k] = torch.cat([mask, torch.zeros(grown)])  # m^k[old:new] ← 0
        # m^t[0:old] ← 1, m^t[old:new] ← 2
        self.ternary.append(torch.cat([torch.ones(old), torch.full((grown,), 2.0)]))

    def m(self, task: int) -> Tensor:
        """Which features are the task's own (state 2)."""
        return self._padded((self.ternary[task] == 2).double())

    def n(self, task: int) -> Tensor:
        """Equation 3: n_i = 1 if some s ≤ t has m^s_i = 1."""
        out = torch.zeros_like(self.m(0))
        for s in range(task + 1):
            out = torch.maximum(out, self.m(s))
        return out

    def _padded(self, mask: Tensor) -> Tensor:
        return F.pad(mask, (0, self.weight.shape[0] - len(mask)))

    def weight_of(self, task: int) -> Tensor:
        """W(k) = W + Σ up(s) · down(s) over s ≤ k, each where outputs and inputs are both older than s."""
        weight = self.weight
        for s, (up, down) in self.steps.items():
            if s <= task:
                outputs = self.n(s - 1).view(-1, *[1] * (weight.dim() - 1))
                inputs = self._inputs(s - 1).view(1, -1, *[1] * (weight.dim() - 2))
                weight = weight + outputs * inputs * torch.einsum("or,r...->o...", up, down)
        return weight

    def _inputs(self, task: int) -> Tensor:
        """Which inputs exist for a task."""
        if not self.below:
            return torch.ones(self.weight.shape[1], dtype=torch.float64)
        mask = torch.zeros(self.weight.shape[1], dtype=torch.float64)
        mask[: len(self.below[task])] = (self.below[task] > 0).double()
        return mask

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Equation 4 with equation 7: y = (W x) ⊙ n, features of earlier tasks scaled and shifted for this one."""
        weight = self.weight_of(task)
        if self.convolution is None:
            y = x @ weight.t()
            shape: tuple[int, ...] = (1, -1)
        else:
            y = F.conv2d(x, weight, None, **self.convolution)
            shape = (1, -1, 1, 1)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        if task in self.scale:
            y = self.scale[task].view(shape) * y + self.shift[task].view(shape)
        return y * self.n(task).view(shape)

    def gradient_mask(self, task: int, into: list[Tensor]) -> Tensor:
        """Equation 5: n^{t}_j n^{t}_i − n^{t−1}_j n^{t−1}_i; `into` holds n of the layer below for t and t − 1."""
        now = self.n(task)[:, None] * into[0][None, :]
        if task == 0:
            return now
        return now - self.n(task - 1)[:, None] * into[1][None, :]

    def gradient_mask_or(self, task: int, into_m: Tensor) -> Tensor:
        """Equation 6: m_i ∨ m_j."""
        return torch.maximum(
            self.m(task)[:, None].expand(-1, len(into_m)), into_m[None, :].expand(len(self.m(task)), -1)
        )


def backward(layers: list[TwinLayer], flatten_at: int, repeat: int, x: Tensor, task: int, weigh: Tensor) -> Tensor:
    """Run the network and leave masked gradients in each layer's `.weight.grad`, `.bias.grad`; returns the output."""
    inputs = x.shape[1]
    for layer in layers:
        layer.weight.requires_grad_(True)
        if layer.bias is not None:
            layer.bias.requires_grad_(True)
        layer.scale[task].requires_grad_(True)
        layer.shift[task].requires_grad_(True)
        for part in layer.steps.get(task, ()):
            part.requires_grad_(True)
    h = x
    for i, layer in enumerate(layers):
        if i == flatten_at:
            h = h.flatten(1)
        h = torch.relu(layer.forward(h, task))
    if flatten_at == len(layers):
        h = h.flatten(1)
    (h * weigh).sum().backward()
    below = [torch.ones(inputs, dtype=torch.float64), torch.ones(inputs, dtype=torch.float64)]
    below_m = torch.zeros(inputs, dtype=torch.float64)
    for i, layer in enumerate(layers):
        if i == flatten_at:
            below = [b.repeat_interleave(repeat) for b in below]
            below_m = below_m.repeat_interleave(repeat)
        mask = layer.gradient_mask(task, below)
        used = layer.n(task)[:, None] * below[0][None, :]
        # The simplification to equation 6 holds among the features that exist for the task.
        assert torch.equal(mask, layer.gradient_mask_or(task, below_m) * used)
        assert layer.weight.grad is not None
        layer.weight.grad *= mask.view(*mask.shape, *[1] * (layer.weight.dim() - 2))
        if layer.bias is not None:
            assert layer.bias.grad is not None
            layer.bias.grad *= layer.m(task)
        below = [layer.n(task), layer.n(task - 1) if task else layer.n(task)]
        below_m = layer.m(task)
    return h.detach()
