"""Ways to learn new classes from a network in service: growing it, copying it, adapting it, or not using it at all."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.transfer_lora import Adapted, nbytes
from zeroforget.data import Task
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import build
from zeroforget.nets.resnet import ResNet
from zeroforget.store.tensors import born


class Classifier(nn.Module):
    """A plain network and its head, as anybody would write it."""

    def __init__(self, features: ResNet, classes: int) -> None:
        super().__init__()
        self.features = features
        convolutions = [module for module in features.modules() if isinstance(module, nn.Conv2d)]
        self.head = nn.Linear(convolutions[-1].out_channels, classes, device=convolutions[0].weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.features(x))
        return out


def fresh(shape: tuple[int, int, int], classes: int, width: float) -> Classifier:
    """A ResNet-18 with a 3×3 stem that halves the image: a quarter of the work of one that leaves all pixels."""
    features = build("resnet18", shape, width=width)
    assert isinstance(features, ResNet)
    stem = features.stem[0]
    assert isinstance(stem, nn.Conv2d)
    stem.stride = (2, 2)
    return Classifier(features, classes)


class Contestant(Protocol):
    """Learns tasks one after another; `begin` gives what to train next."""

    name: str

    def begin(self, task: Task) -> nn.Module: ...
    def moving(self) -> dict[str, Tensor]: ...
    def discard(self) -> None: ...
    def answer(self) -> nn.Module: ...
    def stored(self) -> int: ...
    def first(self) -> nn.Module: ...


class Newest(nn.Module):
    """A growing network as it learns its newest task."""

    def __init__(self, net: GrowingNetwork) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x, len(self.net.history) - 1)
        return out


class Growing:
    """The adopted network grows by a share of its width for each task; 0 leaves normalization and head. With a rank,
    what is old also leans towards the task."""

    def __init__(self, net: GrowingNetwork, growth: float, rank: int = 0, like: str = "") -> None:
        grown = f"growth {100 * growth:g} %" if growth or not rank else ""
        leaning = f"rank births, bytes as {like}" if rank else ""
        self.name = " and ".join(part for part in (grown, leaning) if part)
        self.net = copy.deepcopy(net)
        self.growth = growth
        self.rank = rank

    def begin(self, task: Task) -> nn.Module:
        """Add the task; all that is a parameter now was born with it."""
        images = _looked_at(task) if self.rank else None
        self.net.add_task(task.name, len(task.classes), self.growth, self.rank, images=images, quiet=True)
        return Newest(self.net)

    def moving(self) -> dict[str, Tensor]:
        """Newborn tensors and the task's statistics."""
        return self.net.moving()

    def discard(self) -> None:
        """Take the newest task back."""
        self.net.drop_task()

    def answer(self) -> nn.Module:
        """The newest task's own dense network."""
        return self.net.dense(len(self.net.history) - 1)

    def stored(self) -> int:
        """Bytes born with the newest task, and its masks at two bits a feature."""
        task = len(self.net.history) - 1
        return nbytes(born(self.net, task)) + self.net.overhead(task).masks // 8

    def first(self) -> nn.Module:
        """The adopted task's network as it is now."""
        return self.net.dense(0)


def _looked_at(task: Task) -> Tensor:
    """Some training images of a task, by which its rank births are aimed; always the same ones."""
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(0))[:_AIM]
    images, _ = task.train.batch(order.to(task.train.labels.device))
    return task.prepare.test(images)


_AIM = 256


class Copying:
    """Fine-tuning of all weights in a copy of the network for each task."""

    def __init__(self, classifier: Classifier, name: str = "fine-tuning a copy") -> None:
        self.name = name
        self.classifier = classifier
        self.model: nn.Module = classifier

    def begin(self, task: Task) -> nn.Module:
        """A copy with a new head."""
        features = copy.deepcopy(self.classifier.features).requires_grad_(True)
        self.model = Classifier(features, len(task.classes))
        return self.model

    def moving(self) -> dict[str, Tensor]:
        """The whole copy."""
        return dict(self.model.state_dict())

    def discard(self) -> None:
        """Nothing to take back: the next task begins from the network in service again."""

    def answer(self) -> nn.Module:
        """The copy."""
        return self.model.eval()

    def stored(self) -> int:
        """The whole copy's bytes."""
        return nbytes(dict(self.model.state_dict()))

    def first(self) -> nn.Module:
        """The network in service, which nobody touched."""
        return self.classifier.eval()


class FromScratch(Copying):
    """A new network for each task that knows nothing: what all others must beat for transfer to be worth anything."""

    def __init__(self, classifier: Classifier, shape: tuple[int, int, int], width: float) -> None:
        super().__init__(classifier, "from scratch")
        self.shape, self.width = shape, width

    def begin(self, task: Task) -> nn.Module:
        """New weights."""
        self.model = fresh(self.shape, len(task.classes), self.width).to(self.classifier.head.weight.device)
        return self.model


class Adapting(Copying):
    """Low-rank branches, batch norms and a head for each task around the frozen network."""

    def __init__(self, classifier: Classifier, rank: int, like: str) -> None:
        super().__init__(classifier, f"adapters, bytes as {like}")
        self.rank = rank

    def begin(self, task: Task) -> nn.Module:
        """New branches."""
        self.model = Adapted(self.classifier.features, len(task.classes), self.rank)
        return self.model

    def stored(self) -> int:
        """Branches, norms and head."""
        assert isinstance(self.model, Adapted)
        return nbytes(self.model.own())


@torch.no_grad()
def bytes_of_growth(net: GrowingNetwork, growth: float, tasks: int, classes: int) -> float:
    """What a task of this growth will store, the mean over the tasks to come."""
    trial = Growing(net, growth)
    sizes = []
    for number in range(tasks):
        trial.net.add_task(f"trial {number}", classes, growth, quiet=True)
        sizes.append(trial.stored())
    return sum(sizes) / len(sizes)


def rank_within(net: GrowingNetwork, growth: float, wanted: float, tasks: int, classes: int) -> int:
    """The largest rank whose births, in two bytes a number, fit into so many bytes beside this growth; at least 1."""
    left, rank = wanted - bytes_of_growth(net, growth, tasks, classes), 1
    while 2 * net.rank_numbers(rank + 1) <= left and net.rank_numbers(rank + 1) > net.rank_numbers(rank):
        rank += 1
    return rank
