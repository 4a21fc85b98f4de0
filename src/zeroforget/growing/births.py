"""Births: for each feature the task it was born with, counted from 0. Everything else about forgetting follows.

Task k uses exactly what is born at or before k; learning task t trains exactly what is born at t. The paper's masks
are views of that: three states a feature, and the weights that each equation selects.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class State(IntEnum):
    """What a feature is to a task: the values of `GrowingNetwork.masks`.

    Example:
        >>> import zeroforget
        >>> zeroforget.State(2).name
        'NORMAL'
    """

    MASKED = 0
    """Born later: it does not exist for this task."""
    FORWARD_ONLY = 1
    """Born earlier: used, never changed."""
    NORMAL = 2
    """Born with this task: used and learned."""


def weight_births(*dims: Tensor) -> Tensor:
    """The birth of each weight: the latest of the births along its dimensions (out, in, ...)."""
    out = dims[0]
    for births in dims[1:]:
        out = torch.maximum(out.unsqueeze(-1), births)
    return out


def states(births: Tensor, task: int) -> Tensor:
    """The ternary mask of a task: State of each feature, as bytes."""
    return ((births <= task).to(torch.uint8) + (births == task).to(torch.uint8)).to(torch.uint8)


def learnable(births: Tensor, task: int) -> Tensor:
    """The binary mask m of equation 1: the features that are this task's own. Masks of two tasks never overlap."""
    return births == task


def used(births: Tensor, task: int) -> Tensor:
    """The mask n of equation 3: the features that this task or an earlier one created."""
    return births <= task


def own_weights(out: Tensor, into: Tensor, task: int) -> Tensor:
    """Equation 2, the binary case: weights between two features of this task alone."""
    return learnable(out, task)[:, None] & learnable(into, task)[None, :]


def newborn_weights(out: Tensor, into: Tensor, task: int) -> Tensor:
    """Equations 5 and 6: weights that this task can use and the one before could not, which are those it trains."""
    return weight_births(out, into) == task


def pack(mask: Tensor) -> Tensor:
    """Four features a byte, two bits each, the first in the lowest bits."""
    if mask.dim() != 1:
        raise ValueError(f"a mask to pack is one vector of states, not a tensor of shape {tuple(mask.shape)}")
    if len(mask) and (int(mask.min()) < State.MASKED or int(mask.max()) > State.NORMAL):
        raise ValueError("a mask to pack holds the states 0, 1 and 2 only")
    padded = torch.zeros(-(-len(mask) // 4) * 4, dtype=torch.uint8)
    padded[: len(mask)] = mask
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return (padded.view(-1, 4) << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, features: int) -> Tensor:
    """The states of `features` features out of their packed form."""
    if len(packed) != -(-features // 4):
        raise ValueError(f"{features} features pack into {-(-features // 4)} bytes, but there are {len(packed)}")
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return ((packed[:, None] >> shifts) & 3).flatten()[:features]
