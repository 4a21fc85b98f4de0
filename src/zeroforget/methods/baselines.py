"""What others are compared with: fine-tuning, which forgets; freezing, which learns once; and joint training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.data import Split, Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits
from zeroforget.training import Fit, FitLog
from zeroforget.training.evaluate import Predictor
from zeroforget.training.seeding import seeded


class Finetuning(Method):
    """Learn each task from where the last one ended, with cross-entropy on the new data and nothing else.

    The lower bound that every other method is compared with.
    """

    name = "finetuning"
    graph_safe = True


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


class Joint(Method):
    """Learn each task together with all data of the tasks before it: the upper bound, and the only one to see the past.

    Caruana, "Multitask learning", Machine Learning 1997. A batch goes through the network once; each image is judged by
    the head of its own task.

    Options:
        restart: begin at the first network again for every task, instead of going on from the last one.
        begin: the task, counted from 1, with which training begins; those before it only wait, and are learned then.
            With the number of all tasks, one training from scratch on all data.
    """

    name = "joint"
    uses_past_data = True
    graph_safe = True

    def __init__(self, net: nn.Module, example: Tensor, *, restart: bool = False, begin: int = 1) -> None:
        super().__init__(net, example)
        if begin < 1:
            raise ValueError(f"begin is a task, counted from 1, not {begin}")
        self.restart = restart
        self.begin = begin
        self.start = copy.deepcopy(net).requires_grad_(False) if restart else None
        self._past: tuple[Task, ...] | None = None

    def add_task(self, spec: TaskSpec) -> None:
        """All heads learn."""
        super().add_task(spec)
        self.heads.requires_grad_(True)
        self._number_classes()

    def drop_task(self) -> None:
        """Take it back."""
        super().drop_task()
        self._number_classes()

    def _number_classes(self) -> None:
        """The task of each class, counted through all heads: on the device, as every step needs it."""
        owners = [i for i, spec in enumerate(self.specs) for _ in range(spec.classes)]
        device = self.get_buffer("example").device
        self.register_buffer("owners", torch.tensor(owners, dtype=torch.int64, device=device), persistent=False)

    def learn(self, task: Task, fit: Fit, past: Sequence[Task] = ()) -> FitLog:
        """Learn this and all past tasks as one."""
        if [t.name for t in past] != [spec.name for spec in self.specs]:
            raise ValueError(
                f"joint needs the data of every task so far ({', '.join(s.name for s in self.specs) or 'none'}), "
                f"in order; it was given {', '.join(t.name for t in past) or 'none'}"
            )
        self._past = tuple(past)
        try:
            return super().learn(task, fit)
        finally:
            self._past = None

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """One task out of all of them."""
        if len(self.specs) < self.begin:
            return FitLog(stopped=f"waits for task {self.begin}")
        if self.restart:
            self._begin_again(fit)
        return fit(self, merged([*(self._past or ()), task]), len(self.specs) - 1)

    def _begin_again(self, fit: Fit) -> None:
        if self.start is not None:
            self.net.load_state_dict(self.start.state_dict())
        with seeded("restart", fit.seed, len(self.specs)):
            for head in self.heads:
                head.reset_parameters()  # type: ignore[operator]

    @property
    def merging(self) -> bool:
        """Whether labels count through all tasks: only while the merged task is learned."""
        return self._past is not None

    def trainable(self) -> Iterable[nn.Parameter]:
        """The network and every head."""
        yield from self.net.parameters()
        yield from self.heads.parameters()

    def moving(self) -> dict[str, Tensor]:
        """All but the network to restart from."""
        return {name: t for name, t in self.state_dict().items() if not name.startswith("start.")}

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """The mean over all images of the cross-entropy of each one's own head."""
        return self.cross_entropy(self._all(x), y) if self.merging else super().loss(x, y, task)

    def score(self, predictor: Predictor, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]:
        """The same for validation."""
        if not self.merging:
            return super().score(predictor, x, y, task)
        logits = self.own(self._all(x), y)
        return F.cross_entropy(logits, y, reduction="none"), logits.argmax(1) == y

    def _all(self, x: Tensor) -> Tensor:
        """The logits of all heads side by side."""
        features = self.net(x)
        return torch.cat([head(features) for head in self.heads], 1)

    def own(self, logits: Tensor, y: Tensor) -> Tensor:
        """While all tasks are learned as one: minus infinity wherever a head is not that of the image's task."""
        if not self.merging:
            return logits
        owner = self.get_buffer("owners")
        return logits.masked_fill(owner[None, :] != owner[y][:, None], -torch.inf)

    def overhead(self) -> Overhead:
        """The network to restart from, if it restarts; images are not counted."""
        kept = () if self.start is None else (*self.start.parameters(), *self.start.buffers())
        return Overhead(training=bits(*kept))


def merged(tasks: Sequence[Task]) -> Task:
    """One task out of many, named after the last; the labels of each come after those of the one before."""
    last = tasks[-1]
    if odd := [t.name for t in tasks if t.prepare != last.prepare]:
        raise ValueError(
            f"joint puts images of all tasks into one batch, but '{odd[0]}' and '{last.name}' are prepared "
            "differently; give them the same mean, std, crop, pad and flip"
        )
    offsets = [0]
    for task in tasks[:-1]:
        offsets.append(offsets[-1] + len(task.classes))
    train = Split.merge([t.train for t in tasks], offsets)
    val = Split.merge([t.val for t in tasks], offsets)
    test = Split.merge([t.test for t in tasks], offsets)
    classes = tuple(f"{t.name}/{name}" for t in tasks for name in t.classes)
    return Task(last.name, classes, train, val, test, last.prepare)
