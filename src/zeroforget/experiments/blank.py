"""Scenarios of noise: the shapes of real ones without their data, to measure what depends on shapes alone."""

from __future__ import annotations

import torch

from zeroforget.data import Scenario, Split, Task


def imagenet(*, tasks: int = 10, classes: int = 100, images: int = 100, pixels: int = 224) -> Scenario:
    """As ImageNet in ten tasks: memory overhead needs no real picture. At least one image for each class is best."""
    draws = torch.Generator().manual_seed(0)
    shape = (3, pixels, pixels)
    pictures = torch.randint(256, (images, *shape), generator=draws, dtype=torch.uint8)
    labels = torch.arange(images) % classes
    split = Split(pictures, labels)
    names = tuple(f"class {number}" for number in range(classes))
    made = (Task(f"noise-{number}", names, split, split, split) for number in range(1, tasks + 1))
    return Scenario("imagenet-shaped noise", shape, tuple(made))
