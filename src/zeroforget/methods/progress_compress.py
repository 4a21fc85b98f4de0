"""Progress and compress: learn in an active column, then distil it into a knowledge base."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.axes.trace import in_eval
from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits, finite
from zeroforget.methods.columns import ColumnStart, connect, run
from zeroforget.methods.importance import Kept, enough, fisher, samples_of
from zeroforget.training import Fit, FitLog
from zeroforget.training.evaluate import Predictor
from zeroforget.training.log import joined


class ProgressCompress(Method):
    """An active column learns each task with a view of the knowledge base, which then learns from it under online EWC.

    Schwarz et al., "Progress & Compress: A scalable framework for continual learning", ICML 2018. The knowledge base
    alone answers, with a head for each task; the active column is free again for the next one.

    Options:
        strength: λ, how firmly the knowledge base's old weights are held while it learns from the active column.
        decay: γ, how much of the importance of older tasks is kept.
        reset: whether the active column starts afresh for every task, or goes on from where it is.
        samples: how many training images estimate the Fisher information; None takes all.
    """

    name = "progress-compress"
    family = "distillation"
    overhead_formula = "extra network"
    tradeoff = "strength"
    graph_safe = True

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        strength: float = 100.0,
        decay: float = 0.9,
        reset: bool = True,
        samples: int | None = None,
    ) -> None:
        super().__init__(net, example)
        if not 0 < decay <= 1:
            raise ValueError(f"decay is how much of old importance is kept, above 0 and at most 1, not {decay}")
        finite(0, strength=strength)
        self.strength = strength
        self.decay = decay
        self.reset = reset
        self.samples = enough(samples)
        self.start = ColumnStart(net)
        self.active = copy.deepcopy(net)
        self.start.renew(self.active)
        self.base = copy.deepcopy(net).requires_grad_(False)
        """The knowledge base as the last task left it: what laterals read, and the anchor of its weights."""
        self.importance = Kept({name: torch.zeros_like(p) for name, p in net.named_parameters()})
        self.laterals = nn.ModuleList()
        self.active_head: nn.Module = nn.Identity()
        self._progressing = False

    # Structure -------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec) -> None:
        """A head in the knowledge base; the active column, its laterals and its head start again."""
        super().add_task(spec)
        self._shape_active(spec)
        if self.reset and len(self.specs) > 1:
            self.start.renew(self.active)

    def drop_task(self) -> None:
        """The active column again has the head of the task before."""
        super().drop_task()
        if self.specs:
            self._shape_active(self.specs[-1])
        else:
            self.active_head, self.laterals = nn.Identity(), nn.ModuleList()

    def _shape_active(self, spec: TaskSpec) -> None:
        like = self.heads[-1].weight
        assert isinstance(like, Tensor)
        self.active_head = nn.Linear(like.shape[1], spec.classes, device=like.device, dtype=like.dtype)
        with in_eval(self):
            fresh = connect(self._column, self.get_buffer("example"), 1)
        # Without a reset the laterals of the features go on; that of the head has another shape.
        kept = [] if self.reset else list(self.laterals)[:-1]
        self.laterals = nn.ModuleList([*kept, *fresh[len(kept) :]])

    def _column(self, x: Tensor) -> Tensor:
        logits: Tensor = self.active_head(self.active(x))
        return logits

    # Learning --------------------------------------------------------------------------------------------------

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """Progress, then compress."""
        index = len(self.specs) - 1
        self._progressing = True
        try:
            log = fit(self, task, index)
        finally:
            self._progressing = False
        return joined(log, fit(self, task, index))

    def train(self, mode: bool = True) -> Self:
        """Only what learns in this phase is in training mode."""
        super().train(mode)
        self.base.eval()
        for part in (self.net,) if self._progressing else (self.active, self.laterals, self.active_head):
            part.eval()
        return self

    def _learning(self) -> dict[str, nn.Module]:
        if self._progressing:
            return {"active": self.active, "laterals": self.laterals, "active_head": self.active_head}
        return {"net": self.net, self.newest_head(): self.heads[-1]}

    def trainable(self) -> Iterable[nn.Parameter]:
        """The active column while it progresses, the knowledge base while it is compressed."""
        for part in self._learning().values():
            yield from part.parameters()

    def moving(self) -> dict[str, Tensor]:
        """The same, statistics included."""
        return self.tensors_of(*self._learning())

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """Cross-entropy; then KL(active ‖ base) + λ/2 · ‖θ − θ*‖² under γF* (section 3)."""
        if self._progressing:
            return self.cross_entropy(self.ask_active(x), y)
        with torch.no_grad():
            target = self.ask_active(x).log_softmax(1)
        learned = super().forward(x, task).log_softmax(1)
        distilled = F.kl_div(learned, target, reduction="batchmean", log_target=True)
        return distilled + self.strength / 2 * self.distance() if task else distilled

    def ask_active(self, x: Tensor) -> Tensor:
        """The active column's logits for the newest task: its laterals read the knowledge base as it was."""
        with torch.no_grad():
            # The base's head only makes its features an input like those of every layer.
            _, seen = run(lambda x: self.heads[0](self.base(x)), x)
        logits, _ = run(self._column, x, list(self.laterals), [seen])
        return logits

    def distance(self) -> Tensor:
        """Σ γF* (θ − θ*)²."""
        anchor = dict(self.base.named_parameters())
        parts = [(self.importance[n] * (p - anchor[n]).square()).sum() for n, p in self.net.named_parameters()]
        return self.decay * torch.stack(parts).sum() if parts else self.get_buffer("example").new_zeros(())

    def end_task(self, task: Task, fit: Fit) -> None:
        """F* ← γF* + F, and the knowledge base as it is now becomes the anchor."""
        index = len(self.specs) - 1
        names = [name for name, _ in self.net.named_parameters()]
        now = fisher(self, [f"net.{name}" for name in names], samples_of(task, fit, index, self.samples), index)
        self.importance.put({name: self.decay * self.importance[name] + now[f"net.{name}"] for name in names})
        self.base.load_state_dict(self.net.state_dict())

    # Use -------------------------------------------------------------------------------------------------------

    def predictor(self, task: int) -> Predictor:
        """The knowledge base; while the active column learns a task, that column."""
        self.eval()
        if self._progressing and task == len(self.specs) - 1:
            return self.ask_active
        return lambda x: self(x, task)

    def overhead(self) -> Overhead:
        """The active column and its laterals, the anchor and the importance while learning; nothing to serve."""
        parts = (self.active, self.laterals, self.active_head, self.base, self.importance)
        return Overhead(training=sum(bits(*part.parameters(), *part.buffers()) for part in parts))
