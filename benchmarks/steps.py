"""One learning step: fine-tuning, growing, naive masks and the floor, in one run (`python -m benchmarks.steps`)."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.facts import commit
from benchmarks.naive import NaiveMasks
from benchmarks.timing import Step, captured, medians
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import build
from zeroforget.operators.recorded import backward
from zeroforget.proving.grow import grow

CLASSES, RANK = 20, 16


def sgd(parameters: Iterator[nn.Parameter], device: str) -> torch.optim.Optimizer:
    """Plain SGD as fast as torch has it."""
    cuda = device == "cuda"
    lr = torch.tensor(1e-3, device=device) if cuda else 1e-3
    return torch.optim.SGD(list(parameters), lr=lr, fused=cuda)


def step_of(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    bf16: bool,
    optimizer: torch.optim.Optimizer | None,
    *args: Any,
    waits: bool = False,
) -> Step:
    """Forward, backward, update. If it `waits`, gradients of weights come when the whole way back is done."""

    def step() -> None:
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
            loss = F.cross_entropy(model(x, *args), y)
        if waits:
            backward(loss)
        else:
            loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def newborn(full: int, frozen: float, align: int) -> int:
    """How many features of an axis are new: a multiple of `align`, and never none, which would cost nothing."""
    return min(full - 1, max(1, round(full * (1 - frozen) / align)) * align)


class Floor(nn.Module):
    """Forward and the gradient with respect to activations alone: no weight gets a gradient."""

    def __init__(self, net: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.net, self.head = net.requires_grad_(False), head.requires_grad_(False)
        first = next(m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
        first.register_forward_hook(lambda _m, _a, y: y.detach().requires_grad_())

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.net(x))
        return out


@dataclass(frozen=True)
class Work:
    """What a step works on: a network by name, its images, where, and the widths that growing networks keep to."""

    network: str
    shape: Sequence[int]
    width: float
    batch: int
    device: str
    align: Sequence[int]
    channels_last: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def image(self) -> tuple[int, int, int]:
        """The shape of one image."""
        channels, high, wide = self.shape
        return channels, high, wide

    @property
    def layout(self) -> torch.memory_format:
        """How images and weights lie in memory."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


def batch(work: Work) -> tuple[Tensor, Tensor]:
    """Images and labels of a step."""
    x = torch.randn(work.batch, *work.shape, device=work.device).contiguous(memory_format=work.layout)
    return x, torch.randint(CLASSES, (work.batch,), device=work.device)


def plain(work: Work) -> tuple[nn.Module, nn.Linear]:
    """The network as it is given, and a head."""
    net = _laid_out(build(work.network, work.image, width=work.width, **work.options).to(work.device), work.layout)
    return net, nn.Linear(_features(net, batch(work)[0]), CLASSES, device=work.device)


def growing(work: Work, frozen: float, fn: str, align: int, tasks: int = 2, rank: int = 0) -> GrowingNetwork:
    """The network with two tasks, so much of it frozen; or with one, where all is newborn. With a rank, what is frozen
    leans towards the second."""
    grown = copy.deepcopy(_grown(work.network, work.image, work.width, fn, tuple(work.options.items())))
    born = {axis: newborn(full, frozen, align) if tasks > 1 else 0 for axis, full in grown.axes.sizes.items()}
    grown.add_task("old", CLASSES, growth={axis: full - born[axis] for axis, full in grown.axes.sizes.items()})
    if tasks > 1:
        grown.add_task("new", CLASSES, growth=born, rank=rank)
    _laid_out(grown.to(work.device), work.layout)
    return grown.train()


def contestants(work: Work, frozen: float, bf16: bool) -> dict[str, Step]:
    """Every side of the comparison, captured. "first task" is fine-tuning by our own operators: all is newborn; "quick"
    is a step as our training loop records it on a GPU, with twins of common operators."""
    torch.manual_seed(0)
    device = work.device
    x, y = batch(work)
    steps: dict[str, Step] = {}

    def enter(name: str, model: nn.Module, trained: bool, *more: Any, quick: bool = False) -> None:
        optimizer = sgd((p for p in model.parameters() if p.requires_grad), device) if trained else None
        model.train()
        step = step_of(model, x, y, bf16, optimizer, *more, waits=quick)
        steps[name] = captured(step, model.modules() if quick else None)

    enter("finetuning", nn.Sequential(*plain(work)), True)
    if device == "cuda":
        enter("finetuning, quick", nn.Sequential(*plain(work)), True, quick=True)
    enter("first task", growing(work, frozen, "none", 1, tasks=1), True, "old")
    enter("floor", Floor(*plain(work)), False)
    enter("naive", NaiveMasks(*plain(work), frozen), True)
    for align in work.align:
        for fn in ("none", "reused"):
            name = f"tfm{'' if fn == 'reused' else '-nofn'}{'' if align == 1 else f'/{align}'}"
            enter(name, growing(work, frozen, fn, align), True, "new")
            if fn == "reused":
                enter(f"{name}, rank {RANK}", growing(work, frozen, fn, align, rank=RANK), True, "new")
            if device == "cuda" and fn == "reused":
                enter(f"{name}, quick", growing(work, frozen, fn, align), True, "new", quick=True)
                leaning = growing(work, frozen, fn, align, rank=RANK)
                enter(f"{name}, rank {RANK}, quick", leaning, True, "new", quick=True)
    return steps


@functools.cache
def _grown(
    network: str, shape: tuple[int, int, int], width: float, fn: str, options: tuple[tuple[str, Any], ...]
) -> GrowingNetwork:
    """A network without tasks, found and proved once."""
    return grow(build(network, shape, width=width, **dict(options)), torch.randn(2, *shape), fn=fn)


def _laid_out(net: nn.Module, layout: torch.memory_format) -> nn.Module:
    net.to(memory_format=layout)  # type: ignore[call-overload]
    return net


def _features(net: nn.Module, x: Tensor) -> int:
    with torch.no_grad():
        return int(net(x[:2]).shape[1])


def hurry() -> None:
    """Let the libraries round to tf32 and try out algorithms, for all sides."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def main() -> None:
    """Measure and print a table of ratios; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="vgg16-tiny")
    parser.add_argument("--shape", type=lambda s: [int(n) for n in s.split(",")], default=[3, 64, 64])
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--options", type=json.loads, default={}, help='more options of the network: {"norm": "batch"}')
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--frozen", type=lambda s: [float(n) for n in s.split(",")], default=[0.95, 0.5])
    parser.add_argument("--align", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8])
    parser.add_argument("--precision", default="bf16,tf32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    hurry()
    work = Work(**{each.name: getattr(args, each.name) for each in fields(Work)})
    rows = []
    for precision in args.precision.split(","):
        for frozen in args.frozen:
            times = medians(contestants(work, frozen, precision == "bf16"), rounds=args.rounds)
            base = times["finetuning"]
            for name, ms in times.items():
                rows.append({"precision": precision, "frozen": frozen, "step": name, "ms": ms, "ratio": ms / base})
    print(f"{args.network} {args.shape} batch {args.batch} {args.device} channels_last={args.channels_last}")
    for row in rows:
        print(f"{row['precision']:5} {row['frozen']:4} {row['step']:12} {row['ms']:9.3f} ms {row['ratio']:6.3f}")
    if args.out:
        args.out.write_text(json.dumps(facts_of(args) | {"rows": rows}, indent=1) + "\n")


def _cpu() -> str:
    return f"CPU ({torch.backends.cpu.get_cpu_capability()})"


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Where and how something was measured."""
    words = sys.argv[1:]
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]  # where it is written says nothing of how
    program = "benchmarks" if Path(sys.argv[0]).stem == "__main__" else f"benchmarks.{Path(sys.argv[0]).stem}"
    return {
        "command": shlex.join(["python", "-m", program, *words]),
        "args": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
