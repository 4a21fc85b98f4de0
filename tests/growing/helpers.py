"""Small growing networks of every kind, and rough training for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.axes.labels import axis_names
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import build
from zeroforget.proving.grow import grow

NETS = {
    "lenet": dict(shape=(1, 16, 16), width=0.5),
    "alexnet": dict(shape=(3, 63, 63), width=0.04),
    "vgg16-tiny": dict(shape=(3, 16, 16), width=0.06),
    "resnet18": dict(shape=(3, 8, 8), width=0.12),
    "resnet50": dict(shape=(3, 8, 8), width=0.06),
}


def growing(name: str, **options: object) -> tuple[GrowingNetwork, Tensor]:
    """A small growing network by name and a batch for it."""
    torch.manual_seed(0)
    shape = NETS[name]["shape"]
    x = torch.randn(6, *shape)  # type: ignore[misc]
    plain = build(name, shape, width=NETS[name]["width"])  # type: ignore[arg-type]
    return grow(plain, x, **({"start": 0.5} | options)), x  # type: ignore[arg-type]


def optimizer(name: str, net: GrowingNetwork) -> torch.optim.Optimizer:
    """Optimizers that move what they should not, given the chance."""
    if name == "adamw":
        return torch.optim.AdamW(net.newborn(), lr=0.01, weight_decay=0.5)
    return torch.optim.SGD(net.newborn(), lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)


def unaligned(net: GrowingNetwork, task: str, align: int) -> list[str]:
    """The weights of a task with a growing dimension that is no multiple; tables are only looked up."""
    return [
        name
        for name, weight in net.dense(task).get_submodule("features").named_parameters()
        for n, label in zip(weight.shape, net.axes.tensors[name], strict=True)
        if any(axis_names(label)) and n % align and not name.endswith("table")
    ]


def train(net: GrowingNetwork, x: Tensor, *, kind: str = "sgd", bf16: bool = False, steps: int = 3) -> None:
    """A few hard steps on the newest task."""
    task = len(net.history) - 1
    steps_of = optimizer(kind, net)
    net.train()
    for _ in range(steps):
        y = torch.randint(net.history[task].classes, (len(x),))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(net(x, task), y)
        steps_of.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        steps_of.step()
    net.eval()
