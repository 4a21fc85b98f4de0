"""Judging: every image once, in its order, in batches of one size, prepared as for a test."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroforget.data import Preparation, Split
from zeroforget.training import accuracy, logits


class Still(Preparation):
    """Nothing is moved or turned where it is judged."""

    def train(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        raise AssertionError("that is for training")


def test_images_are_judged_in_order_and_in_batches_of_one_size() -> None:
    sizes = []

    def model(x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        sizes.append(len(x))
        return torch.stack([x[:, 0], -x[:, 0]], 1)

    values = torch.arange(600.0)[:, None]
    split = Split(values, (torch.arange(600) % 4 == 0).long(), torch.arange(599, -1, -1))
    prepare = Still((99.5,), (1.0,))  # 500 of 600 are above it
    out = logits(model, split, prepare)
    assert torch.equal(out[:, 0], torch.arange(599, -1, -1) - 99.5)
    assert sizes == [256, 256, 88]
    right = [(value < 99.5) == (place % 4 == 0) for place, value in enumerate(range(599, -1, -1))]
    assert accuracy(model, split, prepare) == sum(right) / 600
    assert sizes[3:] == [256, 256, 88]
    assert torch.equal(logits(model, split, prepare, size=7), out)
