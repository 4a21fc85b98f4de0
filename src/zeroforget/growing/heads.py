"""Heads that stand inside of a network, because other code goes on with their scores: picks a word's, averages them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.axes.labels import Label, births_of
from zeroforget.axes.plain_modules import remembered_sizes, set_tensor
from zeroforget.growing.per_task import PerTask

_CONVOLUTIONS = (F.linear, F.conv1d, F.conv2d, F.conv3d)


class HeadPlace(nn.Module):
    """Where the heads of all tasks stand, the newest of which runs here. A convolution of one point is a head, too."""

    heads: PerTask
    index: int

    def __init__(self, plain: nn.Module, reads: Label, heads: PerTask, index: int) -> None:
        super().__init__()
        weight = plain.get_parameter("weight")
        self.reads, self.points = reads, weight.dim() - 2
        # Not as a part of its own: the network holds the heads.
        self.__dict__.update(heads=heads, index=index)

    def part(self, task: int = -1) -> nn.Linear:
        """A task's head at this place."""
        head = self.heads[task]
        part = head[self.index] if isinstance(head, nn.ModuleList) else head
        assert isinstance(part, nn.Linear)
        return part

    @property
    def weight(self) -> Tensor:
        """The newest head's, in the form that the layer had."""
        return self._formed(self.part().weight)

    @property
    def bias(self) -> Tensor:
        """The newest head's."""
        return self.part().bias

    def _formed(self, weight: Tensor) -> Tensor:
        return weight.reshape(*weight.shape, *[1] * self.points)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, as torch's layers call it
        """The newest task's scores."""
        return _CONVOLUTIONS[self.points](input, self.weight, self.bias)

    def fill(self, task: int, plain: nn.Module) -> None:
        """Put a task's head into a plain layer, whose sizes become its own."""
        part = self.part(task)
        weight = self._formed(part.weight.detach().clone())
        set_tensor(plain, "weight", weight)
        set_tensor(plain, "bias", part.bias.detach().clone())
        for name, value in remembered_sizes(plain, {"weight": tuple(weight.shape)}, {}).items():
            setattr(plain, name, value)


def places(body: nn.Module) -> Iterator[HeadPlace]:
    """The places of heads inside of a network."""
    return (module for module in body.modules() if isinstance(module, HeadPlace))


def new_head(body: nn.Module, output: Label, births: Mapping[str, Tensor], classes: int, like: Tensor) -> nn.Module:
    """A head behind all features; or for the place inside, or one for each of several."""
    labels = [place.reads for place in sorted(places(body), key=lambda place: place.index)] or [output]
    made = [nn.Linear(len(births_of(label, births)), classes, device=like.device, dtype=like.dtype) for label in labels]
    return made[0] if len(made) == 1 else nn.ModuleList(made)
