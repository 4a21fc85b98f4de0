"""Timing side by side: every contestant warmed up, captured as a CUDA graph where there is one, measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import nn

from zeroforget.operators.recorded import leading, rehearsed

Step = Callable[[], object]


def captured(step: Step, modules: Iterable[nn.Module] | None = None) -> Step:
    """The step as a CUDA graph; on the CPU the step itself. With `modules`, those of a network, it is recorded as our
    training loop does."""
    if not torch.cuda.is_available():
        for _ in range(3):
            step()
        return step
    side, quick = torch.cuda.Stream(), None
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if modules is not None:
            quick = rehearsed(step, modules)
        else:
            for _ in range(3):
                step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with quick or nullcontext(), torch.cuda.graph(graph, stream=leading(torch.device("cuda"))):
        step()

    def replay(kept_alive: Step = step) -> None:  # a graph does not own the tensors that it works on
        graph.replay()

    return replay


def medians(
    steps: dict[str, Step], *, rounds: int = 15, seconds: float = 0.05, enough: float = 0.0
) -> dict[str, float]:
    """Milliseconds of each step: the median over rounds, in each of which all take their turn, each round another one
    first. There are more rounds than asked for while these have not taken `enough` seconds."""
    repeats = {name: max(1, round(seconds / _once(step, 1))) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, began, done = list(steps), time.perf_counter(), 0
    while done < rounds or time.perf_counter() - began < enough:
        for name in order:
            times[name].append(_once(steps[name], repeats[name]))
        order.append(order.pop(0))
        done += 1
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def _once(step: Step, repeat: int) -> float:
    if torch.cuda.is_available():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeat):
            step()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1000 / repeat
    began = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - began) / repeat
