"""Selfless sequential learning."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zeroforget.axes.trace import in_eval
from zeroforget.data import Task
from zeroforget.methods.activity import Activity
from zeroforget.methods.base import Overhead, bits, finite
from zeroforget.methods.importance import Kept, samples_of
from zeroforget.methods.mas import Mas
from zeroforget.training import Fit


class Ssl(Mas):
    """MAS, and neurons that inhibit their neighbours: a sparse code leaves room for the tasks to come.

    Aljundi et al., "Selfless sequential learning", ICLR 2019. Neurons that mattered for earlier tasks are inhibited
    less. It acts on the ReLU outputs of hidden linear layers; in a network that has none, on the channels of
    convolutions, each averaged over its positions.

    Options:
        strength: λ of MAS, how firmly old weights are held.
        samples: how many training images estimate importance; None takes all.
        sparsity: the weight of the inhibition between neurons.
        reach: σ, how far inhibition reaches, as a share of the layer's width.
    """

    name = "ssl"
    overhead_formula = "1 float per feature and parameter"

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        strength: float = 4.0,
        samples: int | None = None,
        sparsity: float = 1e-6,
        reach: float = 1 / 6,
    ) -> None:
        finite(0, sparsity=sparsity)
        if not 0 < reach < math.inf:
            raise ValueError(f"reach must be positive, not {reach}")
        super().__init__(net, example, strength=strength, samples=samples)
        self.sparsity = sparsity
        self.reach = reach
        with torch.no_grad(), in_eval(net), Activity() as seen:
            net(self.get_buffer("example"))
        if not seen.hidden():
            raise ValueError("ssl needs a ReLU after a linear or convolutional layer; this network has none")
        self.neurons = Kept({str(i): h.new_zeros(h.shape[1]) for i, h in enumerate(seen.hidden())})

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """MAS's loss and the inhibition of every hidden layer."""
        with Activity() as seen:
            loss = super().loss(x, y, task)
        for i, h in enumerate(seen.hidden()):
            loss = loss + self.sparsity * inhibition(_pooled(h), self.neurons[str(i)], self.reach * h.shape[1])
        return loss

    def end_task(self, task: Task, fit: Fit) -> None:
        """MAS's importance of weights, and α: that of neurons, the mean absolute gradient of the squared output."""
        grown = {name: self.neurons[name].clone() for name in self._layers()}
        with in_eval(self):
            for x, _ in samples_of(task, fit, len(self.specs) - 1, self.samples):
                with Activity() as seen:
                    outputs = self(x, len(self.specs) - 1)
                # What only frozen layers compute has no gradient, and nothing can inhibit it.
                learned = {str(i): h for i, h in enumerate(seen.hidden()) if h.requires_grad}
                gradients = torch.autograd.grad(outputs.square().sum(), list(learned.values())) if learned else ()
                for name, gradient in zip(learned, gradients, strict=True):
                    positions = gradient.flatten(2).sum(2) if gradient.dim() > 2 else gradient
                    grown[name] += positions.abs().sum(0) / self._count(task)
        super().end_task(task, fit)
        self.neurons.put(grown)

    def _layers(self) -> list[str]:
        return [name for name, _ in self.neurons.named_buffers()]

    def _count(self, task: Task) -> int:
        return min(len(task.train), self.samples or len(task.train))

    def overhead(self) -> Overhead:
        """MAS's, and a float for each neuron that is inhibited."""
        return Overhead(training=super().overhead().training + bits(*self.neurons.buffers()))


def _pooled(h: Tensor) -> Tensor:
    return h.flatten(2).mean(2) if h.dim() > 2 else h


def inhibition(h: Tensor, importance: Tensor, sigma: float) -> Tensor:
    """1/M Σ_{i≠j} e^{−(α_i+α_j)} e^{−(i−j)²/2σ²} Σ_m h_i h_j for the activities h (M samples, neurons)."""
    h = h.to(torch.promote_types(h.dtype, torch.float32))  # places beyond 256 are not exact in bfloat16
    place = torch.arange(h.shape[1], device=h.device, dtype=h.dtype)
    near = torch.exp(-(place[:, None] - place[None, :]).square() / (2 * sigma**2)).fill_diagonal_(0)
    free = h * torch.exp(-importance)
    with torch.autocast(h.device.type, enabled=False):
        return ((free @ near) * free).sum() / len(h)
