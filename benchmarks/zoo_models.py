"""Which models the zoo converts, and how each is built: small inputs, no weights from anywhere."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.zoo_huggingface import TYPES, build_huggingface

SMALL = (
    "atto",
    "femto",
    "pico",
    "nano",
    "zepto",
    "xxtiny",
    "xxt",
    "xtiny",
    "xxs",
    "tiny",
    "_ti",
    "xs",
    "mini",
    "small",
)
LARGE = (
    "large",
    "huge",
    "giant",
    "enormous",
    "gigantic",
    "base",
    "medium",
    "plus",
    "xl",
    "pruned",
    "dist",
    "_enc",
    "so1",
    "so4",
)


@dataclass(frozen=True)
class Choice:
    """A model to convert."""

    library: str
    family: str
    model: str
    weights: float
    """About how many; for planning memory."""


def choices(families: int) -> list[Choice]:
    """All of torchvision's classification models, one of each of timm's largest families and one of each of 60 types of
    transformers, smallest first."""
    return sorted([*_torchvision(), *_timm(families), *_transformers()], key=lambda c: c.weights)


def _transformers() -> Iterator[Choice]:
    if importlib.util.find_spec("transformers") is not None:
        yield from (Choice("transformers", kind, kind, 1e5) for kind in TYPES)


def _torchvision() -> Iterator[Choice]:
    try:
        from torchvision import models
    except ImportError:
        return
    for name in models.list_models(module=models):
        weights = models.get_model_weights(name).DEFAULT.meta["num_params"]
        yield Choice("torchvision", re.split(r"[\d_]", name)[0], name, float(weights))


def _timm(families: int) -> Iterator[Choice]:
    try:
        import timm
    except ImportError:
        return
    found = {family: [n for n in timm.list_models(module=family) if "test_" not in n] for family in timm.list_modules()}
    largest = sorted((f for f in found if found[f]), key=lambda f: (-len(found[f]), f))[:families]
    for family in largest:
        yield Choice("timm", family, min(found[family], key=_order), 20e6)


def _order(name: str) -> tuple[float, int, str]:
    """The models that say they are small first, those that say they are large last; then the shortest name."""
    small = next((i for i, word in enumerate(SMALL) if word in name), len(SMALL))
    small = min(small, 4 if re.search(r"_(t|s|n|t0|s0|b0|m0)(_|\d*$)", name) else small)
    large = 20 * sum(word in name for word in LARGE) + 10 * bool(re.search(r"_(h|g|l|x|b)(_|$)", name))
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    resolution = max((n for n in numbers if n >= 160), default=0) / 100
    return (small + large + resolution + sum(n for n in numbers if n < 160) / 100, len(name), name)


def build(choice: Choice) -> tuple[Any, Any, str | None]:
    """The classifier (of timm: the feature extractor), a batch for it, small where the model allows it, and which part
    of its answer counts."""
    if choice.library == "transformers":
        return build_huggingface(choice.model)
    net, shape = _build_torchvision(choice.model) if choice.library == "torchvision" else _build_timm(choice.model)
    return net, torch.randn(2, *shape), None


def _build_torchvision(name: str) -> tuple[Any, tuple[int, int, int]]:
    from torchvision import models

    size, options = 64, {}
    if name.startswith("vit"):
        size = 4 * int(name.rsplit("_", 1)[1])
        options["image_size"] = size
    elif name in ("alexnet", "inception_v3", "densenet121", "densenet161", "densenet169", "densenet201"):
        size = 96
    elif name == "maxvit_t":
        size = 224
    if name in ("inception_v3", "googlenet"):
        options |= {"aux_logits": False, "init_weights": True}
    return models.get_model(name, weights=None, **options), (3, size, size)


def _build_timm(name: str) -> tuple[Any, tuple[int, int, int]]:
    import timm

    net = timm.create_model(name, pretrained=False, num_classes=0)
    config = getattr(net, "pretrained_cfg", None) or {}
    channels, size, _ = config.get("input_size", (3, 224, 224))
    sizes = [size] if config.get("fixed_input_size", False) else [n for n in (96, 128, 224) if n < size] + [size]
    taken = next(n for n in sizes if n == size or _takes(net, (channels, n, n)))
    return net, (channels, taken, taken)


def _takes(net: Any, shape: tuple[int, int, int]) -> bool:
    """Whether the model runs on inputs of this shape; no storage is needed to see that."""
    from zeroforget.axes.plain_modules import hollow

    try:
        with torch.no_grad():
            hollow(net).eval()(torch.empty(2, *shape, device="meta"))
    except Exception:
        return False
    return True
