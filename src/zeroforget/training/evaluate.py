"""Judging a network: logits and accuracy over a split, in batches of one fixed size so that bits can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from zeroforget.data import Preparation, Split

Predictor = Callable[[Tensor], Tensor]
BATCH = 256
"""So many images are judged at a time."""


def batches(
    split: Split, prepare: Preparation, size: int, device: str | torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """The split in order, prepared for testing."""
    for index in torch.arange(len(split), device=split.labels.device).split(size):
        images, labels = split.batch(index)
        yield prepare.test(images.to(device)), labels.to(device)


@torch.no_grad()
def logits(
    model: Predictor | nn.Module, split: Split, prepare: Preparation, *, size: int = BATCH, device: str = "cpu"
) -> Tensor:
    """The model's outputs for every image, on the CPU."""
    return torch.cat([model(x).cpu() for x, _ in batches(split, prepare, size, device)])


@torch.no_grad()
def accuracy(
    model: Predictor | nn.Module, split: Split, prepare: Preparation, *, size: int = BATCH, device: str = "cpu"
) -> float:
    """The share of images whose largest output is the right class."""
    correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches(split, prepare, size, device))
    return correct / len(split)
