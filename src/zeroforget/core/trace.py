"""Watching a network run, operator by operator, to learn which dimensions of its tensors are the same feature axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroforget.core.labels import Axis, Clash, Term, axes, size

Labels = tuple[Term, ...]
Given = dict[str, Any]
Rule = Callable[["Watcher", Given, list[Tensor]], Sequence[Labels]]
RULES: dict[str, Rule] = {}
"""Operator → how its outputs' labels follow from its arguments; `rules.py` fills it."""


@dataclass(frozen=True)
class Problem:
    """An operator that could not be followed, where it ran, and what it touched."""

    operator: str
    path: str
    terms: tuple[Term, ...]
    why: str


class Watcher(TorchDispatchMode):
    """Labels every dimension of every tensor that an operator reads or writes while it is active."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: list[Problem] = []
        self.attributes: dict[tuple[str, str], Labels] = {}
        """(module path, attribute) → the label of the number it holds, such as a convolution's groups."""
        self.normalized: set[str] = set()
        """Paths of layers whose output goes straight into a normalization."""
        self.overwritten: set[str] = set()
        """Paths of layers whose output an operator then changes in place."""
        self.layers: list[str] = []
        """Paths of the layers that write features, in the order they ran."""
        self.paths: list[str] = [""]
        self._labels: dict[int, Labels] = {}
        self._alive: list[Tensor] = []  # an id is a name only while its tensor lives
        self._producers: dict[int, str] = {}
        self._owners: dict[int, str] = {}
        named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            self._owners.setdefault(id(tensor), name)
            if id(tensor) not in self._labels:
                self._give(tensor, tuple(Axis(n) for n in tensor.shape))

    # What rules use --------------------------------------------------------------------------------------------

    def of(self, tensor: Tensor) -> Labels:
        """A tensor's labels; one never seen before (a constant) is all fixed sizes."""
        if id(tensor) not in self._labels:
            self._give(tensor, tuple(tensor.shape))
        return self._labels[id(tensor)]

    def owner(self, parameter: Tensor) -> str:
        """The path of the module that holds this parameter."""
        return self._owners.get(id(parameter), "").rpartition(".")[0]

    def writes(self, weight: Tensor, term: Term, out: Tensor) -> None:
        """A layer's weight computes these features into `out`."""
        path = self.owner(weight) or self.paths[-1]
        if path not in self.layers:
            self.layers.append(path)
        for axis in axes(term):
            if path not in axis.writers:
                axis.writers.append(path)
        self._producers[id(out)] = path

    def normalizes(self, x: Tensor) -> None:
        """A normalization reads `x`."""
        if id(x) in self._producers:
            self.normalized.add(self._producers[id(x)])

    def couple(self, terms: Iterable[Term]) -> None:
        """A statistic runs over these dimensions."""
        for term in terms:
            for axis in axes(term):
                axis.coupled = True

    # The mode itself -------------------------------------------------------------------------------------------

    def _give(self, tensor: Tensor, labels: Labels) -> None:
        self._labels[id(tensor)] = labels
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        names = [a.name for a in func._schema.arguments]
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= dict(zip(names, args, strict=False)) | (kwargs or {})
        operator = func._schema.name.removeprefix("aten::")
        if operator.endswith("_") and args and id(args[0]) in self._producers:
            self.overwritten.add(self._producers[id(args[0])])
        outs = [o for o in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(o, Tensor)]
        if not outs:
            return out
        rule = RULES.get(operator) or RULES.get(operator.rstrip("_"))
        ins = [self.of(t) for t in tensors(given.values())]
        try:
            if rule is None:
                raise Clash("no rule for this operator")
            labels = rule(self, given, outs)
            for tensor, label in zip(outs, labels, strict=True):
                if tuple(size(term) for term in label) != tuple(tensor.shape):
                    raise Clash("the sizes came out different")
                self._give(tensor, label)
        except Clash as clash:
            terms = [term for label in ins for term in label]
            self.problems.append(Problem(operator, self.paths[-1], tuple(terms), str(clash)))
            for tensor in outs:
                self._give(tensor, tuple(tensor.shape))
        return out


def watch(net: nn.Module, example: Tensor) -> tuple[Watcher, Tensor, Labels]:
    """Run the network once in eval mode under a watcher; its output comes back with its labels."""
    watcher = Watcher(net)
    handles = []
    for path, module in net.named_modules():

        def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
            watcher.paths.append(path)

        def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
            watcher.paths.pop()

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with torch.inference_mode(), watcher:
            out = net(example)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(out, Tensor):
        raise ValueError(f"the network must return one tensor of (batch, features); it returned {type(out).__name__}")
    return watcher, out, watcher.of(out)


def tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors among an operator's arguments, one level of lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))
