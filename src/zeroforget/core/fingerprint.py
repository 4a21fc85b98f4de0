"""A short name for every bit of a network."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def fingerprint(net: nn.Module) -> str:
    """The SHA-256 of all its parameters and buffers, with names, types and shapes; the same on every device."""
    found = hashlib.sha256()
    for name, tensor in sorted([*net.named_parameters(), *net.named_buffers()]):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
