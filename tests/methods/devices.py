"""Two devices without a GPU: the network's tensors and those of the host are told apart by where they came from.

A tensor that is made with no word on its device is on the host. Mixed with the network's it would be an error on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = "cpu:0"
"""A second name of the processor, which stands for the GPU."""
_INDEXES = {"index", "index_put_", "_index_put_impl_"}
"""Their positions may lie on the host, if what they index is on the device."""


class Sides(TorchDispatchMode):
    """Keeps the side of every tensor: True for the network's, False for the host's, None for either."""

    def __init__(self, device: Iterable[Tensor]) -> None:
        super().__init__()
        self._sides: dict[int, bool | None] = {}
        self._alive: list[Tensor] = []  # so that no storage's number is used twice
        for tensor in device:
            self.put(tensor, True)

    def put(self, tensor: Tensor, side: bool | None) -> None:
        """Say where a tensor is."""
        self._sides[tensor.untyped_storage()._cdata] = side
        self._alive.append(tensor.detach())

    def of(self, tensor: Tensor) -> bool | None:
        """Where a tensor is; what was never seen came from the host."""
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return self._sides.get(tensor.untyped_storage()._cdata, False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator if its tensors are on one side."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in _INDEXES and self.of(args[0]):
            given = [args[0]]
        large = {self.of(t) for t in given if t.dim() or len(given) == 1} - {None}
        if len(large) > 1 and name != "copy_":
            shapes = ", ".join(f"{'host' if self.of(t) is False else 'device'} {tuple(t.shape)}" for t in given)
            raise AssertionError(f"{name} got tensors of two devices: {shapes}")
        out = func(*args, **kwargs)
        side = None if not large else True in large
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self._sides:
                self.put(t, side)
        return out


class Moves(TorchFunctionMode):
    """Lets the network's tensors say that they are on `DEVICE`, and makes moves from and to it real."""

    def __init__(self, sides: Sides) -> None:
        super().__init__()
        self.sides = sides

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A move, or a tensor made for a device, is a copy on that side."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(func, "__self__", None) is Tensor.device:
            return torch.device(DEVICE) if self.sides.of(args[0]) else out
        if getattr(func, "__name__", "") == "__deepcopy__":
            self.sides.put(out, self.sides.of(args[0]))
            return out
        side = self._side(getattr(func, "__name__", ""), args, kwargs) if isinstance(out, Tensor) else None
        if side is None:
            return out
        out = out.clone()
        self.sides.put(out, side)
        return out

    def _side(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Where the result goes, if the call says so."""
        if name == "cpu":
            return False
        if name == "to":
            places = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor | torch.device | str)]
            return self._named(places[0]) if places else None
        fresh = not any(isinstance(a, Tensor) for a in tree_leaves((args, kwargs)))
        return self._named(kwargs.get("device")) if fresh else None

    def _named(self, place: Tensor | torch.device | str | None) -> bool | None:
        return self.sides.of(place) if isinstance(place, Tensor) else str(place) == DEVICE
