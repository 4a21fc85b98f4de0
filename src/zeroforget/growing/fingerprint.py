"""A short name for every bit that a network saves."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def fingerprint(module: nn.Module) -> str:
    """The SHA-256 of every tensor in a module's state dict, with its name, type and shape; the same on every device."""
    out = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        out.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        out.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return out.hexdigest()
