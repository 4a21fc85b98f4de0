"""Less-forgetting learning."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.methods.activity import Watch
from zeroforget.methods.teacher import Taught


class Lfl(Taught):
    """Learn the new task while the last hidden layer goes on saying what it said before, on the new task's images.

    Jung et al., "Less-forgetting learning in deep neural networks", 2016. The old decision boundaries, which are the
    old heads, stay as they are. Features are compared before dropout, which would only add noise to the distance.

    Options:
        strength: λ, the weight of the distance between old and new features.
    """

    name = "lfl"

    def __init__(self, net: nn.Module, example: Tensor, *, strength: float = 0.05) -> None:
        super().__init__(net, example)
        self.strength = strength

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """Cross-entropy, and λ · ½ ‖f_old(x) − f(x)‖² summed over the batch, eqs. (1) and (3)."""
        with Watch() as seen:
            features = self.net(x)
        loss = F.cross_entropy(self.heads[task](features), y)
        if not self._teacher:
            return loss
        apart = self.taught(x) - seen.before_dropout(features)
        distance: Tensor = apart.square().sum() / 2
        return loss + self.strength * distance
