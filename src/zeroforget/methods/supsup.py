"""Supermasks in superposition: weights are random for ever, and a task is a mask over them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zeroforget.methods.base import Overhead, TaskSpec, bits
from zeroforget.methods.importance import Kept
from zeroforget.methods.scored import Scored
from zeroforget.methods.task_norms import overwrite, task_tensors

_SEED_BITS = 64


class SupSup(Scored):
    """No weight is ever learned: each is a constant of its layer with a random sign. A task finds which ones to use.

    Wortsman et al., "Supermasks in Superposition", NeurIPS 2020, with the task known. Every task begins with fresh
    scores, and with normalization and buffers as they were given; heads are learned. A seed makes the weights again, so
    they need not be kept. Biases stay as given. What was given frozen stays as it was, without masks.

    Options:
        capacity: the share of each layer's weights that a task uses, those of the highest scores; None: all whose score
            is 0 or more.
        lr: Adam's learning rate for everything; None: the regime's optimizer and rate.
    """

    name = "supsup"
    overhead_formula = "1 bit per parameter and task"

    def __init__(
        self, net: nn.Module, example: Tensor, *, capacity: float | None = None, lr: float | None = 1e-3
    ) -> None:
        if capacity is not None and not 0 < capacity <= 1:
            raise ValueError(
                f"capacity is the share of weights that a task uses, above 0 and at most 1, not {capacity}"
            )
        super().__init__(net, example, lr=lr)
        self.capacity = capacity
        # A CPU's number, also where the rest has no values.
        self.register_buffer("seed", torch.randint(2**62, (), device="cpu"))
        self.begun = Kept(task_tensors(net))
        if not any(weight.is_meta for weight in net.parameters()):
            overwrite(net, signed_constants(net, self.masks.shapes, int(self.get_buffer("seed"))))

    def add_task(self, spec: TaskSpec) -> None:
        """A head, a mask, and fresh scores and normalization."""
        if self.specs:
            overwrite(self.net, {name: self.begun[name] for name in task_tensors(self.net)})
        self.draw_scores()
        super().add_task(spec)

    def on(self, rank: Tensor) -> Tensor:
        """Scores of 0 or more, or exactly the highest share."""
        if self.capacity is None:
            return rank >= 0
        count = max(1, round(self.capacity * rank.numel()))
        chosen = rank.flatten().topk(count, sorted=False).indices
        mask = torch.zeros(rank.numel(), dtype=torch.bool, device=rank.device)
        return mask.scatter_(0, chosen, True).view(rank.shape)

    def trainable(self) -> Iterable[nn.Parameter]:
        """Scores, normalization and the newest head."""
        yield from self.scores
        yield from self.own_norms()
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """The same, with the network's statistics."""
        state = [f"net.{name}" for name in task_tensors(self.net)]
        return self.tensors_of("scores", self.newest_head(), *state)

    def overhead(self) -> Overhead:
        """A bit per weight and task, each later task's normalization and buffers, and the seed."""
        plain = super().overhead()
        begun, weights = bits(*self.begun.buffers()), bits(*(self._weight(name) for name in self.masks.shapes))
        return Overhead(
            training=plain.training + _SEED_BITS + begun, inference=plain.inference + _SEED_BITS, spared=weights
        )


def signed_constants(net: nn.Module, shapes: Iterable[str], seed: int) -> dict[str, Tensor]:
    """Weights of one size in each layer, √(2 / inputs), with signs drawn from a seed: "signed Kaiming constants"."""
    draws = torch.Generator().manual_seed(seed)
    made = {}
    for name in shapes:
        weight = net.get_parameter(name)
        signs = 1 - 2 * torch.randint(2, weight.shape, generator=draws, device="cpu")
        size = math.sqrt(2 / (weight.numel() // weight.shape[0]))
        made[name] = (signs * size).to(weight)
    return made
