"""Efficient feature transformations: a frozen network whose feature maps each task transforms in a way of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zeroforget.data import Task
from zeroforget.methods.base import Method, Overhead, TaskSpec, bits, learn_only
from zeroforget.methods.per_task import TaskNorms, norm_tensors, overwrite, plain_copy, task_tensors
from zeroforget.training import Fit
from zeroforget.training.evaluate import Predictor


class Convolved(nn.Module):
    """A feature map through a 3×3 convolution in small groups, and a 1×1 one in larger groups added to it."""

    def __init__(self, channels: int, spatial: int, pointwise: int) -> None:
        super().__init__()
        wide, deep = (channels // math.gcd(channels, size) for size in (spatial, pointwise))
        self.wide = nn.Conv2d(channels, channels, 3, padding=1, groups=wide, bias=False)
        self.deep = nn.Conv2d(channels, channels, 1, groups=deep, bias=False)
        nn.init.dirac_(self.wide.weight, groups=wide)  # it begins as the identity
        nn.init.zeros_(self.deep.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Hˢ + Hᵈ."""
        out: Tensor = self.wide(x) + self.deep(x)
        return out


class Scaled(nn.Module):
    """A factor for each feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Feature by feature."""
        return x * self.factor


class Eft(Method):
    """Freeze a backbone; each later task transforms what every layer makes, by small grouped convolutions of its own.

    Verma et al., "Efficient Feature Transformations for Discriminative and Generative Continual Learning", CVPR 2021.
    The backbone is what the first task leaves, or the network as it was given. A convolution's output goes through a
    3×3 and a 1×1 grouped convolution, whose sum it becomes; a linear layer's features get a factor each. They begin as
    the identity. Normalization is each task's own, starting from the backbone's; so is every other buffer.

    Options:
        pretrained: the network as given is the backbone, so the first task too gets transformations.
        spatial: channels in a group of the 3×3 convolutions (fewer where they do not divide a layer's).
        pointwise: channels in a group of the 1×1 convolutions.
    """

    name = "eft"
    family = "mask-based"
    zero_forgetting = True
    graph_safe = True
    needs_backbone = True
    overhead_formula = "grouped convolutions per layer and task"

    def __init__(
        self, net: nn.Module, example: Tensor, *, pretrained: bool = False, spatial: int = 8, pointwise: int = 16
    ) -> None:
        super().__init__(net, example)
        if spatial < 1 or pointwise < 1:
            raise ValueError(f"groups are of 1 channel or more, not {spatial} and {pointwise}")
        self.pretrained = pretrained
        self.spatial = spatial
        self.pointwise = pointwise
        self.transforms = nn.ModuleList()
        self.norms = TaskNorms(net)
        self._learned = [p for p in net.parameters() if p.requires_grad]

    # Structure -------------------------------------------------------------------------------------------------

    def layers(self) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
        """The layers whose outputs are transformed, by their paths."""
        return ((path, each) for path, each in self.net.named_modules() if isinstance(each, nn.Linear | nn.Conv2d))

    def add_task(self, spec: TaskSpec) -> None:
        """A head and normalization; after the backbone's task also transformations."""
        super().add_task(spec)
        self.norms.add(self.net)
        if not self._transformed(len(self.specs) - 1):
            return
        self.transforms.requires_grad_(False)
        like = self.get_buffer("example")
        made = {_key(path): self._transform(layer) for path, layer in self.layers()}
        self.transforms.append(nn.ModuleDict(made).to(like.device))
        overwrite(self.net, self.norms.read(0))
        learn_only(self._learned, self._own_norms())

    def _transform(self, layer: nn.Linear | nn.Conv2d) -> nn.Module:
        if isinstance(layer, nn.Conv2d):
            return Convolved(layer.out_channels, self.spatial, self.pointwise)
        return Scaled(layer.out_features)

    def drop_task(self) -> None:
        """Take them back."""
        if self._transformed(len(self.specs) - 1):
            del self.transforms[-1]
            for newest in self.transforms[-1:]:
                newest.requires_grad_(True)
        super().drop_task()
        self.norms.drop()
        backbone = not self.specs or not self._transformed(len(self.specs) - 1)
        learn_only(self._learned, self._learned if backbone else self._own_norms())

    def _transformed(self, task: int) -> bool:
        return self.pretrained or task > 0

    def _of(self, task: int) -> nn.ModuleDict:
        kept = self.transforms[task if self.pretrained else task - 1]
        assert isinstance(kept, nn.ModuleDict)
        return kept

    def _own_norms(self) -> Iterable[nn.Parameter]:
        return (t for t in norm_tensors(self.net).values() if isinstance(t, nn.Parameter))

    # Learning --------------------------------------------------------------------------------------------------

    def trainable(self) -> Iterable[nn.Parameter]:
        """The backbone while it is learned; afterwards transformations, normalization and the head."""
        if not self._transformed(len(self.specs) - 1):
            yield from super().trainable()
            return
        yield from self._of(len(self.specs) - 1).parameters()
        yield from self._own_norms()
        yield from self.heads[-1].parameters()

    def moving(self) -> dict[str, Tensor]:
        """The same, with the network's statistics."""
        if not self._transformed(len(self.specs) - 1):
            return self.tensors_of("net", self.newest_head())
        state = [f"net.{name}" for name in task_tensors(self.net)]
        return self.tensors_of(f"transforms.{len(self.transforms) - 1}", self.newest_head(), *state)

    def end_task(self, task: Task, fit: Fit) -> None:
        """Keep the normalization."""
        self.norms.store(len(self.specs) - 1, self.net)

    # Use -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Through the frozen layers, each followed by its transformation."""
        if task < len(self.specs) - 1:
            return self.predictor(task)(x)
        if not self._transformed(task):
            return super().forward(x, task)
        # Tensors of this step's own: nothing then takes a layer and the rectifier behind it for one operator.
        frozen = {name: p.detach() for name, p in self.net.named_parameters() if not p.requires_grad}
        with ExitStack() as hooks:
            for path, layer in self.layers():
                hooks.enter_context(layer.register_forward_hook(_after(self._of(task)[_key(path)])))
            out = functional_call(self.net, frozen, (x,))
        logits: Tensor = self.heads[task](out)
        return logits

    def task_net(self, task: int) -> nn.Module:
        """A task's own network: its transformations stand behind the layers."""
        net = plain_copy(self.net, {} if task == len(self.specs) - 1 else self.norms.read(task))
        if self._transformed(task):
            for path, _ in self.layers():
                own = plain_copy(self._of(task)[_key(path)], {})
                twin = net.get_submodule(path) if path else net
                twin.register_forward_hook(_after(own))
                twin.transformed = own
        return net

    def predictor(self, task: int) -> Predictor:
        """The task's own network and head."""
        self.eval()
        net, head = self.task_net(task), self.heads[task]
        return lambda x: head(net(x))

    def overhead(self) -> Overhead:
        """Every task's transformations, each later task's normalization and buffers."""
        kept = bits(*self.transforms.parameters()) + self.norms.bits()
        return Overhead(training=kept, inference=kept)


def _key(path: str) -> str:
    return path.replace(".", "/") or "net"  # a module's name may not hold a dot


def _after(transform: nn.Module) -> Any:
    return lambda layer, given, out: transform(out)
