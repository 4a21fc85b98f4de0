"""Learning without forgetting."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.methods.teacher import Taught


def distillation(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between two softened predictions, the mean over the batch: eqs. (2) and (3) of LwF."""
    return F.cross_entropy(logits / temperature, (target / temperature).softmax(1))


class Lwf(Taught):
    """Learn the new task while every old head goes on answering as before, on the new task's images.

    Li and Hoiem, "Learning without forgetting", ECCV 2016. Each old head has a softmax of its own, as each answers for
    its own task.

    Options:
        strength: λ, the weight of each old head's distillation.
        temperature: T, which softens both predictions.
    """

    name = "lwf"

    def __init__(self, net: nn.Module, example: Tensor, *, strength: float = 2.0, temperature: float = 1.0) -> None:
        super().__init__(net, example)
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        self.strength = strength
        self.temperature = temperature

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """Cross-entropy of the new head, distillation of each old one."""
        features = self.net(x)
        loss = F.cross_entropy(self.heads[task](features), y)
        if not self._teacher:
            return loss
        before = self.taught(x)
        for head in self.heads[:task]:
            loss = loss + self.strength * distillation(head(features), head(before), self.temperature)
        return loss
