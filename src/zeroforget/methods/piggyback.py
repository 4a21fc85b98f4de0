"""Piggyback: one binary mask a task over the weights of a backbone that never moves."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits, finite, learn_only
from zeroforget.methods.per_task import BitMasks, TaskNorms, maskable, norm_tensors, overwrite, plain_copy
from zeroforget.training import Fit, FitLog
from zeroforget.training.evaluate import Predictor


class Piggyback(Method):
    """Switch single weights of a fixed backbone on and off: a real number behind each switch is learned for it.

    Mallya, Davis and Lazebnik, "Piggyback: Adapting a Single Network to Multiple Tasks by Learning to Mask Weights",
    ECCV 2018. The backbone is what the first task leaves, or the network as it was given. Normalization is each task's
    own, starting from the backbone's; so is every other buffer. What was given frozen stays as it was, without masks.

    Options:
        pretrained: the network as given is the backbone, so the first task too gets a mask.
        init: where the real masks start.
        threshold: a weight is on where its real mask is above this.
        mask_lr: learning rate of the real masks (Adam).
        lr: learning rate of the head and the normalization (Adam).
    """

    name = "piggyback"
    family = "mask-based"
    zero_forgetting = True
    graph_safe = True
    needs_backbone = True
    overhead_formula = "1 bit per parameter and task"

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        pretrained: bool = False,
        init: float = 1e-2,
        threshold: float = 5e-3,
        mask_lr: float = 1e-4,
        lr: float = 1e-2,
    ) -> None:
        super().__init__(net, example)
        finite(init=init, threshold=threshold)
        if not (0 < lr < math.inf and 0 < mask_lr < math.inf):
            raise ValueError(f"learning rates must be positive; got lr={lr}, mask_lr={mask_lr}")
        self.pretrained = pretrained
        self.threshold = threshold
        self.init = init
        self.lr = lr
        # Adam's steps do not depend on the gradient's scale: a mask kept in units of `unit` moves by mask_lr when all
        # else moves by lr, in one optimizer.
        self.unit = mask_lr / lr
        self.masks = BitMasks(maskable(net))
        self.norms = TaskNorms(net)
        self.real = nn.ParameterList()
        self._learned = [p for p in net.parameters() if p.requires_grad]

    # Structure -------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec) -> None:
        """A head and normalization; after the backbone's task also a mask, its real numbers at their start."""
        super().add_task(spec)
        self.norms.add(self.net)
        if not self._masked(len(self.specs) - 1):
            return
        weights = [self.net.get_parameter(name) for name in self.masks.shapes]
        if not len(self.real):
            self.real = nn.ParameterList([nn.Parameter(torch.empty_like(weight)) for weight in weights])
        for real in self.real:
            nn.init.constant_(real, self.init / self.unit)
        self.masks.add(self.get_buffer("example").device)
        overwrite(self.net, self.norms.read(0))
        learn_only(self._learned, self.trainable())

    def drop_task(self) -> None:
        """Take them back."""
        if self._masked(len(self.specs) - 1):
            self.masks.drop()
            if not self.masks.tasks:
                self.real = nn.ParameterList()
        super().drop_task()
        self.norms.drop()
        learn_only(self._learned, self.trainable() if self.specs else self._learned)

    def _masked(self, task: int) -> bool:
        return self.pretrained or task > 0

    # Learning --------------------------------------------------------------------------------------------------

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """The backbone under the common regime; masks with Adam."""
        index = len(self.specs) - 1
        if not self._masked(index):
            return fit(self, task, index)
        return fit(self, task, index, **fit.regime.with_adam(self.lr))

    def trainable(self) -> Iterable[nn.Parameter]:
        """The backbone while it is learned; afterwards real masks, normalization and the head."""
        if not self._masked(len(self.specs) - 1):
            yield from super().trainable()
            return
        yield from self.real
        yield from (t for t in norm_tensors(self.net).values() if isinstance(t, nn.Parameter))
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """The network (for its normalization), the real masks and the newest head."""
        return self.tensors_of("net", "real", self.newest_head())

    def switches(self) -> dict[str, Tensor]:
        """Which weights are on for the task being learned."""
        return {n: real * self.unit > self.threshold for n, real in zip(self.masks.shapes, self.real, strict=True)}

    def end_task(self, task: Task, fit: Fit) -> None:
        """Keep the bits and the normalization."""
        index = len(self.specs) - 1
        self.norms.store(index, self.net)
        if self._masked(index):
            self.masks.write(self._slot(index), self.switches())

    # Use -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Weights times their switches; the gradient goes straight through to the real masks."""
        if task < len(self.specs) - 1:
            return self.predictor(task)(x)
        if not self._masked(task):
            return super().forward(x, task)
        weights = {}
        for (name, on), real in zip(self.switches().items(), self.real, strict=True):
            weight = self.net.get_parameter(name).detach()
            weights[name] = weight * (on.to(weight.dtype) + (real - real.detach()))
        logits: Tensor = self.heads[task](functional_call(self.net, weights, (x,)))
        return logits

    def task_net(self, task: int) -> nn.Module:
        """A task's own network: weights that are off are zero."""
        newest = task == len(self.specs) - 1
        tensors = {} if newest else self.norms.read(task)
        if self._masked(task):
            masks = self.switches() if newest else self.masks.read(self._slot(task))
            tensors |= {n: torch.where(mask, self.net.get_parameter(n), 0.0) for n, mask in masks.items()}
        return plain_copy(self.net, tensors)

    def predictor(self, task: int) -> Predictor:
        """The task's own network and head."""
        self.eval()
        net, head = self.task_net(task), self.heads[task]
        return lambda x: head(net(x))

    def overhead(self) -> Overhead:
        """A bit per weight and masked task, each later task's normalization and buffers; in training the real masks."""
        kept = self.masks.bits() + self.norms.bits()
        return Overhead(training=kept + bits(*self.real), inference=kept)

    def _slot(self, task: int) -> int:
        return task if self.pretrained else task - 1
