"""Memory aware synapses."""

from __future__ import annotations

from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.methods.importance import Anchored, checked, per_sample_moments, samples_of, squared_norm
from zeroforget.training import Fit


class Mas(Anchored):
    """Stay near the old weights, each as firmly as the network's output is sensitive to it: no labels are needed.

    Aljundi et al., "Memory aware synapses: learning what (not) to forget", ECCV 2018.

    Options:
        strength: λ, how firmly old weights are held.
        samples: how many training images estimate the sensitivity; None takes all.
    """

    name = "mas"
    tradeoff = "strength"

    def __init__(self, net: nn.Module, example: Tensor, *, strength: float = 1.0, samples: int | None = None) -> None:
        checked(strength, samples)
        super().__init__(net, example)
        self.strength = strength
        self.samples = samples

    @property
    def firmness(self) -> float:
        """λ Σ Ω (θ − θ*)², eq. (3)."""
        return self.strength

    def end_task(self, task: Task, fit: Fit) -> None:
        """Ω grows by the mean absolute gradient of the squared output, eq. (2)."""
        index = len(self.specs) - 1
        data = samples_of(task, fit, index, self.samples)
        names = [f"net.{name}" for name in self.weights()]
        now = per_sample_moments(self, names, data, squared_norm, index, power="abs")
        self.consolidate({name: self.importance[name] + now[f"net.{name}"] for name in self.weights()})
