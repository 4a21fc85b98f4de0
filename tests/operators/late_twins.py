"""Steps by the GPU's kernels whose weight gradients come as late as they may, under Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from tests.operators.kernel_twins import NETWORKS, grown, step
from tests.operators.streams import Main, Way
from zeroforget.operators import side_streams as beside


def compare_late() -> None:
    """Against steps in which one thing comes after the other: the same bits."""
    for make, fn, (growth, start) in product(NETWORKS, ("reused", "none"), ((0.2, 0.7), (0.5, 0.4))):
        net, main = grown(make, fn, growth, start), Main()
        x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        step(net, x, "b", by_kernels=True)  # layers have had a turn
        net.zero_grad()
        with torch.no_grad():
            for name, buffer in net.named_buffers():
                buffer.copy_(buffers[name])
            for parameter in net.parameters():
                parameter += 0.01
        wanted = step(copy.deepcopy(net), x, "b", by_kernels=True)
        with main.recording(), _waiting(main):
            found = step(net, x, "b", by_kernels=True)
        assert all(way.done == len(way.todo) for way in main.ways.values())
        assert any(isinstance(call, partial) for call, *_ in main.ways[0].todo), "no kernel was launched aside"
        for name, value in wanted.items():
            told = f"{make.__name__}, {fn}, {growth}: {name}"
            assert (value is None) == (found[name] is None), told
            assert value is None or torch.equal(value, found[name]), told


def forget_to_keep() -> None:
    """What is not kept for kernels that wait is noticed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beside.Beside, "reads", lambda *_: None)
        with pytest.raises(AssertionError, match="freed before it was read"):
            compare_late()


@contextmanager
def _waiting(main: Main) -> Iterator[None]:
    """Kernels that are launched aside run when somebody waits for them."""
    plain = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        here = main.current[-1]
        if isinstance(here, Way):
            here.later(partial(plain, self), args, kwargs)
        else:
            plain(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        yield
