"""What WSN and SupSup share: a score behind every weight, and a binary mask of each task's own made of the scores."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, adams_rate, bits, learn_only
from zeroforget.methods.bitmasks import BitMasks, maskable
from zeroforget.methods.task_norms import TaskNorms, norm_tensors, plain_copy
from zeroforget.training import Fit, FitLog
from zeroforget.training.evaluate import Predictor


class Scored(Method):
    """A task uses the weights whose score is high enough; the gradient passes straight through the mask to the scores.

    Each task has its own mask, head, normalization and buffers. The subclass says which weights are on and what learns.
    """

    family = "mask-based"
    zero_forgetting = True
    graph_safe = True
    overhead_formula = "1 bit per parameter and task"

    def __init__(self, net: nn.Module, example: Tensor, *, lr: float | None) -> None:
        super().__init__(net, example)
        self.lr = adams_rate(lr)
        self.masks = BitMasks(maskable(net))
        self.norms = TaskNorms(net)
        self.scores = nn.ParameterList([torch.empty_like(self._weight(name)) for name in self.masks.shapes])
        self.draw_scores()
        self._learned = [p for p in net.parameters() if p.requires_grad]

    @torch.no_grad()
    def draw_scores(self) -> None:
        """Fresh scores: uniform, as wide as a linear layer's weights begin."""
        for score in self.scores:
            nn.init.kaiming_uniform_(score, a=math.sqrt(5))

    # Structure -------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec) -> None:
        """A head, a mask and normalization."""
        super().add_task(spec)
        self.masks.add(self.get_buffer("example").device)
        self.norms.add(self.net)
        learn_only(self._learned, self.trainable())

    def drop_task(self) -> None:
        """Take them back."""
        super().drop_task()
        self.masks.drop()
        self.norms.drop()
        learn_only(self._learned, self.trainable() if self.specs else self._learned)

    def own_norms(self) -> Iterable[nn.Parameter]:
        """The affine parameters of normalization."""
        return (t for t in norm_tensors(self.net).values() if isinstance(t, nn.Parameter))

    # Masks -----------------------------------------------------------------------------------------------------

    def rank(self, score: Tensor) -> Tensor:
        """What decides whether a weight is on: the higher, the sooner."""
        return score

    def on(self, rank: Tensor) -> Tensor:
        """Which of a layer's weights are on."""
        raise NotImplementedError

    def switches(self) -> dict[str, Tensor]:
        """Which weights are on for the task being learned."""
        return {n: self.on(self.rank(s.detach())) for n, s in zip(self.masks.shapes, self.scores, strict=True)}

    def _weight(self, name: str) -> nn.Parameter:
        return self.net.get_parameter(name)

    # Learning --------------------------------------------------------------------------------------------------

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """With Adam, unless the regime's own optimizer is wanted."""
        return fit(self, task, len(self.specs) - 1, **fit.regime.with_adam(self.lr))

    def end_task(self, task: Task, fit: Fit) -> None:
        """Keep the bits and the normalization."""
        index = len(self.specs) - 1
        self.masks.write(index, self.switches())
        self.norms.store(index, self.net)

    # Use -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Weights times their mask; the gradient goes straight through to the scores."""
        if task < len(self.specs) - 1:
            return self.predictor(task)(x)
        weights = {}
        for (name, on), score in zip(self.switches().items(), self.scores, strict=True):
            rank = self.rank(score)
            weights[name] = self._weight(name) * (on.to(rank.dtype) + (rank - rank.detach()))
        logits: Tensor = self.heads[task](functional_call(self.net, weights, (x,)))
        return logits

    def task_net(self, task: int) -> nn.Module:
        """A task's own network: weights that are off are zero."""
        newest = task == len(self.specs) - 1
        masks = self.switches() if newest else self.masks.read(task)
        weights = {name: torch.where(mask, self._weight(name), 0.0) for name, mask in masks.items()}
        return plain_copy(self.net, weights if newest else weights | self.norms.read(task))

    def predictor(self, task: int) -> Predictor:
        """The task's own network and head."""
        self.eval()
        net, head = self.task_net(task), self.heads[task]
        return lambda x: head(net(x))

    def overhead(self) -> Overhead:
        """A bit per weight and task, each later task's normalization and buffers; in training also the scores."""
        kept = self.masks.bits() + self.norms.bits()
        return Overhead(training=kept + bits(*self.scores), inference=kept)
