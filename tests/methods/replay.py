"""A recorded step without a GPU: the operators of one step with the very tensors they ran on, run again for each batch.

As in a CUDA graph no Python runs in a replay. A number that should have changed, or a tensor that should have been
looked at anew, is the one of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zeroforget.operators.recorded import Body, RecordedStep, rehearsed

_WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique2"}
"""The host would wait for the device to know a value or a size."""
_COPIES = {"lift_fresh"}
"""A tensor made of Python numbers is a copy from the host."""


class Recorder(TorchDispatchMode):
    """Notes every operator with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, unless a graph could not hold it."""
        name = func.overloadpacket.__name__
        if name in _WAITS | _COPIES:
            raise AssertionError(f"a step that is recorded may not call {name}")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = {_place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t.detach() if isinstance(t, Tensor) and _place(t) not in read else None for t in tree_leaves(out)]
        args, kwargs = tree_map_only(Tensor, lambda t: t.detach(), (args, kwargs))
        self.calls.append((func, args, kwargs, made))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """The same operators on the same memory."""
        for func, args, kwargs, made in self.calls:
            for old, new in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)


class ReplayedStep(RecordedStep):
    """`RecordedStep` with a recorder in the place of the GPU's."""

    def record(
        self, step: Callable[[], Tensor], optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]
    ) -> Tensor:
        """Note its operators."""
        quick = rehearsed(step, modules)
        optimizer.zero_grad(set_to_none=True)
        with quick, Recorder() as self.graph:
            return step()


class QuickStep(ReplayedStep):
    """Runs the step for each batch anew, in the context that it would have been recorded in."""

    rectified: ClassVar[list[int]] = []
    """In how many layers of each step a rectifier runs."""

    def __init__(self, body: Body, *given: Any) -> None:
        self.body = body
        super().__init__(body, *given)

    def record(
        self, step: Callable[[], Tensor], optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]
    ) -> Tensor:
        """Try it, and keep the context."""
        self.quick = rehearsed(step, modules)
        self.rectified.append(self.quick.rectified)
        optimizer.zero_grad(set_to_none=True)
        return torch.zeros(())

    def __call__(self, rows: Tensor) -> Tensor:
        """Make the step."""
        with self.quick:
            return self.body(rows)


class PlainStep:
    """The same without any recording."""

    def __init__(self, body: Body, *_: Any) -> None:
        self.body = body

    def __call__(self, rows: Tensor) -> Tensor:
        """Make the step."""
        return self.body(rows)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
