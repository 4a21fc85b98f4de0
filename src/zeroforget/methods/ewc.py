"""Elastic weight consolidation."""

from __future__ import annotations

from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.methods.importance import Anchored, checked, fisher, samples_of
from zeroforget.training import Fit
from zeroforget.training.seeding import generator


class Ewc(Anchored):
    """Stay near the old weights, each as firmly as the Fisher information says that it mattered.

    Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017. One anchor and the running
    mean of the tasks' Fisher diagonals are kept, so the memory does not grow with the tasks.

    Options:
        strength: λ, how firmly old weights are held.
        samples: how many training images estimate the Fisher information; None takes all.
        labels: "true" for the empirical Fisher, "sampled" for labels drawn from the model itself.
    """

    name = "ewc"
    tradeoff = "strength"

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        strength: float = 5000.0,
        samples: int | None = None,
        labels: str = "true",
    ) -> None:
        checked(strength, samples, labels)
        super().__init__(net, example)
        self.strength = strength
        self.samples = samples
        self.labels = labels

    @property
    def firmness(self) -> float:
        """λ/2 Σ F (θ − θ*)², eq. (3)."""
        return self.strength / 2

    def end_task(self, task: Task, fit: Fit) -> None:
        """F ← (F · tasks before + F of this task) / tasks now."""
        index = len(self.specs) - 1
        data = samples_of(task, fit, index, self.samples)
        draws = generator("fisher", fit.seed, index)
        names = [f"net.{name}" for name in self.weights()]
        now = fisher(self, names, data, index, labels=self.labels, draws=draws)
        self.consolidate(
            {name: (self.importance[name] * index + now[f"net.{name}"]) / (index + 1) for name in self.weights()}
        )
