"""Which task does a picture belong to? A guess: the task whose network is surest of it, by its own standards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroforget.store.facts import Calibration

QUANTILES = 101


def calibrate(logits: Tensor, labels: Tensor) -> Calibration:
    """From held-out pictures: the temperature of least loss (Guo et al., 2017), and how confidence is spread."""
    logits = logits.double()
    # Platt's targets, (n + 1) / (n + 2) for the right class: else a perfect score would ask for absolute certainty.
    smoothing = logits.shape[1] / (logits.shape[1] - 1) / (len(labels) + 2)
    scales = torch.logspace(-1.3, 1.3, 105, dtype=torch.float64)  # 0.05 to 20
    losses = torch.stack([F.cross_entropy(logits / scale, labels, label_smoothing=smoothing) for scale in scales])
    temperature = round(float(scales[int(losses.argmin())]), 6)
    quantiles = confidence(logits, temperature).quantile(torch.linspace(0, 1, QUANTILES, dtype=torch.float64))
    return Calibration(temperature, tuple(round(v, 6) for v in quantiles.sort().values.tolist()))


def probabilities(logits: Tensor, calibration: Calibration) -> Tensor:
    """Of each class, at the task's temperature."""
    return (logits.double() / calibration.temperature).softmax(1)


def confidence(logits: Tensor, temperature: float) -> Tensor:
    """The free energy of a picture: large when some class is far ahead of none at all (Liu et al., 2020)."""
    return (logits.double() / temperature).logsumexp(1)


def surprise(logits: Tensor, calibration: Calibration) -> Tensor:
    """How far below a task's usual confidence each picture lies, in units of that task's own spread."""
    low, middle, high = (calibration.quantiles[i * (len(calibration.quantiles) - 1) // 20] for i in (1, 10, 19))
    spread = max(high - low, 1e-6) / 3.29  # 5 % to 95 % of a normal distribution
    return (middle - confidence(logits, calibration.temperature)) / spread


def rank(logits: Mapping[str, Tensor], calibrations: Mapping[str, Calibration]) -> dict[str, Tensor]:
    """Task → how likely it is the one, for each picture; over all tasks these sum to 1."""
    names = list(logits)
    distance = torch.stack([surprise(logits[name], calibrations[name]) for name in names])
    return dict(zip(names, (-distance).softmax(0), strict=True))
