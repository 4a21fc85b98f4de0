"""torch.compile against our own kernels, for the same steps in one run (`python -m benchmarks.compiled`).

Each row is one training step: forward, backward and update. "ours" is the step as our training loop records it. The
compiled ones are the plain network under `torch.compile`; in modes that bring no CUDA graphs of their own the step is
recorded as ours is, and the others replay their own. A growing network is compiled around its layers, whose operators
are ours, and once more with these operators replaced by plain ones, so that the compiler sees everything.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import steps
from benchmarks.timing import Step, captured, medians
from zeroforget.growing import layers
from zeroforget.growing.layers import GrowingLayer

GRAPHS = {"reduce-overhead", "max-autotune"}
"""Modes of the compiler that record CUDA graphs themselves."""


def compiled_step(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, mode: str) -> Step:
    """A step whose forward and backward the compiler made."""
    optimizer = steps.sgd((p for p in model.parameters() if p.requires_grad), "cuda")
    model.train()
    quick = torch.compile(call, mode=mode)

    def step() -> None:
        if mode in GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=mode not in GRAPHS)
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(quick(x), y)
        loss.backward()
        optimizer.step()

    if mode not in GRAPHS:
        return captured(step)
    for _ in range(5):
        step()
    return step


WHOLE = "tfm/8, whole"
Model = tuple[nn.Module, Callable[[Tensor], Tensor]]


def models(work: steps.Work, frozen: float) -> dict[str, Callable[[], Model]]:
    """What is compiled: a model, and what computes its logits."""

    def finetuning() -> Model:
        model = nn.Sequential(*steps.plain(work))
        return model, model

    def growing(around: bool) -> Model:
        net = steps.growing(work, frozen, "reused", 8)

        def call(x: Tensor) -> Tensor:
            out: Tensor = net.heads[-1](net.body(x))
            return out

        for layer in net.modules():
            if isinstance(layer, GrowingLayer) and around:
                layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]
        return net, call

    return {"finetuning": finetuning, "tfm/8, around": lambda: growing(True), WHOLE: lambda: growing(False)}


def main() -> None:
    """Measure what there is time for, and print it as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="vgg16-tiny")
    parser.add_argument("--shape", type=lambda s: [int(n) for n in s.split(",")], default=[3, 64, 64])
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--modes", default="default,reduce-overhead,max-autotune-no-cudagraphs,max-autotune")
    parser.add_argument("--frozen", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.device = "cuda"
    steps.hurry()
    work = steps.Work(args.network, args.shape, 1.0, 64, "cuda", [8], True, args.options)
    torch.manual_seed(0)
    ours = steps.contestants(work, args.frozen, True)
    rows = medians({name: ours[name] for name in ours if name != "naive"}, rounds=args.rounds)
    for name, ms in rows.items():
        print(f"{ms:8.3f} ms  {name}", flush=True)
    x, y = steps.batch(work)
    for mode in args.modes.split(","):
        for name, make in models(work, args.frozen).items():
            label, began = f"{name}, compiled ({mode})", time.perf_counter()
            try:
                with patch.object(layers, "fits", lambda x, geometry: False) if name == WHOLE else nullcontext():
                    torch._dynamo.reset()
                    model, call = make()
                    step = compiled_step(model, call, x, y, mode)
                    rows[label] = medians({label: step}, rounds=args.rounds)[label]
                print(f"{rows[label]:8.3f} ms  {label}, made in {time.perf_counter() - began:.0f} s", flush=True)
            except Exception as error:
                print(f"       —     {label}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(steps.facts_of(args) | {"ms": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
