"""Small real data as folders of pictures, and models that learned from them in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from zeroforget.store import Model, TaskFacts, open_model

QUICK: dict[str, Any] = {"size": 8, "gray": True, "epochs": 3, "batch_size": 16}
LATER: dict[str, Any] = {"epochs": 3, "batch_size": 16, "rank": 2}
"""Later tasks have rank births, so every campaign meets them."""


def write_digits(folder: Path, classes: tuple[int, ...], per_class: int = 24) -> Path:
    """scikit-learn's 8×8 digits as PNG files in class folders."""
    digits = load_digits()
    for number in classes:
        place = folder / f"digit{number}"
        place.mkdir(parents=True)
        for row, values in enumerate(digits.images[digits.target == number][:per_class]):
            Image.fromarray((values / 16 * 255).round().astype(np.uint8)).save(place / f"{row:03d}.png")
    return folder


def pictures(base: Path) -> Path:
    """Three tasks' pictures below one folder: `low` (0, 1), `middle` (2, 3, 4) and `high` (8, 9)."""
    for name, classes in (("low", (0, 1)), ("middle", (2, 3, 4)), ("high", (8, 9))):
        write_digits(base / name, classes)
    return base


def learned(path: Path, data: Path, *names: str) -> Model:
    """A model that has learned these tasks."""
    model = open_model(path)
    for place, name in enumerate(names):
        model.learn(data / name, name, **(LATER if place else QUICK))
    return model


def learn_more(model: Model, data: Path, name: str, **more: Any) -> TaskFacts:
    """One more task, quickly."""
    return model.learn(data / name, name, **(LATER | more))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder that belongs to the model, with its content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    relative = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: path.read_bytes() for name, path in relative.items() if not name.startswith(".")}
