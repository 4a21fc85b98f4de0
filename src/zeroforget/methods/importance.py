"""How much each parameter matters for a task: moments of per-sample gradients, and the methods' common anchor that
pulls every parameter back as firmly as it mattered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from zeroforget.axes.trace import in_eval
from zeroforget.data import Split, Task
from zeroforget.methods.base import Method, Overhead, bits, finite
from zeroforget.training import Fit
from zeroforget.training.evaluate import Predictor, batches
from zeroforget.training.seeding import generator

Batches = Iterable[tuple[Tensor, Tensor]]
Objective = Callable[[Tensor, Tensor], Tensor]
"""A number out of one sample's outputs and its label."""

MEMORY = 2**30
"""How many bytes the gradients of the samples that are looked at together may take; on a GPU with room, more."""


def room(device: torch.device) -> int:
    """`MEMORY`, or a sixteenth of a GPU's (not of what is free, which would make sums depend on who else runs)."""
    whole = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(MEMORY, whole // 16)


def negative_log_likelihood(outputs: Tensor, label: Tensor) -> Tensor:
    """What the Fisher information differentiates."""
    return F.cross_entropy(outputs, label)


def squared_norm(outputs: Tensor, label: Tensor) -> Tensor:
    """What memory aware synapses differentiate: no label is needed."""
    return outputs.square().sum()


def per_sample_moments(
    model: nn.Module,
    names: Sequence[str],
    data: Batches,
    objective: Objective,
    *args: object,
    power: str = "square",
    memory: int | None = None,
) -> dict[str, Tensor]:
    """The mean over samples of the squared ("square") or absolute ("abs") gradient of `objective`.

    Gradients are taken for each sample by itself, in eval mode, many samples at once (if the network allows that) but
    never more than `memory` bytes of them (None: as many as there is `room` for). `names` are parameters of `model`,
    which is called as `model(x, *args)`.
    """
    measure = {"square": torch.square, "abs": torch.abs}.get(power)
    if measure is None:
        raise ValueError(f"power is 'square' or 'abs', not '{power}'")
    if not names:
        return {}
    everything = dict(model.named_parameters()) | dict(model.named_buffers())
    values = {name: everything[name].detach() for name in names}

    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = functional_call(model, parameters, (x.unsqueeze(0), *args))
        return objective(outputs[0], y)

    together = True

    def gradients(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        nonlocal together
        if together:
            try:
                found: dict[str, Tensor] = vmap(grad(one), in_dims=(None, 0, 0))(values, x, y)
                return found
            except RuntimeError:  # some networks cannot run for many samples at once: those that look at a number, say
                together = False
        each = [grad(one)(values, *sample) for sample in zip(x, y, strict=True)]
        return {name: torch.stack([found[name] for found in each]) for name in values}

    total = {name: torch.zeros_like(value) for name, value in values.items()}
    memory = room(next(iter(values.values())).device) if memory is None else memory
    chunk = max(1, memory // max(1, bits(*values.values()) // 8))
    count = 0
    with in_eval(model), torch.no_grad():  # heads are parameters too: the sums would hold on to all that made them
        for images, labels in data:
            for x, y in zip(images.split(chunk), labels.split(chunk), strict=True):
                for name, gradient in gradients(x, y).items():
                    total[name] += measure(gradient).sum(0)
            count += len(labels)
    return {name: value / max(1, count) for name, value in total.items()}


def enough(samples: int | None) -> int | None:
    """The option `samples` of a method, if it can be meant."""
    if samples is not None and samples < 1:
        raise ValueError(f"samples is how many images are looked at, at least 1, not {samples}; leave it out for all")
    return samples


def known_labels(labels: str) -> str:
    """The option `labels` of a method, if there is such a kind."""
    if labels not in {"true", "sampled"}:
        raise ValueError(f"labels are 'true' or 'sampled', not '{labels}'")
    return labels


def checked(strength: float, samples: int | None = None, labels: str = "true") -> None:
    """ValueError for options of a penalty that cannot be meant."""
    finite(0, strength=strength)
    enough(samples)
    known_labels(labels)


def fisher(
    model: nn.Module,
    names: Sequence[str],
    data: Batches,
    *args: object,
    labels: str = "true",
    draws: torch.Generator | None = None,
    memory: int | None = None,
) -> dict[str, Tensor]:
    """The diagonal of the Fisher information of `model(x, *args)`, a classifier.

    With `labels="true"` it is the empirical one, at the data's labels; with "sampled" each label is drawn from the
    model's own prediction, by the CPU generator `draws`.
    """
    if known_labels(labels) == "sampled":
        data = sampled_labels(model, data, *args, draws=draws)
    return per_sample_moments(model, names, data, negative_log_likelihood, *args, memory=memory)


def sampled_labels(model: nn.Module, data: Batches, *args: object, draws: torch.Generator | None) -> Batches:
    """The same images, their labels drawn from what the model believes."""
    for x, _ in data:
        with torch.no_grad(), in_eval(model):
            beliefs = model(x, *args).softmax(1)
        yield x, torch.multinomial(beliefs.cpu(), 1, generator=draws).squeeze(1).to(x.device)


def samples_of(
    task: Task, fit: Fit, index: int, samples: int | None = None, size: int = 64
) -> Iterator[tuple[Tensor, Tensor]]:
    """A task's training images without augmentation: all of them, or `samples` that the fit's seed chooses."""
    split = task.train
    if samples is not None and samples < len(split):
        chosen = torch.randperm(len(split), generator=generator("importance", fit.seed, index))[:samples]
        chosen = chosen.sort().values.to(split.labels.device)
        split = Split(split.images, split.labels[chosen], chosen if split.rows is None else split.rows[chosen])
    return batches(split, task.prepare, size, fit.regime.device)


class Kept(nn.Module):
    """One buffer for each of a network's parameters, under the parameter's name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(_key(name), tensor.detach().clone())

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(_key(name))

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the values in place."""
        for name, tensor in tensors.items():
            self[name].copy_(tensor)


def _key(name: str) -> str:
    return name.replace(".", "/")  # a buffer's name may not hold a dot


class Anchored(Method):
    """Holds every parameter of the network to where the last task left it, as firmly as it mattered.

    Common to the methods that differ only in how they measure importance. Heads are each task's own and stay free.
    The optimizer sees the new task's loss alone. Behind each of its steps comes the penalty's own, a proximal one: it
    ends where the pull and the way back are in balance. However firm, it never carries a weight past the anchor.
    """

    family = "model-based"
    overhead_formula = "1 float per parameter"
    graph_safe = True
    revision = 1  # before, the penalty's gradient went through the optimizer
    strength: float

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        super().__init__(net, example)
        self.importance = Kept({name: torch.zeros_like(p) for name, p in self.weights().items()})
        self.anchor = Kept(self.weights())
        self.register_buffer("pace", example.new_zeros((), dtype=torch.float32), persistent=False)

    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters that all tasks share and that training may move."""
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    @property
    def firmness(self) -> float:
        """The factor before Σ Ω (θ − θ*)²."""
        return self.strength

    def penalty(self) -> Tensor:
        """What the loss gains for having left the anchor."""
        return self.pull(self.firmness)

    def pull(self, firmness: float) -> Tensor:
        """firmness · Σ Ω (θ − θ*)²."""
        total = self.get_buffer("example").new_zeros(())
        for name, weight in self.weights().items():
            away = weight - self.anchor[name]
            total = total + torch.dot((firmness * self.importance[name] * away).flatten(), away.flatten())
        return total

    def consolidate(self, importance: Mapping[str, Tensor]) -> None:
        """After a task: the new importance, and an anchor where the weights now are."""
        self.importance.put(importance)
        self.anchor.put(self.weights())

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        """Cross-entropy, and from the second task on the penalty: its gradient is left to `after_step`."""
        loss = super().loss(x, y, task)
        return loss + self.penalty().detach() if task else loss

    def before_step(self, done: float) -> None:
        """2η · firmness of this step."""
        self.get_buffer("pace").fill_(min(2 * self.firmness * self.step_rate, _FURTHEST) if self.firmness else 0.0)

    @torch.no_grad()
    def after_step(self) -> None:
        """θ ← (θ + 2ηk θ*) / (1 + 2ηk), where k = firmness · Ω and η is the rate of the step just made."""
        if len(self.specs) < 2:
            return
        for name, weight in self.weights().items():
            pulled = (self.importance[name] * self.get_buffer("pace")).clamp_(max=_FURTHEST)
            weight.lerp_(self.anchor[name], pulled / (1 + pulled))

    def score(self, predictor: Predictor, x: Tensor, y: Tensor, task: int) -> tuple[Tensor, Tensor]:
        """The same for validation: the epoch that is kept learned well and strayed little."""
        losses, correct = super().score(predictor, x, y, task)
        return (losses + self.penalty() if task else losses), correct

    def moving(self) -> dict[str, Tensor]:
        """The network and the newest head: importance, anchor and old heads stand still while a task is learned."""
        return self.tensors_of("net", self.newest_head())

    def overhead(self) -> Overhead:
        """Importance and anchor, while a task is learned; nothing to serve."""
        return Overhead(training=bits(*self.importance.buffers(), *self.anchor.buffers()))


_FURTHEST = 1e30
"""A weight is at its anchor long before."""
