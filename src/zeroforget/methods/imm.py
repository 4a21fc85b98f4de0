"""Incremental moment matching: a network for each task, and their average for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits, finite
from zeroforget.methods.importance import Kept, enough, fisher, samples_of
from zeroforget.methods.per_task import overwrite
from zeroforget.training import Fit, FitLog

_EPSILON = 1e-8


class Imm(Method):
    """Learn each task from the last one's weights, held near them; then serve all tasks with the merged weights.

    Lee et al., "Overcoming Catastrophic Forgetting by Incremental Moment Matching", NeurIPS 2017. The merge is the
    mean of the tasks' weights, or the mode of a mixture of Gaussians: each weight counts by its Fisher information.
    Heads are each task's own and are not merged; frozen parameters stay as they were given. Statistics of BatchNorm
    become those of the tasks' mixture: the mean of means, and the mean of variances plus the variance of means.

    Options:
        merge: "mean" or "mode".
        strength: λ of the pull towards the last task's weights. The sources tune it for each data set, from 1e-4 to 1;
            where it is small, short training leaves the merged weights in a worse place than those they came from.
        samples: how many training images estimate the Fisher information of the mode; None takes all.
    """

    name = "imm-mode"
    family = "model-based"
    overhead_formula = "1 float per parameter and task"
    tradeoff = "strength"
    graph_safe = True

    @classmethod
    def names(cls) -> dict[str, dict[str, Any]]:
        """Both ways to merge."""
        return {"imm-mean": {"merge": "mean", "strength": 0.1}, "imm-mode": {"merge": "mode"}}

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        merge: str = "mode",
        strength: float = 1.0,
        samples: int | None = None,
    ) -> None:
        super().__init__(net, example)
        if merge not in {"mean", "mode"}:
            raise ValueError(f"merge is 'mean' or 'mode', not '{merge}'")
        self.merge = merge
        finite(0, strength=strength)
        self.strength = strength
        self.samples = enough(samples)
        self.tasks = nn.ModuleList()
        """Each task's own weights and statistics, before the merge."""
        self.fishers = nn.ModuleList()

    # Structure -------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec) -> None:
        """Room for the task's weights, and for their Fisher information if the mode is wanted."""
        super().add_task(spec)
        self.tasks.append(Kept(self._floats()))
        if self.merge == "mode":
            self.fishers.append(Kept({name: torch.zeros_like(p) for name, p in self._weights().items()}))

    def drop_task(self) -> None:
        """Take it back."""
        super().drop_task()
        del self.tasks[-1]
        if self.merge == "mode":
            del self.fishers[-1]

    # Learning --------------------------------------------------------------------------------------------------

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """Go on from the last task's own weights, not from the merged ones."""
        index = len(self.specs) - 1
        if index:
            overwrite(self.net, {name: self._kept(index - 1)[name] for name in self._floats()})
        return fit(self, task, index)

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """Cross-entropy and the L2-transfer term (section 3.3)."""
        loss = super().loss(x, y, task)
        if not task:
            return loss
        last = self._kept(task - 1)
        return loss + self.strength * sum((p - last[n]).square().sum() for n, p in self._weights().items())

    def moving(self) -> dict[str, Tensor]:
        """The network and the newest head."""
        return self.tensors_of("net", self.newest_head())

    def end_task(self, task: Task, fit: Fit) -> None:
        """Keep this task's weights, then write the merged ones into the network."""
        index = len(self.specs) - 1
        self._kept(index).put(self._floats())
        if self.merge == "mode":
            parameters = [f"net.{name}" for name in self._weights()]
            found = fisher(self, parameters, samples_of(task, fit, index, self.samples), index)
            self._fisher(index).put({name.removeprefix("net."): value for name, value in found.items()})
        overwrite(self.net, self.merged())

    def merged(self) -> dict[str, Tensor]:
        """The network's tensors for all tasks so far."""
        count = len(self.tasks)
        if count == 1:
            return self._floats()
        out, weights = {}, self._weights()
        for name in self._floats():
            values = torch.stack([self._kept(k)[name] for k in range(count)])
            if self.merge == "mean" or name not in weights:
                out[name] = values.mean(0)  # mean-IMM (section 3.1), tasks in equal shares
            else:
                precision = torch.stack([self._fisher(k)[name] for k in range(count)]) + _EPSILON
                out[name] = (precision * values).sum(0) / precision.sum(0)  # mode-IMM (section 3.2)
            if name.endswith("running_var"):
                means = torch.stack([self._kept(k)[name[:-3] + "mean"] for k in range(count)])
                out[name] += means.var(0, correction=0)
        return out

    def _weights(self) -> dict[str, nn.Parameter]:
        """The parameters that learn; one that is tied has one name."""
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def _floats(self) -> dict[str, Tensor]:
        saved = self.net.state_dict().keys()
        buffers = {name: b for name, b in self.net.named_buffers() if name in saved and b.is_floating_point()}
        return dict(self._weights()) | buffers

    def _kept(self, task: int) -> Kept:
        kept = self.tasks[task]
        assert isinstance(kept, Kept)
        return kept

    def _fisher(self, task: int) -> Kept:
        kept = self.fishers[task]
        assert isinstance(kept, Kept)
        return kept

    def overhead(self) -> Overhead:
        """Every task's weights (and Fisher information, for the mode) while learning; nothing to serve."""
        return Overhead(training=bits(*self.tasks.buffers(), *self.fishers.buffers()))
