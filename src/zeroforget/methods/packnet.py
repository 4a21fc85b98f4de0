"""PackNet: several tasks packed into the weights of one network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits, learn_only
from zeroforget.methods.per_task import BitMasks, FrozenWeights, TaskNorms, maskable, norm_tensors, norms, plain_copy
from zeroforget.training import Fit, FitLog, Regime
from zeroforget.training.evaluate import Predictor
from zeroforget.training.log import joined


class PackNet(Method):
    """Train the free weights, give the smallest of them back, retrain the others, and never touch those again.

    Mallya and Lazebnik, "PackNet: Adding Multiple Tasks to a Single Network by Iterative Pruning", CVPR 2018. Task k
    uses the weights of tasks 1 to k. Biases are those of the first task. Buffers and normalization are each task's own;
    normalization may also be frozen with the biases, as in the original. What was given frozen stays as it was.

    Options:
        tasks: how many tasks will come: each gets an equal share of every layer; None: `prune` decides.
        prune: share of its weights that a task gives back when the number of tasks is not known.
        retrain: learning rate of the retraining after pruning, as a share of the regime's.
        retrain_epochs: bound on the epochs of retraining, at least 1; None: the regime's.
        freeze_norms: keep the first task's normalization for all tasks, statistics included.
    """

    name = "packnet"
    family = "mask-based"
    zero_forgetting = True
    graph_safe = True
    overhead_formula = "1 bit per parameter and task"

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        tasks: int | None = None,
        prune: float = 0.5,
        retrain: float = 0.1,
        retrain_epochs: int | None = None,
        freeze_norms: bool = False,
    ) -> None:
        super().__init__(net, example)
        if not 0 <= prune < 1:
            raise ValueError(f"prune is the share of weights given back, from 0 to below 1, not {prune}")
        if tasks is not None and tasks < 1:
            raise ValueError(f"tasks is how many tasks will come, so at least 1, not {tasks}")
        if not retrain > 0:
            raise ValueError(f"retrain is a share of the regime's learning rate, so above 0, not {retrain}")
        if retrain_epochs is not None and retrain_epochs < 1:
            raise ValueError(f"retrain_epochs is at least 1, or None for the regime's epochs, not {retrain_epochs}")
        self.expected = tasks
        self.prune = prune
        self.retrain = retrain
        self.retrain_epochs = retrain_epochs
        self.freeze_norms = freeze_norms
        self.owned = BitMasks(maskable(net))
        self.norms = TaskNorms(net)
        self._learned = [p for p in net.parameters() if p.requires_grad]
        self._hold({})

    # Structure -------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec) -> None:
        """A head, a mask and normalization."""
        super().add_task(spec)
        self.owned.add(self.get_buffer("example").device)
        self.norms.add(self.net)
        learn_only(self._learned, self.trainable())

    def drop_task(self) -> None:
        """Take them back."""
        super().drop_task()
        self.owned.drop()
        self.norms.drop()
        learn_only(self._learned, self.trainable() if self.specs else self._learned)

    # Learning --------------------------------------------------------------------------------------------------

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """Train all that is free, prune, retrain what was kept."""
        index = len(self.specs) - 1
        again = self._retraining(fit.regime)
        taken = self.owned.union(index)
        self._hold({name: ~mask for name, mask in taken.items()})
        log = fit(self, task, index)
        kept = self.prune_weights(index)
        self._hold(kept)
        second = fit(self, task, index, **again)
        self.owned.write(index, kept)
        self._hold({})
        return joined(log, second)

    def _retraining(self, regime: Regime) -> dict[str, Any]:
        """What is different in the second phase."""
        epochs = self.retrain_epochs or regime.epochs
        if regime.warmup >= epochs:
            raise ValueError(
                f"packnet retrains for {epochs} epochs, all of them within the regime's warmup of {regime.warmup:g}; "
                "give it more retrain_epochs, or the regime a shorter warmup"
            )
        return {"lr": regime.lr * self.retrain, "epochs": epochs}

    def _hold(self, free: dict[str, Tensor]) -> None:
        """Of these tensors only the weights marked may move."""
        self._frozen = FrozenWeights(self.net, free)

    @torch.no_grad()
    def prune_weights(self, index: int) -> dict[str, Tensor]:
        """Of this task's weights in each layer zero the smallest; what is left is returned, as masks."""
        kept = {}
        for name, free in self._frozen.free.items():
            weight = self._weight(name)
            count = int(free.sum())
            size = torch.where(free, weight.abs(), -1).flatten()
            largest = size.argsort(descending=True, stable=True)[: round(count * (1 - self._share(index)))]
            mask = torch.zeros_like(size, dtype=torch.bool)
            mask[largest] = True
            kept[name] = mask.view_as(weight)
            weight[free & ~kept[name]] = 0.0
        return kept

    def _share(self, index: int) -> float:
        """How much of what was free is given back."""
        return self.prune if self.expected is None else 1 - 1 / max(1, self.expected - index)

    def _weight(self, name: str) -> nn.Parameter:
        return self.net.get_parameter(name)

    def train(self, mode: bool = True) -> PackNet:
        """Frozen normalization does not even see the batch."""
        super().train(mode)
        if self.freeze_norms and len(self.specs) > 1:
            for _, norm in norms(self.net):
                norm.eval()
        return self

    def trainable(self) -> Iterable[nn.Parameter]:
        """Everything for the first task; then weights, the task's own normalization and its head."""
        if len(self.specs) == 1:
            yield from super().trainable()
            return
        yield from (self._weight(name) for name in self.owned.shapes)
        if not self.freeze_norms:
            yield from (t for t in norm_tensors(self.net).values() if isinstance(t, nn.Parameter))
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """The network and the newest head."""
        return self.tensors_of("net", self.newest_head())

    def after_backward(self) -> None:
        """Weights that may not move have no say in how the others do."""
        if self.coupled:
            self._frozen.silence()

    def after_step(self) -> None:
        """The others' old bits are written back."""
        self._frozen.restore()

    def end_task(self, task: Task, fit: Fit) -> None:
        """Keep this task's normalization."""
        self.norms.store(len(self.specs) - 1, self.net)

    # Use -------------------------------------------------------------------------------------------------------

    def task_net(self, task: int) -> nn.Module:
        """A task's own network: what no task up to it owns is zero."""
        if task == len(self.specs) - 1:
            return plain_copy(self.net, {})
        used = self.owned.union(task + 1)
        weights = {name: torch.where(mask, self._weight(name), 0.0) for name, mask in used.items()}
        return plain_copy(self.net, weights | self.norms.read(task))

    def predictor(self, task: int) -> Predictor:
        """The task's own network and head."""
        self.eval()
        net, head = self.task_net(task), self.heads[task]
        return lambda x: head(net(x))

    def forward(self, x: Tensor, task: int) -> Tensor:
        """While a task is learned the network is used as it is; finished ones run in their own."""
        if task == len(self.specs) - 1:
            return super().forward(x, task)
        return self.predictor(task)(x)

    def overhead(self) -> Overhead:
        """A bit per weight and task, each later task's normalization and buffers; in training also what to put back.

        A weight has one owner, so the owners' numbers, ⌈log₂(T + 1)⌉ bits a weight, would say the same.
        """
        norms, tasks = self.norms.bits(), len(self.specs)
        still = bits(*(self._weight(name) for name in self.owned.shapes))
        owners = tasks.bit_length() * self.owned.count
        kept = self.owned.bits() + norms
        return Overhead(training=kept + still, inference=kept, packed=owners + norms)
