"""Peak memory of a learning step, read from torch's allocator events."""

from __future__ import annotations

import gc

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import Step


def peak(step: Step, held: int) -> int:
    """The most bytes in use during a second step, with `held` bytes (parameters, buffers) in use before it."""
    step()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        step()
        return int(torch.cuda.max_memory_allocated())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        step()
    now, most = 0, 0
    records = [e for e in events.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(records, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return held + most
