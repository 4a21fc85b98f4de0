"""Methods that stay near the old weights, each as firmly as it mattered: EWC, MAS, SI and SSL."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zeroforget.axes.trace import in_eval
from zeroforget.data import Task
from zeroforget.methods.activity import Activity
from zeroforget.methods.base import Overhead, bits, finite
from zeroforget.methods.importance import Anchored, Kept, checked, fisher, per_sample_moments, samples_of, squared_norm
from zeroforget.training import Fit
from zeroforget.training.seeding import generator


class Ewc(Anchored):
    """Stay near the old weights, each as firmly as the Fisher information says that it mattered.

    Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017. One anchor and the running
    mean of the tasks' Fisher diagonals are kept, so the memory does not grow with the tasks.

    Options:
        strength: λ, how firmly old weights are held.
        samples: how many training images estimate the Fisher information; None takes all.
        labels: "true" for the empirical Fisher, "sampled" for labels drawn from the model itself.
    """

    name = "ewc"
    tradeoff = "strength"

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        strength: float = 5000.0,
        samples: int | None = None,
        labels: str = "true",
    ) -> None:
        checked(strength, samples, labels)
        super().__init__(net, example)
        self.strength = strength
        self.samples = samples
        self.labels = labels

    @property
    def firmness(self) -> float:
        """λ/2 Σ F (θ − θ*)², eq. (3)."""
        return self.strength / 2

    def end_task(self, task: Task, fit: Fit) -> None:
        """F ← (F · tasks before + F of this task) / tasks now."""
        index = len(self.specs) - 1
        data = samples_of(task, fit, index, self.samples)
        draws = generator("fisher", fit.seed, index)
        names = [f"net.{name}" for name in self.weights()]
        now = fisher(self, names, data, index, labels=self.labels, draws=draws)
        self.consolidate(
            {name: (self.importance[name] * index + now[f"net.{name}"]) / (index + 1) for name in self.weights()}
        )


class Mas(Anchored):
    """Stay near the old weights, each as firmly as the network's output is sensitive to it: no labels are needed.

    Aljundi et al., "Memory aware synapses: learning what (not) to forget", ECCV 2018.

    Options:
        strength: λ, how firmly old weights are held.
        samples: how many training images estimate the sensitivity; None takes all.
    """

    name = "mas"
    tradeoff = "strength"

    def __init__(self, net: nn.Module, example: Tensor, *, strength: float = 1.0, samples: int | None = None) -> None:
        checked(strength, samples)
        super().__init__(net, example)
        self.strength = strength
        self.samples = samples

    @property
    def firmness(self) -> float:
        """λ Σ Ω (θ − θ*)², eq. (3)."""
        return self.strength

    def end_task(self, task: Task, fit: Fit) -> None:
        """Ω grows by the mean absolute gradient of the squared output, eq. (2)."""
        index = len(self.specs) - 1
        data = samples_of(task, fit, index, self.samples)
        names = [f"net.{name}" for name in self.weights()]
        now = per_sample_moments(self, names, data, squared_norm, index, power="abs")
        self.consolidate({name: self.importance[name] + now[f"net.{name}"] for name in self.weights()})


class Si(Anchored):
    """Stay near the old weights, each as firmly as its own path through training made the loss fall.

    Zenke et al., "Continual learning through synaptic intelligence", ICML 2017.

    Options:
        strength: c, how firmly old weights are held.
        damping: ξ, which bounds the importance of weights that hardly moved.
    """

    name = "si"
    tradeoff = "strength"

    def __init__(self, net: nn.Module, example: Tensor, *, strength: float = 0.1, damping: float = 0.1) -> None:
        if not 0 < damping < math.inf:
            raise ValueError(f"damping must be positive, not {damping}: it keeps the importance finite")
        finite(0, strength=strength)
        super().__init__(net, example)
        self.strength = strength
        self.damping = damping
        self.path = Kept({name: torch.zeros_like(p) for name, p in self.weights().items()})
        self._step: dict[str, tuple[Tensor, Tensor]] = {}  # gradient and place just before a step

    @property
    def firmness(self) -> float:
        """c Σ Ω (θ − θ*)², eq. (4)."""
        return self.strength

    @torch.no_grad()
    def after_backward(self) -> None:
        """The path integral wants the gradient of the loss alone, and the whole step: from here on."""
        moving = {name: p for name, p in self.weights().items() if p.grad is not None}
        self._step = {name: (p.grad.clone(), p.detach().clone()) for name, p in moving.items() if p.grad is not None}

    @torch.no_grad()
    def after_step(self) -> None:
        """ω −= g · Δθ, eq. (3), where the pull has joined in."""
        super().after_step()
        weights = self.weights()
        for name, (gradient, before) in self._step.items():
            self.path[name].sub_(gradient * (weights[name] - before))
        self._step = {}

    def end_task(self, task: Task, fit: Fit) -> None:
        """Ω += ω / (Δ² + ξ), eq. (5), where ω is positive; the path starts again from nothing."""
        grown = {}
        for name, p in self.weights().items():
            moved = (p.detach() - self.anchor[name]).square()
            grown[name] = self.importance[name] + (self.path[name] / (moved + self.damping)).relu()
        self.consolidate(grown)
        self.path.put({name: torch.zeros_like(value) for name, value in grown.items()})

    def moving(self) -> dict[str, Tensor]:
        """The network, the newest head, and the path travelled so far."""
        return super().moving() | {f"path.{n}": t for n, t in self.path.state_dict().items()}

    def overhead(self) -> Overhead:
        """Importance, anchor and path, while a task is learned."""
        return Overhead(training=super().overhead().training + bits(*self.path.buffers()))


class Ssl(Mas):
    """MAS, and neurons that inhibit their neighbours: a sparse code leaves room for the tasks to come.

    Aljundi et al., "Selfless sequential learning", ICLR 2019. Neurons that mattered for earlier tasks are inhibited
    less. It acts on the ReLU outputs of hidden linear layers; in a network that has none, on the channels of
    convolutions, each averaged over its positions.

    Options:
        strength: λ of MAS, how firmly old weights are held.
        samples: how many training images estimate importance; None takes all.
        sparsity: the weight of the inhibition between neurons.
        reach: σ, how far inhibition reaches, as a share of the layer's width.
    """

    name = "ssl"
    overhead_formula = "1 float per feature and parameter"

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        strength: float = 4.0,
        samples: int | None = None,
        sparsity: float = 1e-6,
        reach: float = 1 / 6,
    ) -> None:
        finite(0, sparsity=sparsity)
        if not 0 < reach < math.inf:
            raise ValueError(f"reach must be positive, not {reach}")
        super().__init__(net, example, strength=strength, samples=samples)
        self.sparsity = sparsity
        self.reach = reach
        with torch.no_grad(), in_eval(net), Activity() as seen:
            net(self.get_buffer("example"))
        if not seen.hidden():
            raise ValueError("ssl needs a ReLU after a linear or convolutional layer; this network has none")
        self.neurons = Kept({str(i): h.new_zeros(h.shape[1]) for i, h in enumerate(seen.hidden())})

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """MAS's loss and the inhibition of every hidden layer."""
        with Activity() as seen:
            loss = super().loss(x, y, task)
        for i, h in enumerate(seen.hidden()):
            loss = loss + self.sparsity * inhibition(_pooled(h), self.neurons[str(i)], self.reach * h.shape[1])
        return loss

    def end_task(self, task: Task, fit: Fit) -> None:
        """MAS's importance of weights, and α: that of neurons, the mean absolute gradient of the squared output."""
        grown = {name: self.neurons[name].clone() for name in self._layers()}
        with in_eval(self):
            for x, _ in samples_of(task, fit, len(self.specs) - 1, self.samples):
                with Activity() as seen:
                    outputs = self(x, len(self.specs) - 1)
                # What only frozen layers compute has no gradient, and nothing can inhibit it.
                learned = {str(i): h for i, h in enumerate(seen.hidden()) if h.requires_grad}
                gradients = torch.autograd.grad(outputs.square().sum(), list(learned.values())) if learned else ()
                for name, gradient in zip(learned, gradients, strict=True):
                    positions = gradient.flatten(2).sum(2) if gradient.dim() > 2 else gradient
                    grown[name] += positions.abs().sum(0) / self._count(task)
        super().end_task(task, fit)
        self.neurons.put(grown)

    def _layers(self) -> list[str]:
        return [name for name, _ in self.neurons.named_buffers()]

    def _count(self, task: Task) -> int:
        return min(len(task.train), self.samples or len(task.train))

    def overhead(self) -> Overhead:
        """MAS's, and a float for each neuron that is inhibited."""
        return Overhead(training=super().overhead().training + bits(*self.neurons.buffers()))


def _pooled(h: Tensor) -> Tensor:
    return h.flatten(2).mean(2) if h.dim() > 2 else h


def inhibition(h: Tensor, importance: Tensor, sigma: float) -> Tensor:
    """1/M Σ_{i≠j} e^{−(α_i+α_j)} e^{−(i−j)²/2σ²} Σ_m h_i h_j for the activities h (M samples, neurons)."""
    h = h.to(torch.promote_types(h.dtype, torch.float32))  # places beyond 256 are not exact in bfloat16
    place = torch.arange(h.shape[1], device=h.device, dtype=h.dtype)
    near = torch.exp(-(place[:, None] - place[None, :]).square() / (2 * sigma**2)).fill_diagonal_(0)
    free = h * torch.exp(-importance)
    with torch.autocast(h.device.type, enabled=False):
        return ((free @ near) * free).sum() / len(h)
