"""Networks from a grammar of layers, norms, branches, reshapes, hooks and shared modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

Block = tuple[str, int]
"""What it is, and a number that decides about its widths."""
FEATURES = 6


class Layered(nn.Module):
    """Rows or words through a list of blocks; `build` makes one, `run` runs it."""

    def __init__(self, blocks: list[Block], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = blocks
        self.parts = nn.ModuleList()
        self.constant, self.count = torch.tensor(1.5), 0
        width = FEATURES
        for kind, number in blocks:
            part, width = _MAKES[kind](width, number)
            self.parts.append(part)
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for (kind, number), part in zip(self.blocks, self.parts, strict=True):
            x = self.run(kind, number, part, x)
        out: Tensor = self.last(x.mean(1) if x.dim() == 3 else x)
        return out

    def run(self, kind: str, number: int, part: nn.Module, x: Tensor) -> Tensor:
        match kind:
            case "residual" | "scaled":
                return x + part(x) * (self.constant if kind == "scaled" else 1)
            case "same":  # a skip where shapes happen to agree
                y = part(x)
                return x + y if x.shape == y.shape else y
            case "joined":
                return torch.cat([x, part(x).relu()], dim=-1)
            case "gate":
                return x * part(x).sigmoid()
            case "shared":
                return part(part(x).relu())
            case "glu":
                return F.glu(part(x))
            case "chunk":
                a, b = part(x).chunk(2, dim=-1)
                return a * b.tanh()
            case "heads":
                y = part(x)
                y = y.view(*y.shape[:-1], 2, -1)
                return (y * y.softmax(-1)).flatten(-2) if number % 2 else y.relu().transpose(-1, -2).flatten(-2)
            case "pool":
                shape = x.shape
                return F.max_pool1d(x.reshape(-1, 1, shape[-1]), 3, stride=1, padding=1).reshape(shape)
            case "state":
                h = torch.zeros(*x.shape[:-1], part.out_features, dtype=x.dtype, device=x.device)
                return torch.tanh(part(x) + h)
            case "flip":
                return x.flip(-1) if number % 2 else x.roll(1, -1)
            case "sort":
                return x.sort(-1).values
            case "places":
                return x * (1 + number / x.shape[-1])
            case "cut off":
                return x + part(x.detach()).detach()
            case "training":
                return x + part(x) if self.training else x
            case "counter":
                self.count += self.training
                return x * (1 + self.count) if number % 4 == 0 else x
            case "threshold":
                return x.tanh() if x.shape[-1] > 8 + number else x
            case "recurrent":
                states: Tensor = part(x if x.dim() == 3 else x[:, None])[0]
                return states if x.dim() == 3 else states[:, 0]
        out: Tensor = part(x)
        return out


def _linear(width: int, number: int) -> tuple[nn.Module, int]:
    return nn.Linear(width, 3 + number), 3 + number


def _square(width: int, number: int) -> tuple[nn.Module, int]:
    return nn.Linear(width, width, bias=bool(number % 2)), width


def _bottleneck(width: int, number: int) -> tuple[nn.Module, int]:
    return nn.Sequential(nn.Linear(width, 2 + number), nn.GELU(), nn.Linear(2 + number, width)), width


def _doubling(width: int, number: int) -> tuple[nn.Module, int]:
    return nn.Linear(width, 2 * (2 + number)), 2 + number


def _heads(width: int, number: int) -> tuple[nn.Module, int]:
    return nn.Linear(width, 2 * (2 + number)), 2 * (2 + number)


def _norm(width: int, number: int) -> tuple[nn.Module, int]:
    return [nn.LayerNorm, nn.RMSNorm, nn.Identity][number % 3](width) if number % 3 != 2 else nn.Identity(), width


def _hooked(width: int, number: int) -> tuple[nn.Module, int]:
    part = nn.Sequential(nn.Linear(width, 3 + number), nn.Tanh())
    if number % 3 == 0:  # it would read the given network for ever
        part[1].register_forward_hook(lambda _m, _a, out, layer=part[0]: out * layer.weight.mean())
    else:
        part[1].register_forward_hook(lambda _m, _a, out: out * 0.5)
    return part, 3 + number


class Centred(nn.Module):
    """Takes off a running mean, which training moves."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().flatten(0, -2).mean(0), 0.1)
        return x - self.mean


def _parametrized(width: int, number: int) -> tuple[nn.Module, int]:
    norm = [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm][number % 2]
    return norm(nn.Linear(width, 3 + number)), 3 + number


def _idle(width: int, number: int) -> tuple[nn.Module, int]:
    return [nn.Identity(), nn.ReLU(), nn.Dropout(0.3), nn.Softplus()][number % 4], width


_MAKES: dict[str, Callable[[int, int], tuple[nn.Module, int]]] = {
    "linear": _linear,
    "residual": _bottleneck,
    "scaled": _square,
    "same": _linear,
    "joined": lambda width, number: (nn.Linear(width, 2 + number), width + 2 + number),
    "gate": _square,
    "shared": _square,
    "glu": _doubling,
    "chunk": _doubling,
    "heads": _heads,
    "norm": _norm,
    "hook": _hooked,
    "idle": _idle,
    "pool": lambda width, _: (nn.Identity(), width),
    "state": _linear,
    "flip": lambda width, _: (nn.Identity(), width),
    "sort": lambda width, _: (nn.Identity(), width),
    "places": lambda width, _: (nn.Identity(), width),
    "cut off": _square,
    "training": _square,
    "counter": lambda width, _: (nn.Identity(), width),
    "threshold": lambda width, _: (nn.Identity(), width),
    "recurrent": lambda width, number: (nn.GRU(width, 3 + number, batch_first=True), 3 + number),
    "running mean": lambda width, _: (Centred(width), width),
    "parametrized": _parametrized,
}

blocks = st.lists(st.tuples(st.sampled_from(sorted(_MAKES)), st.integers(0, 7)), min_size=1, max_size=6)
