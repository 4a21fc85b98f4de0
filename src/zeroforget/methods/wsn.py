"""Winning subnetworks: each task chooses weights of one network, and those chosen once never move again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.methods.base import Overhead, bits
from zeroforget.methods.bitmasks import FrozenWeights, coded_bits
from zeroforget.methods.scored import Scored
from zeroforget.training import Fit, FitLog


class Wsn(Scored):
    """Learn weights and a score for each at once; a task uses the best-scored share of every layer, and keeps it.

    Kang et al., "Forget-free Continual Learning with Winning Subnetworks", ICML 2022. A task may choose weights of
    earlier tasks, which stand still, and free ones, which it learns. Scores go on from task to task. Biases are those
    of the first task; normalization and buffers are each task's own. What was given frozen stays as it was, unmasked.

    Options:
        capacity: c, the share of each layer's weights that a task uses.
        lr: Adam's learning rate for everything; None: the regime's optimizer and rate.
    """

    name = "wsn"
    overhead_formula = "1 bit per parameter and task, Huffman-coded"

    def __init__(self, net: nn.Module, example: Tensor, *, capacity: float = 0.5, lr: float | None = 1e-3) -> None:
        if not 0 < capacity <= 1:
            raise ValueError(
                f"capacity is the share of weights that a task uses, above 0 and at most 1, not {capacity}"
            )
        super().__init__(net, example, lr=lr)
        self.capacity = capacity
        self._frozen = FrozenWeights(net, {})

    def rank(self, score: Tensor) -> Tensor:
        """A score counts by its size."""
        return score.abs()

    def on(self, rank: Tensor) -> Tensor:
        """The highest, exactly the share of them; at least one."""
        count = max(1, round(self.capacity * rank.numel()))
        chosen = rank.flatten().topk(count, sorted=False).indices
        mask = torch.zeros(rank.numel(), dtype=torch.bool, device=rank.device)
        return mask.scatter_(0, chosen, True).view(rank.shape)

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """What earlier tasks use stands still meanwhile."""
        used = self.masks.union(len(self.specs) - 1)
        self._frozen = FrozenWeights(self.net, {name: ~mask for name, mask in used.items()})
        try:
            return super().train_task(task, fit)
        finally:
            self._frozen = FrozenWeights(self.net, {})

    def trainable(self) -> Iterable[nn.Parameter]:
        """Everything for the first task; then weights, normalization, scores and the newest head."""
        if len(self.specs) == 1:
            yield from self.net.parameters()
        else:
            yield from (self._weight(name) for name in self.masks.shapes)
            yield from self.own_norms()
        yield from self.scores
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """The network, the scores and the newest head."""
        return self.tensors_of("net", "scores", self.newest_head())

    def after_backward(self) -> None:
        """Weights that may not move have no say in how the others do: g ⊙ (1 − M)."""
        if self.coupled:
            self._frozen.silence()

    def after_step(self) -> None:
        """Adam's moments move weights without a gradient: the old bits are written back."""
        self._frozen.restore()

    def overhead(self) -> Overhead:
        """A bit per weight and task; packed, a weight's bits of all tasks are one symbol of a Huffman code."""
        plain = super().overhead()
        still = bits(*(self._weight(name) for name in self.masks.shapes))
        coded = coded_bits(self.masks)
        packed = None if coded is None else min(coded, self.masks.bits()) + self.norms.bits()
        return Overhead(training=plain.training + still, inference=plain.inference, packed=packed)
