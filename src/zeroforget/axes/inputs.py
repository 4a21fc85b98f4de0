"""Inputs and outputs of any form: several tensors travel as one value, and one of several outputs is chosen.

A network that takes a tuple or a dictionary gets a hook that unpacks a `Batch` into its arguments, and one whose answer
holds more than its features gets a hook that picks them. Everything else sees one input and one output.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree


class Batch:
    """The arguments of one call of a network, handled as if they were one tensor."""

    def __init__(self, args: tuple[Any, ...], named: Mapping[str, Any] | None = None, *, whole: bool = False) -> None:
        self.args, self.named, self.whole = args, dict(named or {}), whole

    @staticmethod
    def of(example: Any) -> Batch:
        """From what a user passes: a tuple or list of arguments, or a dictionary of named ones."""
        if isinstance(example, Batch):
            return example
        return Batch((), dict(example)) if isinstance(example, Mapping) else Batch(tuple(example))

    def tensors(self) -> list[Tensor]:
        """All tensors in it, in order."""
        return [leaf for leaf in _pytree.tree_leaves((self.args, self.named)) if isinstance(leaf, Tensor)]

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same with every tensor changed."""
        args, named = _pytree.tree_map_only(Tensor, change, (self.args, self.named))
        return Batch(args, named, whole=self.whole)

    @property
    def shape(self) -> torch.Size:
        """The shape of the first tensor."""
        return self.tensors()[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """The kind of numbers of the first tensor."""
        return self.tensors()[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the first tensor is."""
        return self.tensors()[0].device

    def dim(self) -> int:
        """Never that of an image: nothing is cut out of several inputs."""
        return 0

    def is_floating_point(self) -> bool:
        """Whether some of it is."""
        return any(t.is_floating_point() for t in self.tensors())

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def __getitem__(self, rows: slice) -> Batch:
        """The first rows, where all tensors have as many; else all of it, for rows may name each other (a graph)."""
        of_rows = [t for t in self.tensors() if t.dim()]
        if self.whole or len({len(t) for t in of_rows}) != 1 or not all(t.dim() for t in self.tensors()):
            return self
        return self.map(lambda t: t[rows])

    def to(self, where: Any) -> Batch:
        """On another device; or of another kind of real numbers, those that are real."""
        if isinstance(where, torch.dtype):
            return self.map(lambda t: t.to(where) if t.is_floating_point() else t)
        return self.map(lambda t: t.to(where))

    def __mul__(self, factor: float) -> Batch:
        return self.map(lambda t: t * factor if t.is_floating_point() else t)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a batch of several inputs is passed as one")


class Unpack:
    """A hook before a network's forward: a Batch becomes its arguments."""

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if len(args) == 1 and isinstance(args[0], Batch):
            return args[0].args, args[0].named | named
        return None


class Pick:
    """A hook behind a network's forward: of its answer one part is its features."""

    def __init__(self, name: str | int) -> None:
        self.name = name

    def __call__(self, _module: nn.Module, _args: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return out
        try:
            if isinstance(self.name, int) or isinstance(out, Mapping):
                return out[self.name]
            return getattr(out, self.name)
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(f"the answer has no part {self.name!r}: it is {choices(out)}") from error


def with_one_input_and_output(net: nn.Module, *, several: bool, output: str | int | None) -> nn.Module:
    """A network of the same tensors that takes a Batch and returns one tensor."""
    several = several and not unpacks(net)
    if not several and output is None:
        return net
    shared: dict[int, Any] = {id(t): t for t in (*net.parameters(), *net.buffers())}
    made: nn.Module = copy.deepcopy(net, shared)
    if several:
        made.register_forward_pre_hook(Unpack(), with_kwargs=True)
    if output is not None:
        made.register_forward_hook(Pick(output))
    return made


def choices(out: Any) -> str:
    """What an answer of several parts holds, for a message that asks to name one."""
    if isinstance(out, Mapping):
        held = [(repr(str(name)), value) for name, value in out.items()]
    elif isinstance(out, (tuple, list)):
        held = [(str(i), value) for i, value in enumerate(out)]
    else:
        held = []
    named = [f"{name} of shape {tuple(value.shape)}" for name, value in held if isinstance(value, Tensor)]
    return f"{type(out).__name__} with {', '.join(named[:6])}" if named else type(out).__name__


def as_batch(net: nn.Module, example: Any) -> Batch:
    """What a network is to be called with, from a tuple of its arguments, a dictionary of named ones, or one argument
    of any form."""
    if isinstance(example, Batch):
        return example
    if isinstance(example, Tensor):
        return Batch((example,))
    try:
        takes = inspect.signature(net.forward)
    except (TypeError, ValueError):  # it does not tell
        return Batch.of(example)
    try:
        given = Batch.of(example)
        takes.bind(*given.args, **given.named)
    except TypeError:
        return Batch((example,))
    return given


def unpacks(net: nn.Module) -> bool:
    """Whether a network takes a Batch."""
    return any(isinstance(hook, Unpack) for hook in net._forward_pre_hooks.values())


def one_input(net: nn.Module, inputs: Sequence[Any], named: dict[str, Any]) -> Tensor | Batch:
    """The one input that a network takes, of the arguments of a call."""
    only = [*inputs, *named.values()]
    if unpacks(net):
        one = len(inputs) == 1 and not named
        return as_batch(net, only[0]) if one else Batch(tuple(inputs), named)
    if len(only) != 1 or not isinstance(only[0], Tensor):
        kinds = ", ".join(type(value).__name__ for value in only)
        raise ValueError(f"the network takes one tensor, a batch of inputs, not {kinds or 'nothing'}")
    return only[0]


class Several(nn.Sequential):
    """Modules in a row, of which the first takes several inputs."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """One Batch, or what it is made of."""
        only = inputs[0] if len(inputs) == 1 and not named else Batch(inputs, named)
        x: Any = only if isinstance(only, Batch) else as_batch(self[0], only)
        for module in self:
            x = module(x)
        return x
