"""Freezing: learn the features once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn

from zeroforget.methods.base import Method, TaskSpec
from zeroforget.training.evaluate import Predictor


class Freezing(Method):
    """Learn the network with the first task, then nothing but a new head for each later one.

    Oquab et al., "Learning and transferring mid-level image representations", CVPR 2014. Frozen means outside the
    optimizer and in eval mode: neither the weights nor BatchNorm's statistics ever move again.
    """

    name = "freezing"
    graph_safe = True
    zero_forgetting = True
    needs_backbone = True

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        super().__init__(net, example)
        self._learned = [p for p in net.parameters() if p.requires_grad]

    def add_task(self, spec: TaskSpec) -> None:
        """A new head; from the second task on the network is frozen."""
        super().add_task(spec)
        self._freeze()

    def drop_task(self) -> None:
        """Without its second task the network learns again."""
        super().drop_task()
        self._freeze()

    def _freeze(self) -> None:
        for p in self._learned:
            p.requires_grad_(not self.frozen)
        self.train(self.training)

    @property
    def frozen(self) -> bool:
        """Whether the first task is past."""
        return len(self.specs) > 1

    def train(self, mode: bool = True) -> Self:
        """A frozen network stays in eval mode: batches neither move its statistics nor drop its features."""
        super().train(mode)
        if self.frozen:
            self.net.eval()
        return self

    def trainable(self) -> Iterable[nn.Parameter]:
        """The network for the first task, only the newest head for later ones."""
        if not self.frozen:
            yield from self.net.parameters()
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """What `trainable` covers, and the network's statistics while it still learns."""
        return self.tensors_of(*(() if self.frozen else ("net",)), self.newest_head())

    def forward(self, x: Tensor, task: int) -> Tensor:
        """The head on the features; no gradient is computed for what is frozen."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.net(x)
        logits: Tensor = self.heads[task](features)
        return logits

    def predictor(self, task: int) -> Predictor:
        """Never with gradients, so that the first task too runs as it will when it is frozen."""
        return torch.no_grad()(super().predictor(task))
