"""A training step on a GPU: recorded once as a CUDA graph and replayed for every batch, no Python in between.

This is all that training knows of our GPU machinery. While a step is recorded, common layers of any network run as
quicker ones (`quick_layers.py`), and the gradients of weights are found beside those of the layers below
(`side_streams.py`). Growing layers are fused wherever they run on a GPU (`fused.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.operators.quick_layers import Quick, Readers
from zeroforget.operators.side_streams import late

Body = Callable[[Tensor], Tensor]
"""Origin the positions of a batch in the training split, makes a step and returns its loss."""


class RecordedStep:
    """Records `body` for batches of one size, as these modules compute it now.

    `state` is what the body changes: it is put back after the trial runs, and so are the optimizer and the draws. A
    resumed run, which records at another step, goes on as one that was not interrupted.
    """

    graph: Any

    def __init__(
        self,
        body: Body,
        size: int,
        state: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        modules: Iterable[nn.Module],
    ) -> None:
        device = next(iter(state.values())).device
        self.rows = torch.zeros(size, dtype=torch.int64, device=device)
        kept = {name: tensor.detach().clone() for name, tensor in state.items()}
        held = {id(t): t.detach().clone() for t in _tensors(optimizer)}
        draws = _generator(device)
        before = draws.get_state()
        self.loss = self.record(lambda: body(self.rows), optimizer, list(modules))
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(kept[name])
            for tensor in _tensors(optimizer):
                tensor.copy_(held[id(tensor)]) if id(tensor) in held else tensor.zero_()
        draws.set_state(before)

    def record(
        self, step: Callable[[], Tensor], optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]
    ) -> Tensor:
        """Try the step, then record it as `graph`; returns the tensor that a replay writes its loss to."""
        now, side = torch.cuda.current_stream(self.rows.device), torch.cuda.Stream(self.rows.device)
        side.wait_stream(now)
        with torch.cuda.stream(side):
            quick = rehearsed(step, modules)
        now.wait_stream(side)
        optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        try:
            # A stream of this device: torch's own is of whichever device was the first to record.
            with quick, torch.cuda.graph(self.graph, stream=leading(self.rows.device)):
                return step()
        except RuntimeError as error:
            raise ValueError(
                "this step cannot be recorded as a CUDA graph: something in it waits for the GPU or copies from the "
                f"host ({str(error).splitlines()[0]}). Set regime.capture = false to run it operator by operator"
            ) from error

    def __call__(self, rows: Tensor) -> Tensor:
        """Make the step; the loss is overwritten by the next one."""
        self.rows.copy_(rows)
        self.graph.replay()
        return self.loss


def rehearsed(step: Callable[[], object], modules: Iterable[nn.Module]) -> Quick:
    """Make a step three times, so that libraries choose their algorithms and the optimizer makes its state; the first
    time it is seen which rectifiers can run inside of the layers before them. Returns the context to record it in."""
    with Readers(modules) as readers:
        step()
    quick = Quick(readers.rectified())
    for _ in range(2):
        with quick:
            step()
    return quick


def backward(loss: Tensor) -> None:
    """Find the gradients; while a step is recorded, those of weights beside all others."""
    with late(loss.device):
        loss.backward()


def ways(modules: Iterable[nn.Module]) -> tuple[object, ...]:
    """How each module computes that can do so in several ways, and says so as `folds`. A step that was recorded in one
    way is of no use in another."""
    return tuple(module.folds for module in modules if hasattr(module, "folds"))


def leading(device: torch.device) -> torch.cuda.Stream:
    """A stream to record a step on: where there is not room for all, it goes before what the step does beside.

    What goes beside has priorities of its own; where there are not so many, that goes first.
    """
    many = torch.cuda.current_stream(device).priority_range()[1] <= -3
    return torch.cuda.Stream(device, priority=-3 if many else 0)


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
