"""A score behind every weight, and a binary mask of each task made of the scores: WSN and SupSup."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, adams_rate, bits, learn_only
from zeroforget.methods.importance import Kept
from zeroforget.methods.per_task import (
    BitMasks,
    FrozenWeights,
    TaskNorms,
    coded_bits,
    maskable,
    norm_tensors,
    overwrite,
    plain_copy,
    task_tensors,
)
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
