"""One change of thirteen for each training image, of random strength (after Müller and Hutter, "TrivialAugment", 2021).

Whole batches on whatever device they are, and nothing waits for it: every way is taken for all images, and each image
picks its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

WAYS = (
    "as it is",
    "turned",
    "sheared across",
    "sheared down",
    "shifted across",
    "shifted down",
    "brighter or darker",
    "more or less contrast",
    "more or less colour",
    "sharper or blurred",
    "fewer shades",
    "bright parts inverted",
    "stretched to full contrast",
)
TURN, SHEAR, SHIFT, CHANGE, SHADES = math.radians(135), 0.99, 0.5, 0.99, 6
"""At full strength: radians; pixels a pixel; a share of the side; a share of the difference; bits of eight."""
_ROUNDED = 1e-3  # a byte's value that was divided by 255 comes back a little smaller, and must not lose a shade


def alter(images: Tensor, strength: float, generator: torch.Generator | None = None) -> Tensor:
    """Change each image, values in [0, 1], in one way by a random part of `strength`, which is at most 1.

    `generator` is a CPU generator; without one the draws come from the generator of the images' own device.
    """
    draws = torch.rand(3, len(images), generator=generator, device=None if generator is not None else images.device)
    choice, amount, side = draws.to(images.device, images.dtype)
    way = (choice * len(WAYS)).long()
    amount = amount * strength
    signed = torch.where(side < 0.5, -amount, amount)
    images = torch.where(_at((way >= 1) & (way <= 5)), _moved(images, way, signed), images)
    images = torch.where(_at((way >= 6) & (way <= 9)), _recoloured(images, way, 1 + CHANGE * signed), images)
    step = torch.exp2((SHADES * amount).round())
    images = torch.where(_at(way == 10), ((images * 255 + _ROUNDED) / _at(step)).floor() * _at(step) / 255, images)
    images = torch.where(_at(way == 11) & (images >= _at(1 - amount)), 1 - images, images)
    return torch.where(_at(way == 12), _stretched(images), images)


def _at(values: Tensor) -> Tensor:
    """One value for each image."""
    return values.view(-1, 1, 1, 1)


def _moved(images: Tensor, way: Tensor, amount: Tensor) -> Tensor:
    """Turned, sheared or shifted about the middle; black comes in from outside."""
    height, width = images.shape[-2:]
    none = torch.zeros_like(amount)
    turn = torch.where(way == 1, TURN * amount, none)
    shears = [torch.where(way == k, SHEAR * amount, none).view(-1, 1, 1) for k in (2, 3)]
    shifts = [torch.where(way == k, 2 * SHIFT * amount, none).view(-1, 1, 1) for k in (4, 5)]
    # Where each new pixel was, in pixels from the middle; then as the sampler wants it, with edges at -1 and 1.
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    y = (torch.arange(height, device=images.device) - (height - 1) / 2).view(-1, 1)
    cos, sin = turn.cos().view(-1, 1, 1), turn.sin().view(-1, 1, 1)
    across = cos * x + sin * y + shears[0] * y
    down = cos * y - sin * x + shears[1] * x
    grid = torch.stack([2 / width * across + shifts[0], 2 / height * down + shifts[1]], -1)
    return F.grid_sample(images, grid.to(images.dtype), mode="bilinear", padding_mode="zeros", align_corners=False)


def _recoloured(images: Tensor, way: Tensor, factor: Tensor) -> Tensor:
    """Away from black, from even grey, from grey or from a blurred image, or towards it."""
    if images.shape[1] == 3:
        red, green, blue = images.unbind(1)
        grey = (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]
    else:
        grey = images.mean(1, keepdim=True)
    around = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    base = torch.where(_at(way == 7), grey.mean((2, 3), keepdim=True), torch.zeros_like(images))
    base = torch.where(_at(way == 8), grey, base)
    base = torch.where(_at(way == 9), (9 * around + 4 * images) / 13, base)
    return (base + _at(factor) * (images - base)).clamp(0, 1)


def _stretched(images: Tensor) -> Tensor:
    """Each channel from its darkest to its brightest value brought to the whole range; an even one stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp(min=1e-6), images)
