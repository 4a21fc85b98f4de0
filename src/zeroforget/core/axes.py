"""Which dimensions of a network's parameters are which feature axis, found by watching it run."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroforget.core import rules as _rules  # noqa: F401  (fills the table of rules)
from zeroforget.core.labels import Axis, Label, axes, axis_names, fix, settle
from zeroforget.core.trace import Problem, Watcher, watch


class CannotGrow(ValueError):
    """Some feature axis cannot be followed; the message names the operator, the module and the remedy."""


@dataclass(frozen=True)
class Axes:
    """A network's feature axes and what each dimension of each tensor is made of."""

    sizes: Mapping[str, int]
    """Axis → how many features the traced network has there, in the order the axes are written."""
    tensors: Mapping[str, tuple[Label, ...]]
    """Parameter or buffer → the label of each of its dimensions."""
    attributes: Mapping[tuple[str, str], tuple[Label, ...]]
    """(module, attribute) → the labels behind a size that the module remembers, such as a convolution's groups."""
    output: Label
    """The dimension that a head reads."""
    layers: tuple[str, ...]
    """Modules that write features, in the order they ran."""
    normalized: frozenset[str]
    """Those of them whose output a normalization reads."""
    coupled: frozenset[str]
    """Axes over which a statistic runs, so that new features are seen by old ones from the start."""
    overwritten: frozenset[str]
    """Layers whose output is changed in place afterwards."""
    kept: tuple[str, ...]
    """Layers whose output cannot grow."""


def find_axes(net: nn.Module, example: Tensor, *, keep: Collection[str] = ()) -> Axes:
    """Trace `net` on a batch like `example`. Axes written by modules named in `keep` (or below them) do not grow."""
    was = net.training
    net.eval()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # else attention runs as one operator that tells nothing
    try:
        watcher, out, labels = watch(net, _batch(example))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        net.train(was)
    if out.dim() != 2:
        raise ValueError(
            f"a feature extractor must return (batch, features); this one returned {tuple(out.shape)}. "
            "End it with a global average or nn.Flatten()."
        )
    named = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    _keep(watcher, keep)
    _refuse(watcher.problems)
    names: dict[Axis, str] = {}
    for path in watcher.layers:
        for tensor in (t for n, t in named.items() if n.rpartition(".")[0] == path):
            for term in watcher.of(tensor):
                for axis in axes(term):
                    if axis.writers and axis not in names:
                        first = min(axis.writers, key=watcher.layers.index)
                        names[axis] = _unique(first, names.values())
    tensors = {name: tuple(settle(term, names) for term in watcher.of(tensor)) for name, tensor in named.items()}
    attributes = {key: tuple(settle(t, names) for t in terms) for key, terms in watcher.attributes.items()}
    kept = [p for p in watcher.layers if not any(any(axis_names(t[0])) for n, t in tensors.items() if _of(n, p) and t)]
    return Axes(
        sizes={name: axis.size for axis, name in names.items()},
        tensors=tensors,
        attributes=attributes,
        output=settle(labels[1], names),
        layers=tuple(watcher.layers),
        normalized=frozenset(watcher.normalized),
        overwritten=frozenset(watcher.overwritten),
        coupled=frozenset(name for axis, name in names.items() if axis.coupled),
        kept=tuple(kept),
    )


def _of(name: str, path: str) -> bool:
    return name.rpartition(".")[0] == path


def _unique(name: str, taken: Collection[str]) -> str:
    """One layer can write several axes (a cut into parts): the later ones are numbered."""
    base, count = name or "features", 1
    name = base
    while name in taken:
        count += 1
        name = f"{base}#{count}"
    return name


def _batch(example: Tensor) -> Tensor:
    """At least two examples: a batch of one would read as a broadcast dimension."""
    return example if len(example) > 1 else torch.cat([example, example])


def _keep(watcher: Watcher, keep: Collection[str]) -> None:
    if isinstance(keep, str):
        raise ValueError(f"keep takes a list of module paths: keep=['{keep}']")
    known = set()
    every = {axis for labels in watcher._labels.values() for term in labels for axis in axes(term) if axis.writers}
    for axis in every:
        for path in keep:
            if any(w == path or w.startswith(path + ".") or path == "" for w in axis.writers):
                known.add(path)
                fix(axis)
    for path in set(keep) - known:
        if not any(layer == path or layer.startswith(path + ".") for layer in watcher.layers):
            near = difflib.get_close_matches(path, watcher.layers, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"keep names '{path}', but no layer of that path writes features{hint}")


def _refuse(problems: list[Problem]) -> None:
    for problem in problems:
        free = [axis for term in problem.terms for axis in axes(term)]
        if not free:
            continue
        written = sorted({axis.writers[0] for axis in free if axis.writers})
        where = f"in module '{problem.path}'" if problem.path else "in the network's own forward"
        remedy = (
            f"pass keep={written!r} to leave the features it touches as they are"
            if written
            else ("it works on parameters before they are used: rewrite it with the usual layers")
        )
        raise CannotGrow(f"cannot follow the operator '{problem.operator}' {where} ({problem.why}); {remedy}.")
