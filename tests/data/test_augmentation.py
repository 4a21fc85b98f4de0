"""Crops, zooms and flips of whole batches against a loop over images and pixels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroforget.data import Preparation, scenario

IMAGES = torch.randint(0, 256, (9, 3, 8, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def slow(images: Tensor, *, pad: int = 0, zoom: float = 1.0, flip: bool = False, erase: int = 0) -> Tensor:
    """The same from the same draws: image by image, pixel by pixel, in double precision."""
    draws = seeded()
    out = images.double() / 255
    count, _, height, width = images.shape
    if pad:
        down = torch.randint(2 * pad + 1, (count, 1), generator=draws)
        across = torch.randint(2 * pad + 1, (count, 1), generator=draws)
        moved = torch.zeros_like(out)
        for i in range(count):
            for y in range(height):
                for x in range(width):
                    old_y, old_x = y + int(down[i]) - pad, x + int(across[i]) - pad
                    if 0 <= old_y < height and 0 <= old_x < width:
                        moved[i, :, y, x] = out[i, :, old_y, old_x]
        out = moved
    if zoom < 1:
        share, shape, across, down = torch.rand(4, count, 1, generator=draws).double()
        out = torch.stack(
            [zoomed(out[i], zoom, *(float(d[i]) for d in (share, shape, across, down))) for i in range(count)]
        )
    if flip:
        coins = torch.rand(count, generator=draws) < 0.5
        out = torch.stack([image.flip(-1) if coin else image for image, coin in zip(out, coins, strict=True)])
    out = (out - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    if erase:
        middles = [torch.randint(size, (count, 1), generator=draws) for size in (height, width)]
        for i in range(count):
            top, left = (int(middle[i]) - erase // 2 for middle in middles)
            for y in range(max(top, 0), min(top + erase, height)):
                for x in range(max(left, 0), min(left + erase, width)):
                    out[i, :, y, x] = 0.0
    return out


def zoomed(image: Tensor, zoom: float, share: float, shape: float, across: float, down: float) -> Tensor:
    """The window's upper left corner and size in pixels, then the mean of four neighbours for every new pixel."""
    _, height, width = image.shape
    area, ratio = zoom + (1 - zoom) * share, (4 / 3) ** (2 * shape - 1)
    wide, high = min(1.0, math.sqrt(area * ratio)) * width, min(1.0, math.sqrt(area / ratio)) * height
    left, top = across * (width - wide), down * (height - high)
    out = torch.zeros_like(image)
    for y in range(height):
        for x in range(width):
            fine_x = min(max(left + (x + 0.5) * wide / width - 0.5, 0.0), width - 1.0)
            fine_y = min(max(top + (y + 0.5) * high / height - 0.5, 0.0), height - 1.0)
            x0, y0 = math.floor(fine_x), math.floor(fine_y)
            x1, y1 = min(x0 + 1, width - 1), min(y0 + 1, height - 1)
            a, b = fine_x - x0, fine_y - y0
            upper = (1 - a) * image[:, y0, x0] + a * image[:, y0, x1]
            lower = (1 - a) * image[:, y1, x0] + a * image[:, y1, x1]
            out[:, y, x] = (1 - b) * upper + b * lower
    return out


@pytest.mark.parametrize(
    "how",
    [
        {},
        dict(pad=2),
        dict(zoom=0.4),
        dict(flip=True),
        dict(erase=3),
        dict(erase=4),
        dict(pad=1, flip=True),
        dict(pad=2, zoom=0.3, flip=True, erase=5),
    ],
    ids=str,
)
def test_a_batch_is_what_the_loop_makes(how: dict[str, Any]) -> None:
    made = Preparation(MEAN, STD, **how).train(IMAGES, seeded())
    assert made.shape == IMAGES.shape
    assert torch.allclose(made.double(), slow(IMAGES, **how), atol=1e-4)


@pytest.mark.parametrize("how", [dict(pad=2), dict(zoom=0.4), dict(flip=True), dict(erase=3)], ids=str)
def test_images_of_a_batch_are_varied_each_in_its_own_way_and_tests_not_at_all(how: dict[str, Any]) -> None:
    same = IMAGES[:1].expand(64, -1, -1, -1)
    prepare = Preparation(MEAN, STD, **how)
    made = prepare.train(same, seeded())
    different = {image.numpy().tobytes() for image in made}
    assert len(different) > (1 if how == dict(flip=True) else 12)
    assert torch.equal(prepare.test(same), Preparation(MEAN, STD).test(same))


def test_a_crop_is_anywhere_in_training_and_in_the_middle_for_tests() -> None:
    places = torch.arange(80.0).view(1, 1, 8, 10)
    made = Preparation(crop=6).train(places.expand(400, -1, -1, -1), seeded())
    assert made.shape == (400, 1, 6, 6)
    assert torch.equal(made, made[:, :, :1, :1] + places[:, :, :6, :6])
    assert set(made[:, 0, 0, 0].tolist()) == {10.0 * row + column for row in range(3) for column in range(5)}
    assert torch.equal(Preparation(crop=6).test(places), places[:, :, 1:7, 2:8])
    assert torch.equal(Preparation(crop=5).test(places), places[:, :, 1:6, 2:7])
    with pytest.raises(ValueError, match=r"cannot crop 9x9 out of images of \(8, 10\)"):
        Preparation(crop=9).train(places)


def test_a_scenario_by_name_takes_options_of_its_own() -> None:
    plain = scenario("digits/5")
    varied = scenario({"name": "digits/5", "pad": 1, "zoom": 0.8, "flip": True, "erase": 2})
    assert [t.classes for t in varied.tasks] == [t.classes for t in plain.tasks]
    wanted = (True, 1, 0.8, 2)
    assert all((t.prepare.flip, t.prepare.pad, t.prepare.zoom, t.prepare.erase) == wanted for t in varied.tasks)
    assert not plain.tasks[0].prepare.pad
    assert varied.tasks[0].prepare.mean == plain.tasks[0].prepare.mean


@pytest.mark.parametrize(
    ("key", "value"), [("pad", -1), ("pad", 1.5), ("zoom", 0), ("zoom", 1.1), ("flip", "yes"), ("erase", -2)]
)
def test_what_cannot_be_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        scenario({"name": "digits/5", key: value})


def test_a_preparation_checks_itself() -> None:
    with pytest.raises(ValueError, match="zoom"):
        Preparation(zoom=0.0)
