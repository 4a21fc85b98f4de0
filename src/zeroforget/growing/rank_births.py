"""Rank births: a step of low rank that a task adds to what is older than it, and that no older task ever sees.

Task k uses W(k) = W + Σ up(s) · down(s) over all s ≤ k, each on the block of features older than s. `up` starts at
zero, so a new task begins with the function it was given; `down` starts with orthonormal rows.

Written down, both hold whole numbers of at most 14 bits and a sign, times a power of two. Their product in float64 is
then exact in whatever order it is summed, so every machine, device and number of threads adds the same bits to W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.growing.growth import number

Rank = float | Mapping[str, float]
"""A number of directions, a share of each weight's full rank, or one of these for each weight that is named."""

_BITS = 14
_SMALL = 256
"""Of fewer inputs, or fewer samples, all directions are found; of more only the leading ones are looked for."""
_IMAGES, _SAMPLES = 64, 1024
"""So many images are looked at together, and of each layer's inputs about so many samples are kept in all."""
_CHUNK = 2**20
"""So many products are made at a time: a step in float64 would take twice the weight's memory."""


class RankBirth(nn.Module):
    """One task's step for one weight, seen as a matrix: `up` (outputs × rank) times `down` (rank × inputs).

    While its task is learned both are parameters; afterwards they are buffers of 16-bit numbers.
    """

    up: Tensor
    down: Tensor
    powers: Tensor

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        self.register_buffer("powers", torch.zeros(2, dtype=torch.int16, device=up.device))

    @property
    def open(self) -> bool:
        """Whether it is being learned."""
        return "up" in self._parameters

    @property
    def rank(self) -> int:
        """How many directions it has."""
        return self.down.shape[0]

    @property
    def bits(self) -> int:
        """What it takes when it is written down."""
        return 16 * (self.up.numel() + self.down.numel() + self.powers.numel())

    def written(self) -> dict[str, Tensor]:
        """The numbers to keep: `up` and `down` in 16 bits, and the powers of two that they are multiplied by."""
        if not self.open:
            return {"up": self.up, "down": self.down, "powers": self.powers}
        (up, first), (down, second) = _on_grid(self.up), _on_grid(self.down)
        if not (up.isfinite().all() and down.isfinite().all()):
            raise ValueError(
                "a rank birth of the newest task holds NaN or infinity, which cannot be kept: drop_task() takes the "
                "task back; learn it again with a lower learning rate or a bound on the gradient"
            )
        powers = torch.tensor([first, second], dtype=torch.int16, device=self.up.device)
        return {"up": up.to(torch.int16), "down": down.to(torch.int16), "powers": powers}

    def close(self) -> None:
        """Nothing of it is a parameter any more."""
        if self.open:
            for name, value in self.written().items():
                self._parameters.pop(name, None)
                self.register_buffer(name, value)

    def reopen(self, dtype: torch.dtype) -> None:
        """Undo `close`: what was written down is learned again."""
        if not self.open:
            values = [(name, self.numbers(name).to(dtype)) for name in ("up", "down")]
            for name, value in values:
                del self._buffers[name]
                self.register_parameter(name, nn.Parameter(value))

    def fill(self, written: Mapping[str, Tensor]) -> None:
        """Put back what `written` gave. ValueError if it is nothing that could have been written."""
        powers = written["powers"].tolist()
        largest = max(int(t.abs().max()) if t.numel() else 0 for t in (written["up"].int(), written["down"].int()))
        if largest > 2**_BITS or not all(-1000 <= power <= 200 for power in powers):
            raise ValueError("a rank birth holds numbers that are none of its kind")
        was_open, dtype = self.open, self.up.dtype
        for name, value in written.items():
            self._parameters.pop(name, None)
            self.register_buffer(name, value.to(self.powers.device, torch.int16).clone())
        if was_open:
            self.reopen(dtype)

    def numbers(self, name: str) -> Tensor:
        """`up` or `down` as it is written down, in float64."""
        value = getattr(self, name)
        if self.open:
            whole, power = _on_grid(value)
        else:
            whole, power = value.double(), int(self.powers[0 if name == "up" else 1])
        return whole * math.ldexp(1.0, power)

    def step(self, give: Callable[[int, Tensor], None]) -> None:
        """Compute what is added to the old block, exactly, and `give` it in runs of rows: (first row, float64 rows)."""
        up, down = self.numbers("up"), self.numbers("down")
        if up.device.type not in {"cpu", "cuda"}:  # not every device has float64
            up, down = up.cpu(), down.cpu()
        rows = max(1, _CHUNK // max(1, down.shape[1]))
        for first in range(0, len(up), rows):
            give(first, up[first : first + rows] @ down)


def _on_grid(values: Tensor) -> tuple[Tensor, int]:
    """The nearest whole numbers up to 2¹⁴ in size, and the power of two that gives the values back; NaN stays."""
    values = values.detach().double()
    largest = float(values.abs().max()) if values.numel() else 0.0
    power = 0
    if 0 < largest < math.inf:
        mantissa, exponent = math.frexp(largest)
        power = exponent - (mantissa == 0.5) - _BITS  # a power of two is on its own grid: twice rounded is once rounded
    return (values * math.ldexp(1.0, -power)).round(), power


def orthonormal(rank: int, inputs: int, like: Tensor) -> Tensor:
    """Random directions at right angles to each other."""
    drawn = torch.randn(inputs, rank, dtype=torch.float64, device=like.device)
    directions: Tensor = torch.linalg.qr(drawn)[0].t().to(like.dtype).contiguous()
    return directions


def leading(inputs: Tensor, rank: int) -> Tensor:
    """The directions in which a layer's inputs (samples × inputs) are largest: a gradient of its weights lies there.
    Random ones come behind them where there are not enough."""
    most = min(inputs.shape)
    if most <= _SMALL:
        found = torch.linalg.svd(inputs, full_matrices=False)[2][:rank].t()
    else:
        found = torch.svd_lowrank(inputs, q=min(most, rank + 8), niter=4)[2][:, :rank]
    rest = torch.randn(inputs.shape[1], rank - found.shape[1], dtype=inputs.dtype, device=inputs.device)
    directions: Tensor = torch.linalg.qr(torch.cat([found, rest], 1))[0].t().contiguous()
    return directions


@torch.no_grad()
def input_samples(net: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Weight of a plain network's layer → what the layer read for these images: (samples, inputs, positions of its
    kernel). Convolutions with groups are left out: their matrices have few inputs, so any directions will do."""
    found: dict[str, list[Tensor]] = {}
    hooks = []
    features, each = net.get_submodule("features"), max(1, _SAMPLES // -(-len(images) // _IMAGES))
    for path, module in features.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and getattr(module, "groups", 1) == 1:
            name = f"{path}.weight" if path else "weight"
            hooks.append(module.register_forward_pre_hook(_keep(found.setdefault(name, []), each)))
    try:
        for part in images.split(_IMAGES):
            net(part)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


def _keep(parts: list[Tensor], most: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def look(module: nn.Module, given: tuple[Any, ...]) -> None:
        x = given[0]
        rows = x.reshape(-1, x.shape[-1], 1) if isinstance(module, nn.Linear) else _patches(module, x, most)
        parts.append(rows[:: -(-len(rows) // most)].clone())

    return look


def _patches(conv: nn.Module, x: Tensor, most: int) -> Tensor:
    """What a convolution reads at each of about so many positions: (positions, channels, kernel)."""
    numbers: Any = conv
    if x.dim() == 1 + len(numbers.kernel_size):
        x = x.unsqueeze(0)
    if numbers.padding_mode == "zeros" and not isinstance(numbers.padding, str):
        x = F.pad(x, [n for pad in reversed(numbers.padding) for n in (pad, pad)])
    else:
        mode = "constant" if numbers.padding_mode == "zeros" else numbers.padding_mode
        x = F.pad(x, numbers._reversed_padding_repeated_twice, mode=mode)
    dims = list(range(2, x.dim()))
    for dim, size, stride, dilation in zip(dims, numbers.kernel_size, numbers.stride, numbers.dilation, strict=True):
        x = x.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
    every = math.ceil((math.prod((len(x), *(x.shape[d] for d in dims))) / most) ** (1 / len(dims)))
    for dim in dims:
        x = x[(slice(None),) * dim + (slice(None, None, min(every, x.shape[dim])),)]
    return x.movedim(1, len(dims) + 1).flatten(0, len(dims)).flatten(2)


def ranks_of(rank: Any, full: Mapping[str, int]) -> dict[str, int]:
    """Weight → its rank, none above `full`, where a step of low rank would be one of any rank. ValueError says what is
    wrong with the wish."""
    if isinstance(rank, Mapping):
        if unknown := [name for name in rank if name not in full]:
            raise ValueError(f"no weight '{unknown[0]}' that a rank could be given to; there are {', '.join(full)}")
        return {name: _rank(wanted, full[name]) for name, wanted in rank.items()}
    return {name: _rank(rank, most) for name, most in full.items()}


def _rank(wanted: Any, full: int) -> int:
    value = as_rank(wanted)
    return min(full, value if isinstance(value, int) else max(1, round(value * full)) if value else 0)


def as_rank(rank: Any) -> Any:
    """A rank in Python's own numbers."""
    if isinstance(rank, Mapping):
        return {name: as_rank(wanted) for name, wanted in rank.items()}
    value = number(rank)
    if isinstance(value, float) and value >= 1 and value.is_integer():
        value = int(value)  # options are read as floats, so 16 comes as 16.0
    if value is None or not (value >= 0 and (isinstance(value, int) or value < 1)):
        raise ValueError(
            "a rank is a whole number of directions (16), a share below 1 of the full rank (0.05), or one of these for "
            f"each weight that is named, not {rank!r}"
        )
    return value
