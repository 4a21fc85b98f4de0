"""A head on features that stay as they are: they are computed once, and the head is fitted to all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

STRENGTHS = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.001)
"""Of the pull towards zero, per squared weight of scaled features; selection pictures choose."""
USUAL = 1.0
"""The strength where there are no selection pictures."""
STEPS = 60


@dataclass(frozen=True)
class Head:
    """A linear layer, and how it came."""

    weight: Tensor
    bias: Tensor
    strength: float
    accuracy: float
    """On the selection part, before that was learned from as well."""
    loss: float
    """There, at the best temperature: a strong pull makes a head unsure, not wrong."""
    first: tuple[Tensor, Tensor]
    """Weight and bias before the selection part was learned from as well."""


def fit_head(
    train: tuple[Tensor, Tensor], selection: tuple[Tensor, Tensor], classes: int, *, even: bool = True
) -> Head:
    """Multinomial logistic regression on (features, labels). Nothing is random.

    Where it is to be `even`, every class counts the same, however many pictures it has.

    The strength of the pull towards zero is the one of least loss on the selection part; then the head is fitted to
    both parts. If the selection part is the training part, it chooses nothing and is not counted twice.

    Features are divided by a scale halfway between their own and all features': divided by its own alone, one that
    hardly varies would count as much as one that tells classes apart (`docs/diary.md`).
    """
    x, y = train
    alone = selection[0] is x
    mean, own = x.mean(0), x.std(0, correction=0)
    scale = ((own + own.mean()) / 2).clamp_min(1e-6)
    near = (selection[0] - mean) / scale
    found: list[tuple[float, float, float]] = []
    heads = dict[float, tuple[Tensor, Tensor]]()
    weight, bias = torch.zeros(classes, x.shape[1]), torch.zeros(classes)
    for strength in (USUAL,) if alone else STRENGTHS:  # from strong to weak, each from where the last one ended
        weight, bias = _fitted((x - mean) / scale, y, strength, weight, bias, even)
        scores = near @ weight.T + bias
        heads[strength] = weight, bias
        right = float((scores.argmax(1) == selection[1]).double().mean())
        found.append((_loss(scores, selection[1]), -strength, right))
    loss, negative, accuracy = min(found)
    strength = -negative
    weight, bias = heads[strength]
    first = weight / scale, bias - (weight / scale) @ mean
    if not alone:
        x, y = torch.cat([x, selection[0]]), torch.cat([y, selection[1]])
    weight, bias = _fitted((x - mean) / scale, y, strength, weight, bias, even)
    weight = weight / scale
    return Head(weight, bias - weight @ mean, strength, accuracy, loss, first)


def _loss(scores: Tensor, labels: Tensor) -> float:
    return min(float(F.cross_entropy(scores / scale, labels)) for scale in torch.logspace(-1.3, 1.3, 27))


def _fitted(x: Tensor, y: Tensor, strength: float, weight: Tensor, bias: Tensor, even: bool) -> tuple[Tensor, Tensor]:
    share = torch.bincount(y, minlength=len(bias)).clamp_min(1) / len(y)
    shares = 1 / (len(bias) * share) if even else None
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight.T + bias, y, weight=shares) + strength / 2 * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach(), bias.detach()
