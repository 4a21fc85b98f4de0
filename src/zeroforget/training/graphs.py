"""A training step as a CUDA graph: recorded once, replayed for every batch of its size, no Python in between.

And lanes, in which several learners' steps run on one GPU at the same time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext

import torch
from torch import Tensor

Body = Callable[[Tensor], Tensor]
"""Given the positions of a batch in the training split, makes a step and returns its loss."""


class CapturedStep:
    """Records `body` for batches of one size. `state` is what the body changes: it is put back after the trial runs."""

    def __init__(self, body: Body, size: int, state: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        device = next(iter(state.values())).device
        self.index = torch.zeros(size, dtype=torch.int64, device=device)
        kept = {name: tensor.detach().clone() for name, tensor in state.items()}
        held = {id(t): t.detach().clone() for t in _tensors(optimizer)}
        draws = torch.cuda.get_rng_state(device)
        now = torch.cuda.current_stream(device)
        in_lane = now != torch.cuda.default_stream(device)
        side = now if in_lane else torch.cuda.Stream(device)
        side.wait_stream(now)
        with torch.cuda.stream(side):
            for _ in range(3):  # so that libraries choose their algorithms and the optimizer makes its state
                body(self.index)
        now.wait_stream(side)
        optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        try:
            # A stream of this device: torch's own is of whichever device was the first to record. Graphs of one stream
            # share a workspace for products, so what shall run beside others is recorded in its own lane.
            with torch.cuda.graph(self.graph, stream=now if in_lane else leading(device)):
                self.loss = body(self.index)
        except RuntimeError as error:
            raise ValueError(
                "this step cannot be recorded as a CUDA graph: something in it waits for the GPU or copies from the "
                f"host ({str(error).splitlines()[0]}). Set regime.capture = false to run it operator by operator"
            ) from error
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(kept[name])
            for tensor in _tensors(optimizer):
                tensor.copy_(held[id(tensor)]) if id(tensor) in held else tensor.zero_()
        torch.cuda.set_rng_state(draws, device)  # a resumed run, which records at another step, draws the same

    def __call__(self, rows: Tensor) -> Tensor:
        """Make the step; the loss is overwritten by the next one."""
        self.index.copy_(rows)
        self.graph.replay()
        return self.loss


def leading(device: torch.device) -> torch.cuda.Stream:
    """A stream to record a step on: where there is not room for all, it goes before what the step does beside.

    What goes beside has priorities of its own; where there are not so many, that goes first.
    """
    many = torch.cuda.current_stream(device).priority_range()[1] <= -3
    return torch.cuda.Stream(device, priority=-3 if many else 0)


def _tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


Lane = Callable[[], AbstractContextManager[None]]
"""Inside, a learner's work goes its own way on the device; outside, it may still be under way."""


def lanes(device: torch.device, count: int) -> list[Lane]:
    """One for each of several learners on a GPU: a stream and a state of its random numbers. Elsewhere nothing."""
    if device.type != "cuda" or count == 1:
        return [nullcontext] * count
    index = torch.cuda.current_device() if device.index is None else device.index
    draws = torch.cuda.default_generators[index]

    def lane() -> Lane:
        stream, own = leading(device), draws.clone_state()

        @contextmanager
        def within() -> Iterator[None]:
            stream.wait_stream(torch.cuda.current_stream(device))
            before = draws.graphsafe_get_state()
            draws.graphsafe_set_state(own)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                draws.graphsafe_set_state(before)

        return within

    return [lane() for _ in range(count)]


def in_turns(works: Sequence[Generator[None]]) -> None:
    """Take each one part further, in turn, until all are done; if one fails, the others are closed.

    A GPU works on several at once only if it has been handed parts of several: one whole work after the other would
    be done one after the other.
    """
    with ExitStack() as closed:
        going = [closed.enter_context(closing(work)) for work in works]
        while going:
            going = [work for work in going if next(work, True) is None]


def settle(device: torch.device) -> None:
    """Afterwards all that was begun in lanes is done, for whoever uses it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
