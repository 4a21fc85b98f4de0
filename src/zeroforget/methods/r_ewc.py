"""Rotated elastic weight consolidation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from zeroforget.axes.trace import in_eval
from zeroforget.data import Task
from zeroforget.methods.anchored import Ewc
from zeroforget.methods.base import Overhead, bits
from zeroforget.methods.importance import Batches, checked, sampled_labels, samples_of
from zeroforget.training import Fit
from zeroforget.training.seeding import generator


class Rotation(nn.Module):
    """The weight W = U₂ W' U₁ᵀ of a layer that learns W'; of a convolution only the channels are turned.

    That is a fixed linear layer (or 1×1 convolution) before and one after it, multiplied into the weight.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("inward", torch.eye(weight.shape[1], device=weight.device, dtype=weight.dtype))
        self.register_buffer("outward", torch.eye(weight.shape[0], device=weight.device, dtype=weight.dtype))

    @property
    def bases(self) -> tuple[Tensor, Tensor]:
        """U₂ and U₁: the axes of what leaves the layer and of what enters it, a column each."""
        return self.get_buffer("outward"), self.get_buffer("inward")

    def forward(self, turned: Tensor) -> Tensor:
        """W = U₂ W' U₁ᵀ."""
        outward, inward = self.bases
        if turned.is_meta:  # where nothing is computed there is no autocast either
            return _both_sides(outward, turned, inward)
        with torch.autocast(turned.device.type, enabled=False):  # two turns in bfloat16 would blur the weight
            return _both_sides(outward, turned, inward)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """W' = U₂ᵀ W U₁, the reparameterization of section IV."""
        outward, inward = self.bases
        return _both_sides(outward.T, weight, inward.T)


def _both_sides(left: Tensor, weight: Tensor, right: Tensor) -> Tensor:
    """left · W · rightᵀ on the first two dimensions of W."""
    flat = weight.flatten(2) if weight.dim() > 2 else weight.unsqueeze(2)
    return torch.einsum("oi,icp,dc->odp", left, flat, right).reshape(weight.shape)


class REwc(Ewc):
    """EWC after each layer is turned so that the Fisher information is nearer to the diagonal that EWC takes it to be.

    Liu et al., "Rotate your networks: better weight consolidation and less catastrophic forgetting", ICPR 2018. Linear
    layers and ungrouped convolutions are turned to the principal axes of their inputs and of their output gradients;
    layers that share a weight share the turn.
    After each task the old rotation is multiplied into the weights and a new one is found; the importance of earlier
    tasks is carried over to the new axes. Biases and normalizations are held as by EWC.

    Options:
        strength: λ, how firmly old weights are held.
        samples: how many training images estimate the axes and the Fisher information; None takes all.
        labels: "sampled" for labels drawn from the model itself, "true" for those of the data.
        widest: leave layers with more inputs or outputs than this unturned; None turns all.
    """

    name = "r-ewc"

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        *,
        strength: float = 5000.0,
        samples: int | None = None,
        labels: str = "sampled",
        widest: int | None = None,
    ) -> None:
        checked(strength, samples, labels)
        self.widest = widest
        for layers in _layers(net):
            weight = layers[0].weight
            if weight.requires_grad and (widest is None or max(weight.shape[:2]) <= widest):
                rotation = Rotation(weight)
                for layer in layers:
                    parametrize.register_parametrization(layer, "weight", rotation)
        super().__init__(net, example, strength=strength, samples=samples, labels=labels)

    def rotations(self) -> dict[str, Rotation]:
        """The rotation of each layer, by the name of the weight that it turns."""
        return {
            name.removesuffix(".0") + ".original": module
            for name, module in self.net.named_modules()
            if isinstance(module, Rotation)
        }

    def end_task(self, task: Task, fit: Fit) -> None:
        """Recombine, find new axes, carry the old importance to them; then EWC's Fisher, on the turned weights."""
        index = len(self.specs) - 1
        data: Batches = samples_of(task, fit, index, self.samples)
        if self.labels == "sampled":
            data = sampled_labels(self, data, index, draws=generator("axes", fit.seed, index))
        self.turn(data)
        super().end_task(task, fit)

    def turn(self, data: Batches) -> None:
        """Turn every layer to the axes of this data; what the network computes stays the same."""
        axes = self._axes(data)
        weights = self.weights()
        with torch.no_grad():
            for name, rotation in self.rotations().items():
                if name not in axes:
                    continue
                outward, inward = axes[name]
                now = weights[name].double()
                old_out, old_in = (u.double() for u in rotation.bases)
                change_out, change_in = outward.T @ old_out, inward.T @ old_in
                weights[name].copy_(_both_sides(change_out, now, change_in))
                # The diagonal, on the new axes, of the precision that was diagonal on the old ones.
                carried = _both_sides(change_out**2, self.importance[name].double(), change_in**2)
                self.importance[name].copy_(carried)
                rotation.bases[0].copy_(outward)
                rotation.bases[1].copy_(inward)

    def _axes(self, data: Batches) -> dict[str, tuple[Tensor, Tensor]]:
        """Eigenvectors of E[δδᵀ] and E[xxᵀ] for each layer, in float64."""
        names = {id(weight): name for name, weight in self.weights().items()}
        watched = {layer: names[id(weight)] for layer, weight in _turned(self.net)}
        sums: dict[str, list[Tensor]] = {}
        index = len(self.specs) - 1
        with in_eval(self), _ears(watched) as heard:
            for x, y in data:
                heard.clear()
                loss = F.cross_entropy(self(x, index), y, reduction="sum")  # each sample's own gradient
                gradients = torch.autograd.grad(loss, [out for _, _, out in heard]) if heard else ()
                for (layer, given, _), gradient in zip(heard, gradients, strict=True):
                    name = watched[layer]
                    parts = [_second_moment(values, layer) for values in (gradient, given)]
                    sums[name] = [a + b for a, b in zip(sums[name], parts, strict=True)] if name in sums else parts
        return {name: (eigenvectors(out), eigenvectors(into)) for name, (out, into) in sums.items()}

    def moving(self) -> dict[str, Tensor]:
        """As EWC, without the rotations: they stand still while a task is learned."""
        return {n: t for n, t in super().moving().items() if not n.endswith((".inward", ".outward"))}

    def overhead(self) -> Overhead:
        """Importance, anchor and rotations, while a task is learned; they can be multiplied in to serve."""
        turned = [basis for rotation in self.rotations().values() for basis in rotation.bases]
        return Overhead(training=super().overhead().training + bits(*turned))


def _layers(net: nn.Module) -> list[list[nn.Linear | nn.Conv2d]]:
    """Layers whose inputs and outputs can be turned, those of one weight together.

    A grouped convolution would mix its groups; a weight that anything else reads too must stay as it is.
    """
    readers: dict[int, list[nn.Module]] = {}
    for module in net.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                readers.setdefault(id(parameter), []).append(module)
    together: dict[int, list[nn.Linear | nn.Conv2d]] = {}
    for module in net.modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            together.setdefault(id(module._parameters.get("weight")), []).append(module)
    return [layers for weight, layers in together.items() if readers.get(weight) == layers]


def _turned(net: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Every layer that is turned, and the weight that it learns."""
    for module in net.modules():
        if parametrize.is_parametrized(module, "weight"):
            steps = module.parametrizations.weight  # type: ignore[union-attr]
            if isinstance(steps[0], Rotation):  # type: ignore[index]
                yield module, steps.original  # type: ignore[union-attr, misc]


@contextmanager
def _ears(layers: Iterable[nn.Module]) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """Inside, each call of a layer leaves the layer, its input and its output."""
    heard: list[tuple[nn.Module, Tensor, Tensor]] = []

    def listen(layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor], out: Tensor) -> Tensor:
        heard.append((layer, (given[0] if given else named["input"]).detach(), out))
        return out.clone()  # a ReLU in place must not change what was heard

    handles = [layer.register_forward_hook(listen, with_kwargs=True) for layer in layers]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _second_moment(values: Tensor, layer: nn.Module) -> Tensor:
    """Σ v vᵀ over samples and positions of what a layer reads or writes; only a convolution's channels are not last."""
    rows = values.movedim(-3, -1) if isinstance(layer, nn.Conv2d) else values
    rows = rows.reshape(-1, rows.shape[-1]).double()
    return rows.T @ rows


def eigenvectors(symmetric: Tensor) -> Tensor:
    """Among directions that carry the same, of which there are many that carry nothing, and between an axis and its
    opposite, rounding would choose. A slope too slight to turn any other axis chooses instead."""
    slope = torch.linspace(1, 2, len(symmetric), dtype=symmetric.dtype, device=symmetric.device)
    vectors: Tensor = torch.linalg.eigh(symmetric + (_SLIGHT * symmetric.trace() * slope).diag()).eigenvectors
    return vectors * torch.where(slope @ vectors < 0, -1.0, 1.0)


_SLIGHT = 1e-9
