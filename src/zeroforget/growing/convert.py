"""From the modules of a plain network to growing ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from zeroforget.axes.find import Axes
from zeroforget.axes.plain_modules import copied, forget_caches, is_layer, is_norm, replace, replace_kept
from zeroforget.growing import user_buffers
from zeroforget.growing.layers import GrowingLayer, GrowingNorm
from zeroforget.growing.per_task import HeadPlace, PerTask
from zeroforget.growing.tensors import GrowingTensor

Homes = dict[str, tuple[str, str]]
"""Loose parameter → the module that uses it and its name there."""


def live(
    net: nn.Module, axes: Axes, fn: str, heads: PerTask, inside: Sequence[str]
) -> tuple[nn.Module, nn.ModuleDict, Homes]:
    """The live network: a copy of the plain one with its layers, norms and loose parameters replaced.

    The last come beside it, by name, each with its home. `inside` are the places of heads.
    """
    body = forget_caches(copied(net))
    loose, homes = nn.ModuleDict(), Homes()
    tensors: dict[int, GrowingTensor] = {}
    made: dict[int, nn.Module] = {}

    layers = {id(p) for m in body.modules() if is_layer(m) for p in m._parameters.values()}
    blank = {id(m.weight): m.padding_idx for m in body.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}

    def growing(path: str, name: str, parameter: Tensor) -> GrowingTensor:
        known = id(parameter)
        if known not in tensors:  # tied parameters grow as one
            full = user_buffers.joined(path, name)
            writes = 0 if known in layers else axes.writes.get(full)
            leans = known in layers or (known not in blank and axes.writes.get(full, -1) >= 0)
            tensors[known] = GrowingTensor(parameter, axes.tensors[full], writes, blank.get(known), leans)
        return tensors[known]

    in_norms = {id(part) for m in body.modules() if is_norm(m) for part in m.modules() if part is not m}
    for path, module in list(body.named_modules(remove_duplicate=False)):
        if id(module) in in_norms:  # of a normalization, which is one thing
            continue
        if id(module) not in made:
            given = {n: p for n, p in module._parameters.items() if p is not None}
            if path in inside:
                reads = axes.tensors[user_buffers.joined(path, "weight")][1]
                made[id(module)] = HeadPlace(module, reads, heads, inside.index(path))
            elif is_layer(module):
                bias = growing(path, "bias", given["bias"]) if "bias" in given else None
                normalized = "none" if path in axes.normalized or path not in axes.layers else fn
                layer = GrowingLayer(module, growing(path, "weight", given["weight"]), bias, normalized)
                layer.may_fold = layer.folds = path not in axes.overwritten
                made[id(module)] = layer
            elif is_norm(module):
                held = [*module.named_parameters(), *module.named_buffers()]
                labels = {n: axes.tensors[user_buffers.joined(path, n)] for n, _ in held}
                made[id(module)] = GrowingNorm(module, labels)
            else:
                made[id(module)] = module
                for name, parameter in given.items():
                    key = user_buffers.key(user_buffers.joined(path, name))
                    # Not by its own means, which refuse names that it has a use for ("keys").
                    loose._modules[key] = growing(path, name, parameter)
                    homes[key] = (path, name)
                    del module._parameters[name]
        if made[id(module)] is not module:
            body = replace(body, path, made[id(module)])
    replace_kept(body, made)
    for path, rectifier in axes.rectified.items():  # it runs inside of the layer, in the same pass
        before = body.get_submodule(path)
        if isinstance(before, GrowingLayer):  # and no head
            before.relu = True
            body = replace(body, rectifier, nn.Identity())
    return body, loose, homes
