"""Hard attention to the task: a nearly binary gate on every feature."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from zeroforget.axes.find import find_axes
from zeroforget.axes.labels import Concat, Label, Named, Product
from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits, finite
from zeroforget.methods.per_task import TaskNorms, norm_tensors, plain_copy
from zeroforget.training import Fit, FitLog
from zeroforget.training.evaluate import Predictor

_LARGEST = 6.0
"""Embeddings stay within ±this: beyond, a gate's gradient is lost."""
_STEEPEST = 50.0
"""cosh overflows soon after this."""


class Hat(Method):
    """Learn with each task which features it needs; what they needed of the network then hardly learns any more.

    Serrà et al., "Overcoming Catastrophic Forgetting with Hard Attention to the Task", ICML 2018. Gates are sigmoids
    that become steeper within every epoch: 1 - a is nearly, not exactly, zero, so a little is forgotten. The features
    are the axes found by watching the network run. Normalization is each task's own, and so is every other buffer.

    Options:
        strength: c, how much a task pays for features that no task before it uses.
        smax: how steep the gates are in the end.
        clip: bound on the norm of the gradient, which compensation makes large.
        start: where embeddings start on average. At 0, as published, half of all features start switched off, which
            leaves small networks too few.
        keep: paths of modules whose features get no gates, where the network cannot be followed; they are held fast
            after the first task.
    """

    name = "hat"
    family = "mask-based"
    overhead_formula = "1 float per feature and task"
    graph_safe = True
    tradeoff = "strength"

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        strength: float = 0.75,
        smax: float = 400.0,
        clip: float = 10000.0,
        start: float = 1.0,
        keep: Sequence[str] = (),
    ) -> None:
        super().__init__(net, example)
        if not 1 < smax < math.inf:
            raise ValueError(f"smax is how steep the gates become, so above 1, not {smax}")
        if not clip > 0:
            raise ValueError(f"clip bounds the norm of the gradient, so it must be above 0, not {clip}")
        finite(0, strength=strength)
        finite(start=start)
        self.strength = strength
        self.smax = smax
        self.clip = clip
        self.start = start
        axes = find_axes(net, example, keep=keep)
        self.sizes = dict(axes.sizes)
        self.output = axes.output
        own = norm_tensors(net)
        self.labels = {name: axes.tensors[name] for name, _ in net.named_parameters() if name not in own}
        # A layer reads gated features: W (a ⊙ h) is (W · diag a) h, so gates can be folded into the weights that read.
        layers = set(axes.layers)
        self.readers = [n for n, label in self.labels.items() if len(label) > 1 and n.rpartition(".")[0] in layers]
        # While a task is learned, those of linear layers are not: they are larger than the features that they read.
        self.linear = {n: n.rpartition(".")[0] for n in self.readers if _called_alone(net, n)}
        self.embeddings = nn.ParameterList()
        self.norms = TaskNorms(net)
        self._decay = 0.0
        self._bound = clip
        self._one_step = False
        self._held: dict[str, Tensor] = {}
        self.register_buffer("steepness", example.new_tensor(smax), persistent=False)

    # Structure -------------------------------------------------------------------------------------------------

    def add_task(self, spec: TaskSpec) -> None:
        """A head, a number for each feature, and normalization."""
        super().add_task(spec)
        empty = self.get_buffer("example").new_empty(sum(self.sizes.values()))
        self.embeddings.append(nn.Parameter(self.start + torch.randn_like(empty)))
        self.norms.add(self.net)

    def drop_task(self) -> None:
        """Take them back."""
        super().drop_task()
        self.embeddings = nn.ParameterList(list(self.embeddings)[:-1])
        self.norms.drop()

    # Gates -----------------------------------------------------------------------------------------------------

    def attention(self, task: int, steepness: Tensor | float | None = None) -> Tensor:
        """a = σ(s·e) for every feature (eq. 1)."""
        return torch.sigmoid((self.smax if steepness is None else steepness) * self.embeddings[task])

    def used(self) -> Tensor:
        """How much the tasks before the newest need each feature: the largest of their gates."""
        with torch.no_grad():
            before = [self.attention(task) for task in range(len(self.specs) - 1)]
            return torch.stack(before).amax(0) if before else torch.zeros_like(self.embeddings[-1])

    def by_axis(self, features: Tensor) -> dict[str, Tensor]:
        """One vector for all features as one for each axis."""
        return dict(zip(self.sizes, features.split(list(self.sizes.values())), strict=True))

    # Learning --------------------------------------------------------------------------------------------------

    def trainable(self) -> Iterable[nn.Parameter]:
        """The network, the newest gates and the newest head."""
        yield from self.net.parameters()
        yield self.embeddings[-1]
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """The same, statistics included."""
        return self.tensors_of("net", f"embeddings.{len(self.specs) - 1}", self.newest_head())

    def train_task(self, task: Task, fit: Fit) -> FitLog:
        """What older tasks need stands still meanwhile."""
        if fit.regime.decays_apart:
            raise ValueError(
                f"hat holds weights by their gradients, and {fit.regime.optimizer}'s weight decay goes past these: old "
                "tasks would fade. Use sgd, or set regime.options.weight_decay to 0"
            )
        self.hold()
        # One image that is left over joins the batch before it.
        self._one_step = len(task.train) <= fit.regime.batch_size + (fit.regime.batch_size > 1)
        self._decay = fit.regime.weight_decay
        # The regime's bound is ours to apply: it must come before decay is made up for.
        self._bound = min(self.clip, math.inf if fit.regime.clip is None else fit.regime.clip)
        return fit(self, task, len(self.specs) - 1, clip=None)

    def hold(self) -> None:
        """From now on hold what the tasks before the newest need."""
        self._used = self.used()
        self._held = self.held() if len(self.specs) > 1 else {}

    def before_step(self, done: float) -> None:
        """Gates become steeper within each epoch (eq. 3); where that is one step, they are steep at once."""
        done = 1.0 if self._one_step else done
        self.get_buffer("steepness").fill_(1 / self.smax + (self.smax - 1 / self.smax) * done)

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """Cross-entropy, and a price on features that were free (eqs. 5 and 6)."""
        gates = self.attention(task, self.get_buffer("steepness"))
        free = 1 - self._used
        price = (gates * free).sum() / free.sum().clamp_min(1e-8)
        return self.cross_entropy(self._gated(x, task, gates), y) + self.strength * price

    @torch.no_grad()
    def after_backward(self) -> None:
        """Hold what old tasks use, and undo what steep gates do to the gradient of their embeddings."""
        e = self.embeddings[-1]
        if e.grad is not None:
            e.grad *= compensation(e, self.get_buffer("steepness"), self.smax)  # eq. (4)
        held = [(self.net.get_parameter(name), share) for name, share in self._held.items()]
        for weight, share in held:
            if weight.grad is not None:
                weight.grad *= 1 - share  # eq. (2)
        nn.utils.clip_grad_norm_(self.trainable(), self._bound)
        # Weight decay comes with the optimizer's step and would pull at what is held, and at the gates: as much is
        # taken from their gradients beforehand, so that eq. (2) holds for the whole step.
        for weight, share in [*held, (e, torch.ones_like(e))] if self._decay else ():
            if weight.grad is not None:
                weight.grad.addcmul_(share, weight, value=-self._decay)

    def held(self) -> dict[str, Tensor]:
        """How firmly each weight is held, from 0 to 1: the least of what old tasks need of the features it joins."""
        gates = self.by_axis(self._used)
        return {
            name: least([gates_of(label, gates, self._used) for label in labels], self._used)
            for name, labels in self.labels.items()
        }

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep embeddings where gates still have a gradient."""
        self.embeddings[-1].clamp_(-_LARGEST, _LARGEST)

    def end_task(self, task: Task, fit: Fit) -> None:
        """Keep this task's normalization."""
        self.norms.store(len(self.specs) - 1, self.net)

    # Use -------------------------------------------------------------------------------------------------------

    def _folded(self, features: Tensor, but: Container[str] = ()) -> dict[str, Tensor]:
        """The weights that read features, times the gates of what they read."""
        gates = self.by_axis(features)
        out = {}
        for name in self.readers:
            if name not in but:
                weight, labels = self.net.get_parameter(name), self.labels[name]
                along = gates_of(labels[1], gates, features)
                out[name] = weight * along.view(-1, *(1,) * (weight.dim() - 2))
        return out

    def _gated(self, x: Tensor, task: int, features: Tensor) -> Tensor:
        gates = self.by_axis(features)
        with ExitStack() as hooks:
            for name, path in self.linear.items():
                along = gates_of(self.labels[name][1], gates, features)
                hooks.enter_context(_gates_before(self.net.get_submodule(path), along))
            out = functional_call(self.net, self._folded(features, but=self.linear), (x,))
        logits: Tensor = self.heads[task](out * gates_of(self.output, gates, features))
        return logits

    def forward(self, x: Tensor, task: int) -> Tensor:
        """The logits with gates as steep as they get."""
        if task < len(self.specs) - 1:
            return self.predictor(task)(x)
        return self._gated(x, task, self.attention(task))

    @torch.no_grad()
    def predictor(self, task: int) -> Predictor:
        """A network of the task's own, its gates in the weights."""
        self.eval()
        features = self.attention(task)
        norms = {} if task == len(self.specs) - 1 else self.norms.read(task)
        net, head = plain_copy(self.net, self._folded(features) | norms), self.heads[task]
        gates = gates_of(self.output, self.by_axis(features), features)
        return lambda x: head(net(x) * gates)

    def overhead(self) -> Overhead:
        """A number for each feature and task, and each later task's normalization and buffers."""
        kept = bits(*self.embeddings) + self.norms.bits()
        return Overhead(training=kept, inference=kept)


def _called_alone(net: nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of one plain linear layer, and nothing else uses it."""
    path, _, kind = name.rpartition(".")
    parameter = net.get_parameter(name)
    users = [n for n, p in net.named_parameters(remove_duplicate=False) if p is parameter]
    return kind == "weight" and type(net.get_submodule(path)) is nn.Linear and users == [name]


def _gates_before(layer: nn.Module, gates: Tensor) -> RemovableHandle:
    """Until it is removed, the layer reads its input times the gates."""

    def gated(layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[Any, Any]:
        (x,) = (*given, *named.values())
        return (x * gates.to(x.dtype),), {}

    return layer.register_forward_pre_hook(gated, with_kwargs=True)


def compensation(embedding: Tensor, steepness: Tensor | float, smax: float) -> Tensor:
    """What an embedding's gradient is multiplied by so that it is that of a gate of steepness 1 (eq. 4)."""
    steep = torch.cosh((steepness * embedding).clamp(-_STEEPEST, _STEEPEST)) + 1
    return smax / steepness * steep / (torch.cosh(embedding) + 1)


def gates_of(label: Label, gates: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """The gate of each element of a dimension; what is fixed is always on."""
    match label:
        case int():
            return like.new_ones(label)
        case Named(name):
            return gates[name]
        case Concat(parts):
            return torch.cat([gates_of(part, gates, like) for part in parts])
        case Product(factors):
            out = gates_of(factors[0], gates, like)
            for factor in factors[1:]:
                out = (out[:, None] * gates_of(factor, gates, like)[None, :]).flatten()
            return out


def least(along: Sequence[Tensor], like: Tensor) -> Tensor:
    """For each place of a tensor the least of what its places along each dimension say; 1 without dimensions."""
    out = like.new_ones(())
    for values in along:
        out = torch.minimum(out.unsqueeze(-1), values)
    return out
