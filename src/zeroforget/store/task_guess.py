"""Which task does a picture belong to? A guess: the task to whose own pictures it lies nearest, by that task's measure.

Asking which network is surest is a poor guide: a network that tells cats from dogs is sure of many a car. The features
it computes tell more, so each task keeps how those of its own pictures are spread (Lee et al., 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.data import Preparation, Split
from zeroforget.store.errors import Damaged
from zeroforget.store.schema import Calibration, Preprocessing, TaskFacts
from zeroforget.training import logits
from zeroforget.training.seeding import seeded

QUANTILES = 101
DIRECTIONS = 16
"""So many directions of a task's features are kept, those along which they spread most."""
SHRINK, SHRINK_UNIT = 0.3, 10.0
"""Of the average variance, added to that of every direction: few pictures say little about most of them. The second is
for features of length 1."""
SHARPNESS = 1.75
"""How fast a task becomes unlikely with distance: on photos and on digits, guesses called 85 to 95 % likely are then
right about as often."""
UNIT = "unit"
"""Stands beside the spread of features that are brought to length 1 first."""
SURE = 0.7
"""A guess that is less likely than this is called not sure."""
BATCH = 64
"""So many pictures are asked about at a time."""
SAMPLE = 4096
"""At most so many pictures are measured."""


def temperature(scores: Tensor, labels: Tensor) -> float:
    """The temperature of least loss on held-out pictures (Guo et al., 2017)."""
    scores = scores.double()
    # Platt's targets, (n + 1) / (n + 2) for the right class: else a perfect score would ask for absolute certainty.
    smoothing = scores.shape[1] / (scores.shape[1] - 1) / (len(labels) + 2)
    scales = torch.logspace(-1.3, 1.3, 105, dtype=torch.float64)  # 0.05 to 20
    losses = torch.stack([F.cross_entropy(scores / scale, labels, label_smoothing=smoothing) for scale in scales])
    return round(float(scales[int(losses.argmin())]), 6)


def probabilities(scores: Tensor, calibration: Calibration) -> Tensor:
    """Of each class, at the task's temperature."""
    return (scores.double() / calibration.temperature).softmax(1)


def sampled(count: int) -> Tensor:
    """The places of evenly chosen ones of so many pictures."""
    return torch.linspace(0, count - 1, min(SAMPLE, count)).long()


def features(dense: nn.Module, split: Split, prepare: Preparation) -> Tensor:
    """What a task's network hands to its head, for evenly chosen pictures of a split."""
    images, labels = split.batch(sampled(len(split)))
    return logits(dense.get_submodule("features"), Split(images, labels), prepare).double()


def spread(values: Tensor, labels: Tensor, classes: int, *, unit: bool = False) -> dict[str, Tensor]:
    """How a task's features are spread about the means of its classes: main directions, and one number for the rest.

    A class without a picture in the sample gets the mean of all. `unit` brings features to length 1 first. That is for
    those of frozen weights, which all tasks share: how strong they are does not tell one task from another. A network
    that was trained on the task is strong on what it knows.
    """
    values = F.normalize(values, dim=1) if unit else values
    every = values.mean(0)
    means = torch.stack([values[labels == c].mean(0) if (labels == c).any() else every for c in range(classes)])
    inner = values - means[labels]
    size, kept = values.shape[1], min(DIRECTIONS, *values.shape)
    total = float(inner.square().sum()) / len(inner)
    with seeded("directions"):
        _, scale, directions = torch.svd_lowrank(inner, q=kept, niter=4)
    variances = scale.square() / len(inner)
    rest = max(total - float(variances.sum()), 0.0) / max(size - kept, 1)
    more = (SHRINK_UNIT if unit else SHRINK) * total / size + 1e-12
    out = {"means": means, "directions": directions, "variances": variances + more, "rest": torch.tensor([rest + more])}
    out |= {UNIT: torch.ones(1)} if unit else {}
    return {name: tensor.float().contiguous() for name, tensor in out.items()}


def distance(values: Tensor, about: Mapping[str, Tensor]) -> Tensor:
    """From each picture's features to the nearest class of a task: Mahalanobis, per direction."""
    directions, variances, rest = (about[name].double() for name in ("directions", "variances", "rest"))
    values = F.normalize(values.double(), dim=1) if UNIT in about else values.double()
    nearest = torch.full((len(values),), torch.inf, dtype=torch.float64)
    for mean in about["means"].double():
        away = values - mean
        along = away @ directions
        outside = (away.square().sum(1) - along.square().sum(1)).clamp_min(0) / rest
        inside = (along.square() / variances).sum(1)
        nearest = torch.minimum(nearest, inside + outside)
    return (nearest / values.shape[1]).sqrt()


def check(about: Mapping[str, Tensor], dense: nn.Module, classes: int, where: object) -> None:
    """Raise Damaged unless these tensors fit the network."""
    width = getattr(dense.get_submodule("head"), "in_features", 0)
    kept = about["variances"].numel() if "variances" in about else 0
    shapes = {"means": (classes, width), "directions": (width, kept), "variances": (kept,), "rest": (1,)}
    shapes |= {UNIT: (1,)} if UNIT in about else {}
    if {name: tuple(tensor.shape) for name, tensor in about.items()} != shapes:
        raise Damaged(where, "its tensors do not fit the task's network")
    if any(tensor.dtype != torch.float32 or not tensor.isfinite().all() for tensor in about.values()):
        raise Damaged(where, "its tensors are not all finite numbers")
    if not (about["variances"] > 0).all() or not (about["rest"] > 0).all():
        raise Damaged(where, "its variances are not all above zero")


def quantiles(distances: Tensor) -> tuple[float, ...]:
    """How far a task's own held-out pictures lie, from the nearest to the farthest."""
    found = distances.quantile(torch.linspace(0, 1, QUANTILES, dtype=torch.float64))
    return tuple(round(v, 6) for v in found.sort().values.tolist())


def surprise(distances: Tensor, calibration: Calibration) -> Tensor:
    """How much farther pictures lie than a task's own, in units of how those vary."""
    low, middle, high = (calibration.quantiles[i * (len(calibration.quantiles) - 1) // 20] for i in (1, 10, 19))
    return (distances - middle) / (max(high - low, 1e-6) / 3.29)  # 5 % to 95 % of a normal distribution


def rank(distances: Mapping[str, Tensor], calibrations: Mapping[str, Calibration]) -> dict[str, Tensor]:
    """Task → how likely it is the one, for each picture; over all tasks these sum to 1."""
    names = list(distances)
    away = torch.stack([surprise(distances[name], calibrations[name]) for name in names])
    return dict(zip(names, (-SHARPNESS * away).softmax(0), strict=True))


@torch.no_grad()
def likely(
    images: Tensor,
    tasks: Sequence[TaskFacts],
    dense: Callable[[TaskFacts], nn.Module],
    spread_of: Callable[[TaskFacts], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Task → how likely it is the one, for each prepared picture. `dense` gives one task's network after the other."""
    away, inputs = {}, dict[Preprocessing, list[Tensor]]()
    for task in tasks:
        if (kind := task.preprocessing) not in inputs:
            prepare = Preparation(mean=kind.mean, std=kind.std)
            inputs[kind] = [prepare.test(part) for part in images.split(BATCH)]
        features = dense(task).get_submodule("features")
        away[task.name] = distance(torch.cat([features(part) for part in inputs[kind]]), spread_of(task))
    return rank(away, {task.name: task.calibration for task in tasks})
