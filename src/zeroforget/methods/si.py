"""Synaptic intelligence."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.methods.base import Overhead, bits, finite
from zeroforget.methods.importance import Anchored, Kept
from zeroforget.training import Fit


class Si(Anchored):
    """Stay near the old weights, each as firmly as its own path through training made the loss fall.

    Zenke et al., "Continual learning through synaptic intelligence", ICML 2017.

    Options:
        strength: c, how firmly old weights are held.
        damping: ξ, which bounds the importance of weights that hardly moved.
    """

    name = "si"
    tradeoff = "strength"

    def __init__(self, net: nn.Module, example: Tensor, *, strength: float = 0.1, damping: float = 0.1) -> None:
        if not 0 < damping < math.inf:
            raise ValueError(f"damping must be positive, not {damping}: it keeps the importance finite")
        finite(0, strength=strength)
        super().__init__(net, example)
        self.strength = strength
        self.damping = damping
        self.path = Kept({name: torch.zeros_like(p) for name, p in self.weights().items()})
        self._step: dict[str, tuple[Tensor, Tensor]] = {}  # gradient and place just before a step

    @property
    def firmness(self) -> float:
        """c Σ Ω (θ − θ*)², eq. (4)."""
        return self.strength

    @torch.no_grad()
    def after_backward(self) -> None:
        """The path integral wants the gradient of the loss alone, and the whole step: from here on."""
        moving = {name: p for name, p in self.weights().items() if p.grad is not None}
        self._step = {name: (p.grad.clone(), p.detach().clone()) for name, p in moving.items() if p.grad is not None}

    @torch.no_grad()
    def after_step(self) -> None:
        """ω −= g · Δθ, eq. (3), where the pull has joined in."""
        super().after_step()
        weights = self.weights()
        for name, (gradient, before) in self._step.items():
            self.path[name].sub_(gradient * (weights[name] - before))
        self._step = {}

    def end_task(self, task: Task, fit: Fit) -> None:
        """Ω += ω / (Δ² + ξ), eq. (5), where ω is positive; the path starts again from nothing."""
        grown = {}
        for name, p in self.weights().items():
            moved = (p.detach() - self.anchor[name]).square()
            grown[name] = self.importance[name] + (self.path[name] / (moved + self.damping)).relu()
        self.consolidate(grown)
        self.path.put({name: torch.zeros_like(value) for name, value in grown.items()})

    def moving(self) -> dict[str, Tensor]:
        """The network, the newest head, and the path travelled so far."""
        return super().moving() | {f"path.{n}": t for n, t in self.path.state_dict().items()}

    def overhead(self) -> Overhead:
        """Importance, anchor and path, while a task is learned."""
        return Overhead(training=super().overhead().training + bits(*self.path.buffers()))
