"""The thirteen ways to alter an image against a loop over images and pixels."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from zeroforget.data import Preparation, scenario
from zeroforget.data.alter import WAYS, alter

COUNT = 240
IMAGES = torch.rand(COUNT, 3, 6, 7, generator=torch.Generator().manual_seed(5))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def draws(count: int = COUNT) -> tuple[list[int], list[float], list[float]]:
    """Which way each image goes, how strongly of 1, and the same with its sign."""
    choice, amount, side = torch.rand(3, count, generator=seeded())
    signed = torch.where(side < 0.5, -amount, amount)
    return (choice * len(WAYS)).long().tolist(), amount.tolist(), signed.tolist()


def sampled(image: Tensor, x: float, y: float) -> Tensor:
    """Between four neighbours; black outside."""
    x0, y0 = math.floor(x), math.floor(y)
    out = torch.zeros(len(image), dtype=image.dtype)
    for column, across in ((x0, 1 - (x - x0)), (x0 + 1, x - x0)):
        for row, down in ((y0, 1 - (y - y0)), (y0 + 1, y - y0)):
            if 0 <= row < image.shape[1] and 0 <= column < image.shape[2]:
                out += across * down * image[:, row, column]
    return out


def moved(image: Tensor, way: int, signed: float) -> Tensor:
    _, height, width = image.shape
    out = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            x, y = column - (width - 1) / 2, row - (height - 1) / 2
            if way == 1:
                angle = math.radians(135 * signed)
                x, y = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
            elif way == 2:
                x += 0.99 * signed * y
            elif way == 3:
                y += 0.99 * signed * x
            elif way == 4:
                x += signed * width / 2
            else:
                y += signed * height / 2
            out[:, row, column] = sampled(image, x + (width - 1) / 2, y + (height - 1) / 2)
    return out


def blurred(image: Tensor) -> Tensor:
    """The mean of a pixel, five times, and its eight neighbours; at the edge a neighbour is the edge itself."""
    _, height, width = image.shape
    out = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            near = [
                image[:, min(max(row + dy, 0), height - 1), min(max(column + dx, 0), width - 1)]
                for dy in (-1, 0, 1)
                for dx in (-1, 0, 1)
            ]
            out[:, row, column] = (sum(near) + 4 * image[:, row, column]) / 13
    return out


def twin(image: Tensor, way: int, amount: float, signed: float) -> Tensor:
    """One image in double precision."""
    if 1 <= way <= 5:
        return moved(image, way, signed)
    if 6 <= way <= 9:
        grey = (image * torch.tensor([0.299, 0.587, 0.114]).double().view(3, 1, 1)).sum(0, keepdim=True)
        base: Tensor = (torch.zeros(1), grey.mean(), grey, blurred(image))[way - 6]
        return (base + (1 + 0.99 * signed) * (image - base)).clamp(0, 1)
    if way == 10:
        step = 1 << round(6 * amount)
        return ((image * 255 + 1e-3) / step).floor() * step / 255
    if way == 11:
        return torch.where(image >= 1 - amount, 1 - image, image)
    if way == 12:
        low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
        return (image - low) / (high - low)
    return image


def test_every_image_is_what_the_loop_makes_of_it() -> None:
    ways, amounts, signs = draws()
    assert set(Counter(ways)) == set(range(len(WAYS)))
    made = alter(IMAGES, 1.0, seeded())
    for i, (way, amount, signed) in enumerate(zip(ways, amounts, signs, strict=True)):
        assert torch.allclose(made[i].double(), twin(IMAGES[i].double(), way, amount, signed), atol=2e-5), WAYS[way]


def test_what_is_not_altered_keeps_its_bits_and_strength_counts() -> None:
    ways, _, _ = draws()
    kept = torch.tensor(ways) == 0
    made = alter(IMAGES, 1.0, seeded())
    assert torch.equal(made[kept], IMAGES[kept])
    changed = (made != IMAGES).flatten(1).any(1)
    assert changed[~kept].float().mean() > 0.95  # a few shades, or very dark parts inverted, may change nothing
    weak = alter(IMAGES, 0.1, seeded())
    steady = ~kept & (torch.tensor(ways) != 12)  # full contrast is full contrast
    assert (weak - IMAGES)[steady].abs().mean() < 0.5 * (made - IMAGES)[steady].abs().mean()
    assert torch.equal(alter(IMAGES, 1.0, seeded()), made)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_values_stay_in_range_for_any_number_of_channels(channels: int) -> None:
    images = torch.randint(0, 256, (96, channels, 5, 5), generator=seeded()).float() / 255
    made = alter(images, 1.0, seeded())
    assert made.shape == images.shape
    assert made.isfinite().all()
    assert float(made.min()) >= 0
    assert float(made.max()) <= 1 + 1e-5


def test_an_even_image_can_be_stretched() -> None:
    assert alter(torch.full((200, 3, 4, 4), 0.5), 1.0, seeded()).isfinite().all()


def test_training_alters_and_testing_does_not() -> None:
    images = (IMAGES * 255).round().to(torch.uint8)
    prepare = Preparation((0.5,) * 3, (0.25,) * 3, alter=0.7)
    expected = (alter(images.float() / 255, 0.7, seeded()) - 0.5) / 0.25
    assert torch.equal(prepare.train(images, seeded()), expected)
    assert torch.equal(prepare.test(images), Preparation((0.5,) * 3, (0.25,) * 3).test(images))


def test_a_scenario_takes_a_strength_and_refuses_what_is_none() -> None:
    assert scenario({"name": "digits/5", "alter": 0.5}).tasks[0].prepare.alter == 0.5
    assert scenario({"name": "digits/5", "alter": 0}).tasks[0].prepare.alter == 0
    with pytest.raises(ValueError, match="'alter' is 2; it should be a strength from 0 to 1"):
        scenario({"name": "digits/5", "alter": 2})
    with pytest.raises(ValueError, match="alter is a strength from 0 to 1, not -1"):
        Preparation(alter=-1)
