"""Which dimensions of a network's parameters are which feature axis, found by watching it run."""

from __future__ import annotations

import copy
import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes import rules_math, rules_recurrent, rules_shape  # noqa: F401  (they fill the table of rules)
from zeroforget.axes.care import Care
from zeroforget.axes.inputs import Batch, choices
from zeroforget.axes.labels import Axis, Clash, Label, Term, axes, axis_names, choose, fix, settle, size, unify
from zeroforget.axes.plain_modules import guess_sizes, hollow, is_layer, is_norm
from zeroforget.axes.trace import Watcher, watch


class CannotGrow(ValueError):
    """Some feature axis cannot be followed; the message names the operator, the module and the remedy.

    Example:
        >>> import torch, zeroforget
        >>> body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh())
        >>> try:
        ...     net = zeroforget.grow(body, torch.randn(2, 4))
        ... except zeroforget.CannotGrow as why:
        ...     print(why)  # says which `keep=[...]` to pass
    """


@dataclass(frozen=True)
class Recipe:
    """All that decided about the axes of a network beside its code: enough to find the same ones again, unproved."""

    keep: tuple[str, ...] = ()
    """Modules whose features do not grow."""
    care: Mapping[str, int] = field(default_factory=dict)
    """A module → how carefully all modules of its class are treated (`Care`)."""
    held: tuple[str, ...] = ()
    """Buffers that keep their shape."""

    def find(self, net: nn.Module, example: Tensor) -> Axes:
        """The axes of a network that is built like the one this was told of, whatever its values."""
        care = {type(net.get_submodule(path)): (Care(level), "") for path, level in self.care.items()}
        return find_axes(net, example, keep=self.keep, unknown="keep", care=care, held=self.held)


@dataclass(frozen=True)
class Axes:
    """A network's feature axes and what each dimension of each tensor is made of."""

    sizes: Mapping[str, int]
    """Axis → how many features the traced network has there, in the order the axes are written."""
    tensors: Mapping[str, tuple[Label, ...]]
    """Parameter or buffer → the label of each of its dimensions."""
    writes: Mapping[str, int]
    """Parameter → the dimension along which it writes features; -1 where it only meets those of others."""
    attributes: Mapping[tuple[str, str], tuple[Label, ...]]
    """(module, attribute) → the labels behind a size that the module remembers, such as a convolution's groups."""
    output: Label
    """The dimension that a head reads."""
    layers: tuple[str, ...]
    """Modules that write features, in the order they ran."""
    normalized: frozenset[str]
    """Those of them that get no feature normalization: a normalization layer reads their output, or other code their
    weight."""
    coupled: frozenset[str]
    """Axes over which a statistic runs, so that new features are seen by old ones from the start."""
    overwritten: frozenset[str]
    """Layers whose output is changed in place afterwards, other than by their rectifier."""
    rectified: Mapping[str, str]
    """Layer → the nn.ReLU that comes right behind it and reads nothing else, while nothing else reads the layer."""
    kept: tuple[str, ...]
    """Layers whose output cannot grow."""
    unfollowed: Mapping[str, str] = field(default_factory=dict)
    """Of those, the ones that would have to be kept by name, and why."""
    calls: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    """All operators that ran, each with its module."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Parameters that no operator reads, in whatever mode."""
    elsewhere: tuple[str, ...] = field(default=(), compare=False)
    """Parameters that are read in training mode alone, or for other numbers than the example's."""
    idle: tuple[str, ...] = field(default=(), compare=False)
    """Parameters that get no gradient in the network as it was given."""
    silent: tuple[str, ...] = ()
    """Parameters whose features cannot be told, with no operator to blame; none of their dimensions grows."""
    recipe: Recipe = field(default_factory=Recipe, compare=False)
    """What was asked for when they were found."""
    ends_in: torch.dtype | None = field(default=None, compare=False)
    """The kind of numbers of the output, where it is not that of the parameters: it ends in `.float()`."""


def find_axes(
    net: nn.Module,
    example: Tensor,
    *,
    keep: Collection[str] = (),
    unknown: str = "refuse",
    care: Mapping[type[nn.Module], tuple[Care, str]] | None = None,
    held: Collection[str] | None = None,
    hollowed: bool = True,
) -> Axes:
    """Trace `net` on a batch like `example`. Axes written by modules named in `keep` (or below them) do not grow.

    What cannot be followed is refused, or with `unknown="keep"` stays as it is. `care` says of module classes how they
    must be treated, and why; `held` names the buffers that keep their shape, if that cannot be told from their values.
    `hollowed=False` computes with numbers: for a small network that is quicker than to load what is needed without.
    """
    watcher, out, labels = watched(net, example, hollowed=hollowed)
    if not isinstance(out, Tensor):
        raise ValueError(
            f"the network must return one tensor of (batch, features); it returned {choices(out)}. Pass output= with "
            "the name or the place of the features among them, or wrap it in a module that returns them alone"
        )
    if out.dim() != 2:
        raise ValueError(
            f"a feature extractor must return (batch, features); this one returned {tuple(out.shape)}. "
            "End it with a global average or nn.Flatten()."
        )
    found = _Found(net, watcher, dict(care or {}))
    _keep(watcher, keep)
    held = fixed_buffers(net) if held is None else held
    found.hold(held)
    found.tie()
    found.give_up()
    kinds = {p.dtype for p in net.parameters() if p.is_floating_point()}
    ends_in = None if len(kinds) != 1 or out.dtype in kinds else out.dtype
    axes_found = replace(found.settle(labels[1]), recipe=_recipe(net, keep, care or {}, held), ends_in=ends_in)
    if unknown == "refuse":
        refuse(axes_found)
    return axes_found


def _recipe(
    net: nn.Module, keep: Collection[str], care: Mapping[type[nn.Module], tuple[Care, str]], held: Collection[str]
) -> Recipe:
    firsts: dict[type[nn.Module], str] = {}
    for path, module in net.named_modules():
        firsts.setdefault(type(module), path)
    return Recipe(
        tuple(keep), {firsts[kind]: int(level) for kind, (level, _) in care.items() if kind in firsts}, tuple(held)
    )


def fixed_buffers(net: nn.Module) -> list[str]:
    """Buffers of a user's own modules that hold more than one number over and over."""
    return [
        f"{path}.{name}" if path else name
        for path, module in net.named_modules(remove_duplicate=False)
        if not is_norm(module)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() > 1 and not _one_number(buffer)
    ]


def _one_number(buffer: Tensor) -> bool:
    return buffer.layout == torch.strided and not bool((buffer != buffer.flatten()[0]).any())


def refuse(found: Axes) -> None:
    """Raise CannotGrow if something could not be followed, with all that has to be kept."""
    if found.unfollowed:
        why = next(iter(found.unfollowed.values()))
        more = len(set(found.unfollowed.values())) - 1
        others = f" ({more} more such place{'s' if more > 1 else ''})" if more else ""
        raise CannotGrow(
            f"{why}{others}. Pass keep={sorted(found.unfollowed)!r} to leave the features it touches as they are, or "
            'unknown="keep" to do so for all that cannot be followed.'
        )


def watched(net: nn.Module, example: Tensor, *, hollowed: bool = True) -> tuple[Watcher, Any, tuple[Term, ...]]:
    """A copy of the network is run under a watcher; its output comes back with its labels.

    Raises:
        CannotGrow: the network writes into its own parameters when it is asked.
    """
    found = _watch(net, two_rows(example), hollowed)
    if names := found[0].rewritten:
        raise CannotGrow(
            f"the network writes into its own parameter '{names[0]}' while it answers, so old answers would change: "
            "change a copy of it there (weight.clone()), or compute with what it would become"
        )
    return found


def _watch(net: nn.Module, example: Tensor, hollowed: bool) -> tuple[Watcher, Any, tuple[Term, ...]]:
    """Without storage if the network lets us, which takes no time; else for real."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # else attention runs as one operator that tells nothing
    try:
        # Where tensors are that the code makes with no word of a device.
        for device in ("cpu", "meta") if hollowed else ():
            try:
                with torch.device(device):
                    return watch(hollow(net).eval(), example.to("meta"))
            except (RuntimeError, NotImplementedError, TypeError) as error:
                failed = error
        if hollowed and any(p.is_meta for p in net.parameters()):
            raise failed
        return watch(copy.deepcopy(net).eval(), example)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


class _Found:
    """A trace being turned into plain values."""

    def __init__(self, net: nn.Module, watcher: Watcher, care: dict[type[nn.Module], tuple[Care, str]]) -> None:
        self.net, self.watcher, self.care = net, watcher, care
        self.names = list(watcher.named)  # a buffer that the network makes as it runs is not among them
        self.unfollowed: dict[str, str] = {}
        self._inside: dict[str, list[str]] = {}
        """Module → the tensors in it, however deep."""
        for name in self.names:
            path = name
            while path:
                path = _owner(path)
                self._inside.setdefault(path, []).append(name)

    def of(self, name: str) -> tuple[Term, ...]:
        return self.watcher.of(self.watcher.named[name])

    def handled(self, path: str, *, deep: bool = False) -> list[Term]:
        """The labels that a module's own code meets: of its tensors and its plain layers', or of all inside it."""
        inside = self._inside.get(path, [])
        depth = path.count(".") + (1 if path else 0)
        near = [n for n in inside if n.count(".") <= depth + 1]
        far = [n for n in inside if n.count(".") > depth + 1] if deep else []
        seen = self.watcher.seen.get(path, {}).values()
        return [*chain.from_iterable(self.of(n) for n in near), *seen, *chain.from_iterable(self.of(n) for n in far)]

    def level(self, module: nn.Module) -> Care:
        return self.care.get(type(module), (Care.NAMED, ""))[0]

    def tie(self) -> None:
        """Dimensions of one size in a module that knows only one number for them become one."""
        for path, module in self.net.named_modules():
            if self.level(module) in (Care.TIED, Care.TIED_ALL):
                by_size: dict[int, Term] = {}
                for term in self.handled(path):
                    if any(axes(term)):
                        try:
                            unify(by_size.setdefault(size(term), term), term)
                        except Clash:
                            continue

    def hold(self, buffers: Iterable[str]) -> None:
        """These buffers have values that only their module knows how to make: they keep their shape."""
        for name in buffers:
            for term in self.of(name):
                fix(term)

    def give_up(self) -> None:
        """Fix what an operator without a rule touched, and what modules that need care handle."""
        for problem in self.watcher.problems:
            where = f"in module '{problem.path}'" if problem.path else "in the network's own forward"
            self._still(problem.terms, f"cannot follow the operator '{problem.operator}' {where} ({problem.why})")
        for path, module in self.net.named_modules():
            level, why = self.care.get(type(module), (Care.NAMED, ""))
            if level >= Care.WHOLE:
                terms = self.handled(path)
                found = [axis for term in terms for axis in axes(term) if level == Care.STILL or axis.parted]
                self._still(found, why)

    def _still(self, terms: Iterable[Term], why: str) -> None:
        for axis in [axis for term in terms for axis in axes(term)]:
            if axis.writers and axis.bound is None:
                self.unfollowed.setdefault(axis.writers[0], why)
            fix(axis)

    def settle(self, output: Term) -> Axes:
        watcher = self.watcher
        for terms in (*(self.of(n) for n in self.names), *watcher.attributes.values()):
            for term in terms:
                choose(term)
        names = self._named()
        tensors = {name: tuple(settle(term, names) for term in self.of(name)) for name in self.names}
        sizes = {name: axis.size for axis, name in names.items()}
        grown = {p for p, terms in watcher.written.items() if any(a in names for t in terms for a in axes(t))}
        kept = [path for path in watcher.layers if path not in grown]
        rectified = self._rectified()
        return Axes(
            sizes=sizes,
            tensors=tensors,
            writes=watcher.writing,
            attributes=self._attributes(names, sizes),
            output=settle(output, names),
            layers=tuple(watcher.layers),
            normalized=frozenset(watcher.normalized),
            overwritten=frozenset(
                path
                for path, changes in watcher.overwritten.items()
                if path not in rectified or changes != [("relu_", rectified[path])]  # else it is the layer's own
            ),
            rectified=rectified,
            coupled=frozenset(name for axis, name in names.items() if axis.coupled),
            kept=tuple(kept),
            unfollowed=dict(self.unfollowed),
            calls=tuple(watcher.calls),
            unread=tuple(watcher.unread),
            elsewhere=tuple(watcher.elsewhere),
            silent=tuple(name for name in watcher.silent if _fixed(tensors[name]) and _owner(name) not in kept),
        )

    def _named(self) -> dict[Axis, str]:
        """Axes that are written, in that order, called by their first writer."""
        own: dict[str, list[Axis]] = {}
        computed: dict[str, list[Axis]] = {}  # a weight that is computed from others (parametrized) lies elsewhere
        for name in self.names:
            for axis in [axis for term in self.of(name) for axis in axes(term) if axis.writers]:
                own.setdefault(_owner(name), []).append(axis)
                for writer in axis.writers:
                    computed.setdefault(writer, []).append(axis)
        order = {path: i for i, path in enumerate(self.watcher.layers)}
        names: dict[Axis, str] = {}
        for path in self.watcher.layers:
            for axis in (*own.get(path, ()), *computed.get(path, ())):
                if axis not in names:
                    names[axis] = _unique(min(axis.writers, key=order.__getitem__), names.values())
        return names

    def _rectified(self) -> dict[str, str]:
        """Pairs in an nn.Sequential that runs them itself: nothing can come between them, in whatever mode it runs."""
        found: dict[str, str] = {}
        modules = dict(self.net.named_modules())
        times = Counter(id(m) for _, m in self.net.named_modules(remove_duplicate=False))
        once = [m for m in modules.values() if times[id(m)] == 1 and not m._forward_hooks and not m._forward_pre_hooks]
        alone = {id(m) for m in once}
        for path, module in modules.items():
            if type(module) is not nn.Sequential:
                continue
            prefix = f"{path}." if path else ""
            for (first, layer), (second, relu) in pairwise(module._modules.items()):
                if layer is None or type(relu) is not nn.ReLU or not is_layer(layer):
                    continue
                readers = self.watcher.readers.get(prefix + first, [])
                only = len(readers) == 1 and readers[0] in {("relu", prefix + second), ("relu_", prefix + second)}
                if only and id(layer) in alone and id(relu) in alone:
                    found[prefix + first] = prefix + second
        return found

    def _attributes(
        self, names: Mapping[Axis, str], sizes: Mapping[str, int]
    ) -> dict[tuple[str, str], tuple[Label, ...]]:
        pools = {
            path: list(dict.fromkeys(settle(term, names) for term in self.handled(path, deep=True)))
            for path, _ in self.net.named_modules()
        }
        guessed = guess_sizes(self.net, pools, sizes, lambda module: self.level(module) in (Care.ALL, Care.TIED_ALL))
        told = {key: tuple(settle(t, names) for t in terms) for key, terms in self.watcher.attributes.items()}
        return guessed | told


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _fixed(labels: Iterable[Label]) -> bool:
    return not any(True for label in labels for _ in axis_names(label))


def _unique(name: str, taken: Collection[str]) -> str:
    """One layer can write several axes (a cut into parts): the later ones are numbered."""
    base, count = name or "features", 1
    name = base
    while name in taken:
        count += 1
        name = f"{base}#{count}"
    return name


def two_rows(example: Any) -> Any:
    """Two examples: a batch of one would read as a broadcast dimension."""
    if len(example) > 1:
        return example[:2]
    return example.map(_twice) if isinstance(example, Batch) else _twice(example)


def _twice(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows]) if rows.dim() else rows


def _keep(watcher: Watcher, keep: Collection[str]) -> None:
    if isinstance(keep, str):
        raise ValueError(f"keep takes a list of module paths: keep=['{keep}']")
    every = {axis for labels in watcher._labels.values() for term in labels for axis in axes(term) if axis.writers}
    for axis in every:
        if any(w == path or w.startswith(path + ".") or path == "" for path in keep for w in axis.writers):
            fix(axis)
    for path in keep:
        if path and not any(layer == path or layer.startswith(path + ".") for layer in watcher.layers):
            near = difflib.get_close_matches(path, watcher.layers, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"keep names '{path}', but no layer of that path writes features{hint}")
