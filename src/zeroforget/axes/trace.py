"""Watching a network run, operator by operator, to learn which dimensions of its tensors are the same feature axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroforget.axes.inputs import Batch
from zeroforget.axes.labels import Axis, Clash, Prod, Term, axes, fix, size, unify
from zeroforget.axes.plain_modules import MODULE_ATTRIBUTES, caches, is_layer, is_norm

Labels = tuple[Term, ...]
Arguments = dict[str, Any]
"""An operator's arguments by name, those left out at their defaults."""
Rule = Callable[["Watcher", Arguments, list[Tensor]], Sequence[Labels]]
_ODD = (IndexError, KeyError, TypeError, ValueError, AttributeError, StopIteration)
"""What a rule raises that meets arguments it was not written for."""
RULES: dict[str, Rule] = {}
"""Operator → how its outputs' labels follow from its arguments; `rules_math.py` and `rules_shape.py` fill it."""


def rule(operators: str) -> Callable[[Rule], Rule]:
    """Declare a function as the rule of these operators (their in-place forms included)."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators.split(), function))
        return function

    return register


def dimension(index: int, rank: int) -> int:
    """A dimension's place, counted from the front."""
    return index + rank if index < 0 else index


@dataclass(frozen=True)
class Unfollowed:
    """An operator that could not be followed, where it ran, and what it touched."""

    operator: str
    path: str
    terms: tuple[Term, ...]
    why: str


class Watcher(TorchDispatchMode):
    """Labels every dimension of every tensor that an operator reads or writes while it is active."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load its compiler, a second of work, to keep it away from here; nothing is compiled here."""
        return False

    def __init__(self, net: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: list[Unfollowed] = []
        self.attributes: dict[tuple[str, str], Labels] = {}
        """(module path, attribute) → the label of the number it holds, such as a convolution's groups."""
        self.normalized: set[str] = set()
        """Paths of layers that get no feature normalization: their output goes straight into a normalization layer, or
        other code reads their weight."""
        self.overwritten: dict[str, list[tuple[str, str]]] = {}
        """Path of a layer → the operators that change its output in place, each with the module it ran in."""
        self.readers: dict[str, list[tuple[str, str]]] = {}
        """Path of a layer → the operators that read its output, each with the module it ran in ("" where that was not
        called by its parent)."""
        self.written: dict[str, list[Term]] = {}
        """Path of a layer → the labels of the features it writes."""
        self.layers: list[str] = []
        """Paths of the layers that write features, in the order they ran."""
        self.calls: list[tuple[str, str]] = []
        """All operators in the order they ran, each with the module it ran in."""
        self.unread: list[str] = []
        """Parameters that took no part in any answer."""
        self.elsewhere: list[str] = []
        """Those that did in training mode alone, or for other numbers."""
        self.rewritten: list[str] = []
        """Parameters that the network's own code writes into."""
        self.paths: list[str] = [""]
        self.seen: dict[str, dict[int, Term]] = {}
        """Module path → the labels of the tensors that its own code handled."""
        self._writing: dict[int, set[int]] = {}
        self._used: set[int] = set()  # parameters that a weight is made of, or that are tables
        self._modules = dict(net.named_modules())
        self._labels: dict[int, Labels] = {}
        self._alive: list[Tensor] = []  # an id is a name only while its tensor lives
        self._producers: dict[int, str] = {}
        self._storages: dict[int, list[str]] = {}  # views of an output write to it too
        self._owners: dict[int, str] = {}
        self._read: set[int] = set()
        self._fed: set[int] = set()  # what is computed from the input
        self._pending: dict[int, Term] = {}  # what is fixed once the tensor is read
        self._sources: dict[int, list[Tensor]] = {}  # what is computed from parameters alone, and which
        self.named: dict[str, Tensor] = {
            **dict(net.named_parameters(remove_duplicate=False)),
            **dict(net.named_buffers(remove_duplicate=False)),
        }
        """The network's own tensors."""
        for name, tensor in self.named.items():
            self._owners.setdefault(id(tensor), name)
            if id(tensor) not in self._labels:
                owner = self._modules.get(self.owner(tensor))
                plain = owner is not None and (is_layer(owner) or is_norm(owner))
                # In a user's own parameter a single element is there to be broadcast.
                self._give(tensor, tuple(Axis(n) if n > 1 or plain else n for n in tensor.shape))
        for path, module in self._modules.items():
            if isinstance(module, nn.MultiheadAttention):
                self._tie_heads(path, module)

    # What rules use --------------------------------------------------------------------------------------------

    def of(self, tensor: Tensor) -> Labels:
        """A tensor's labels; one never seen before (a constant) is all fixed sizes."""
        if id(tensor) not in self._labels:
            self._give(tensor, tuple(tensor.shape))
        return self._labels[id(tensor)]

    def owner(self, parameter: Tensor) -> str:
        """The path of the module that holds this parameter."""
        return self._owners.get(id(parameter), "").rpartition(".")[0]

    def layer(self, weight: Tensor) -> str:
        """The path of the layer whose weight this is; of a weight computed on the fly, the module that does so."""
        return self.owner(weight) if self.is_parameter(weight) else self.paths[-1]

    def writes(self, weight: Tensor, term: Term, out: Tensor) -> None:
        """A layer's weight computes these features into `out`."""
        path = self.layer(weight)
        for source in [weight] if self.is_parameter(weight) else self._sources.get(id(weight), []):
            self._used.add(id(source))
            for dim, own in enumerate(self.of(source)):
                if own is term:
                    self._writing.setdefault(id(source), set()).add(dim)
        if not is_layer(self._modules[self.paths[-1]]):
            self.normalized.add(path)
        if path not in self.layers:
            self.layers.append(path)
        self.written.setdefault(path, []).append(term)
        for axis in axes(term):
            if path not in axis.writers:
                axis.writers.append(path)
        self._producers[id(out)] = path
        self._storages.setdefault(out.untyped_storage()._cdata, []).append(path)

    def writes_on_the_left(self, weight: Tensor, term: Term, out: Tensor) -> None:
        """Likewise, of a weight on the left of a product."""
        self.writes(weight, term, out)
        for axis in axes(term):
            axis.placed = True

    def remakes(self, weight: Tensor) -> None:
        """Zeros in what this weight is computed from would not be zeros in it: nothing is to start at zero."""
        self._sources[id(weight)] = []

    def broadcasts(self, parameter: Tensor) -> None:
        """Each feature of an activation meets its own number of this parameter: a gain, a position's embedding."""
        self._writing.setdefault(id(parameter), set())

    def looks_up(self, table: Tensor) -> None:
        """A table of places: none of its dimensions needs to be features."""
        self._used.add(id(table))

    @property
    def writing(self) -> dict[str, int]:
        """Parameter → the dimension along which it writes features (of several, the last that can grow); -1 where it
        only meets those of others."""
        found: dict[str, int] = {}
        for name, tensor in self.named.items():
            dims = self._writing.get(id(tensor))
            if dims is not None:
                growing = [dim for dim in dims if any(axes(self.of(tensor)[dim]))]
                found[name] = max(growing or dims, default=-1)
        return found

    @property
    def silent(self) -> list[str]:
        """Parameters of several dimensions that no operator was seen to write features with, nor to meet any; or that
        meet those of others with one dimension, while nothing tells what another is."""
        return [
            name
            for name, tensor in self.named.items()
            if isinstance(tensor, nn.Parameter) and sum(n > 1 for n in tensor.shape) > 1
            if id(tensor) not in self._used and not is_norm(self._modules[self.owner(tensor)])
            if id(tensor) not in self._writing or (not self._writing[id(tensor)] and self._nobody_writes(tensor))
        ]

    def _nobody_writes(self, tensor: Tensor) -> bool:
        return any(not axis.writers for term in self.of(tensor) for axis in axes(term) if axis.size > 1)

    def normalizes(self, x: Tensor) -> None:
        """A normalization reads `x`."""
        if id(x) in self._producers:
            self.normalized.add(self._producers[id(x)])

    def still(self, *terms: Term) -> None:
        """These dimensions are positions to the operator: they stay as they are."""
        for term in terms:
            fix(term)

    def still_once_read(self, outs: Sequence[Tensor], term: Term) -> None:
        """Likewise, from when an operator reads one of these; what only its shape is asked of says nothing."""
        for out in outs:
            self._pending[id(out)] = term

    @property
    def in_norm(self) -> bool:
        """Whether it is a normalization layer that runs the operator."""
        return is_norm(self._modules[self.paths[-1]])

    @property
    def heads(self) -> Term | None:
        """The heads of the nn.MultiheadAttention that runs the operator, if one does and they are known."""
        is_attention = isinstance(self._modules[self.paths[-1]], nn.MultiheadAttention)
        return self.attributes.get((self.paths[-1], "num_heads"), (None,))[0] if is_attention else None

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of the network's own."""
        return id(tensor) in self._owners

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of the network's own, or computed from such: transposed, scaled, masked."""
        return self.is_parameter(tensor) or id(tensor) in self._sources

    def is_learned(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of the network's parameters, or a matrix that is computed from such alone."""
        return isinstance(tensor, nn.Parameter) or (id(tensor) in self._sources and tensor.dim() == 2)

    def couple(self, terms: Iterable[Term]) -> None:
        """A statistic runs over these dimensions."""
        for term in terms:
            for axis in axes(term):
                axis.coupled = True

    # The mode itself -------------------------------------------------------------------------------------------

    def _give(self, tensor: Tensor, labels: Labels) -> None:
        self._labels[id(tensor)] = labels
        self._alive.append(tensor)

    def _tie_heads(self, path: str, module: nn.MultiheadAttention) -> None:
        """This module insists on as many features inside as it reads and writes: all of them are (heads, each)."""
        heads = Axis(module.num_heads)
        features = Prod((heads, module.head_dim))
        if not module._qkv_same_embed_dim:
            return
        unify(self.of(module.in_proj_weight)[0], Prod((3, heads, module.head_dim)))
        for term in (self.of(module.in_proj_weight)[1], *self.of(module.out_proj.weight)):
            unify(term, features)
        if module.in_proj_bias is not None:
            unify(self.of(module.in_proj_bias)[0], Prod((3, heads, module.head_dim)))
        self.attributes[path, "num_heads"], self.attributes[path, "head_dim"] = (heads,), (module.head_dim,)
        for name in ("embed_dim", "kdim", "vdim"):
            self.attributes[path, name] = (features,)
        for name in ("in_features", "out_features"):
            self.attributes[f"{path}.out_proj", name] = (features,)

    def _note(self, labels: Labels) -> None:
        handled = self.seen.setdefault(self.paths[-1], {})
        for term in labels:
            if not isinstance(term, int):
                handled[id(term)] = term

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        names = [a.name for a in func._schema.arguments]
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= dict(zip(names, args, strict=False)) | (kwargs or {})
        operator = func._schema.name.removeprefix("aten::")
        self.calls.append((operator, self.paths[-1]))
        if operator.endswith("_") and args and isinstance(args[0], Tensor):
            self._writes_into(args[0])
        for tensor in tensors(given.values()):
            if id(tensor) in self._pending:
                self.still(self._pending.pop(id(tensor)))
            self._read.add(id(tensor))
            self._reads(tensor)
            if id(tensor) in self._producers:
                by_parent = self.paths[-1].rpartition(".")[0] == self.paths[-2]
                reader = (operator, self.paths[-1] if by_parent else "")
                self.readers.setdefault(self._producers[id(tensor)], []).append(reader)
        if operator.endswith("_") and args and isinstance(args[0], Tensor):
            for path in self._storages.get(args[0].untyped_storage()._cdata, ()):
                self.overwritten.setdefault(path, []).append((operator, self.paths[-1]))
            self._producers.pop(id(args[0]), None)  # what it holds now is no layer's output
        outs = [o for o in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(o, Tensor)]
        if not outs:
            return out
        self._descend(list(tensors(given.values())), outs)
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
            for label in (*ins, *labels):
                self._note(label)
        except (Clash, *_ODD) as clash:
            terms = [term for label in ins for term in label]
            for tensor in filter(self.is_parameter, tensors(given.values())):
                self._blame(tensor)
            why = str(clash) if isinstance(clash, Clash) else "arguments that its rule does not know"
            self.problems.append(Unfollowed(operator, self.paths[-1], tuple(terms), why))
            for tensor in outs:
                self._give(tensor, tuple(tensor.shape))
        return out

    def _writes_into(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()._cdata
        for name, own in self.named.items():
            if (
                isinstance(own, nn.Parameter)
                and own.layout == torch.strided
                and own.untyped_storage()._cdata == storage
            ):
                self.rewritten.append(name)

    def _reads(self, tensor: Tensor) -> None:
        """Other code that reads a layer's parameter wants it as it is, with no normalization folded into it."""
        if self.is_parameter(tensor) and not is_layer(self._modules[self.paths[-1]]):
            owner = self.owner(tensor)
            if is_layer(self._modules[owner]):
                self.normalized.add(owner)

    def _descend(self, ins: list[Tensor], outs: list[Tensor]) -> None:
        """Note whether an operator's outputs come from the input, or from parameters alone."""
        if any(id(t) in self._fed for t in ins):
            self._fed |= {id(o) for o in outs}
            return
        found: list[Tensor] = [s for t in ins for s in self._sources.get(id(t), [t]) if isinstance(s, nn.Parameter)]
        if found:
            self._sources |= {id(o): found for o in outs if not self.is_parameter(o)}

    def find_unread(self) -> None:
        """Note the parameters that no operator has read so far."""
        own = [(n, t) for n, t in self.named.items() if isinstance(t, nn.Parameter) and t.numel()]
        self.unread = [name for name, tensor in own if id(tensor) not in self._read]

    def follow_others(self, net: nn.Module, example: Any) -> None:
        """Run the network in training mode and on other numbers too: branches that are taken only there must fit the
        same features. Should training fail, that is the last of the calls."""
        first, calls = self.unread, list(self.calls)
        net.train()
        if not self._follows(net, example):
            calls.append(("nothing in training mode", self.paths[-1]))
            self.paths[1:] = []
        net.eval()
        self.find_unread()
        if self.unread and example.is_floating_point() and example.device.type != "meta":
            for factor in (-1.0, 100.0, -100.0, 0.0):
                if not self._follows(net, example * factor):
                    self.paths[1:] = []
            self.find_unread()
        self.elsewhere = [name for name in first if name not in self.unread]
        self.calls = calls

    def _follows(self, net: nn.Module, example: Any) -> bool:
        try:
            net(example)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError, AttributeError, AssertionError):
            return False
        return True

    def answered(self, out: Tensor) -> Labels:
        """The labels of the network's answer."""
        self.still(self._pending.pop(id(out), 1))
        return self.of(out)

    def feed(self, example: Any) -> None:
        """This is the network's input."""
        for tensor in example.tensors() if isinstance(example, Batch) else [example]:
            self._fed.add(id(tensor))
            self._alive.append(tensor)

    def _blame(self, parameter: Tensor) -> None:
        """A parameter used by an operator that cannot be followed: its module is what a remedy names."""
        path = self.owner(parameter)
        if path not in self.layers:
            self.layers.append(path)
        for term in self.of(parameter):
            for axis in axes(term):
                if not axis.writers:
                    axis.writers.append(path)


@contextmanager
def in_eval(net: nn.Module) -> Iterator[None]:
    """Eval mode inside, each module's own mode again outside."""
    modes = [(module, module.training) for module in net.modules()]
    try:
        net.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """Whatever runs inside, in eval mode: the network's buffers, attributes and modes are afterwards what they were."""
    held = [(module, dict(module._buffers)) for module in net.modules()]
    kept = [t for m, named in held for t in (*named.values(), *vars(m).values()) if isinstance(t, Tensor)]
    values = [(t, t.detach().clone()) for t in {id(t): t for t in kept if not t.is_meta}.values()]
    try:
        with in_eval(net), without_caches(net):
            yield
    finally:
        for module, named in held:
            module._buffers.clear()
            module._buffers.update(named)
        for tensor, value in values:
            if tensor.shape != value.shape or not same_bits(tensor, value):
                tensor.data = value


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN included; of sparse ones this is not asked."""
    if a.layout != torch.strided:
        return False
    return torch.equal(a, b) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


@contextmanager
def without_caches(net: nn.Module) -> Iterator[None]:
    """What modules remember of earlier inputs is put aside, and back again afterwards, as is all else they keep."""
    found = list(caches(net))
    kept = [dict(cache) for cache in found]
    states = [vars(module) for module in net.modules()]
    plain = [(s, {name: v for name, v in s.items() if name not in MODULE_ATTRIBUTES}) for s in states]
    lists = [(v, list(v)) for _, values in plain for v in values.values() if isinstance(v, list)]
    tables = [(v, dict(v)) for _, values in plain for v in values.values() if type(v) is dict]
    for cache in found:
        cache.clear()
    try:
        yield
    finally:
        for state, values in plain:
            for name in [name for name in state if name not in MODULE_ATTRIBUTES and name not in values]:
                del state[name]
            state.update(values)
        for items, before in lists:
            items[:] = before
        for table, entries in tables:
            table.clear()
            table.update(entries)
        for cache, content in zip(found, kept, strict=True):
            cache.clear()
            cache.update(content)
        for cache in caches(net):
            if not any(cache is other for other in found):
                cache.clear()


def watch(net: nn.Module, example: Tensor) -> tuple[Watcher, Any, Labels]:
    """Run the network once in eval mode under a watcher; its output comes back with its labels."""
    watcher = Watcher(net)
    watcher.feed(example)
    handles = []
    for path, module in net.named_modules():

        def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
            watcher.paths.append(path)

        def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
            watcher.paths.pop()

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with without_caches(net), torch.inference_mode(), watcher:
            out = net(example)
            labels = watcher.answered(out) if isinstance(out, Tensor) else ()
            watcher.find_unread()
            if watcher.unread:  # of which training may tell more
                watcher.follow_others(net, example)
    finally:
        for handle in handles:
            handle.remove()
    return watcher, out, labels


def tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors among an operator's arguments, one level of lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))
