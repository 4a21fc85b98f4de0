"""Plain modules of any width: copies with other tensors, the sizes that modules remember, how tensors lie in memory.

Modules of torch tell their sizes by their class. What a user's own modules remember as plain numbers (`num_heads`,
`embed_dim`) is matched to feature axes by value. Such a match is only a guess: the wider network must run and show the
same axes again before it is believed.
"""

from __future__ import annotations

import copy
import math
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeroforget.axes.inputs import Batch
from zeroforget.axes.labels import Label, Named, axis_names, births_of, label_size
from zeroforget.operators.places import select

Inputs = TypeVar("Inputs", Tensor, Batch)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What every module has."""
_NORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
_SIZES = re.compile(
    r"head|dim|feat|chan|chs|width|group|embed|inner|hidden|plane|shape|key|val|query|in_|out_|radix|split|flatten|model"
)
_PLACES = re.compile(
    r"kernel|window|patch|stride|grid|depth|layer|class|ratio|pad|reduc|prefix|token|resol|seq|dilat|img|image|area|shift|pool|value_groups|n_rep|rot"
)
_COUNTS = re.compile(r"head|group|branch|split|num_")


def is_layer(module: nn.Module) -> bool:
    """Whether the module is a plain linear or convolution layer, no subclass or object with ways of its own."""
    plain = type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return plain and module._parameters.get("weight") is not None and "forward" not in vars(module)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a normalization layer."""
    return isinstance(module, _NORMS)


def remembered_sizes(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], told: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The sizes that a module remembers, for tensors of these shapes.

    `told` holds those that no tensor shows, such as a convolution's groups, as the trace found them.
    """
    found = _sizes_by_class(module, shapes, told)
    rest = {name: value for name, value in told.items() if name not in found and hasattr(module, name)}
    return found | {name: _like(getattr(module, name), value) for name, value in rest.items()}


def _like(before: Any, sizes: tuple[int, ...]) -> Any:
    """A remembered size in the form it had: a number, a tuple or a list."""
    return type(before)(sizes) if isinstance(before, (tuple, list)) else sizes[0]


def _sizes_by_class(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], told: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    one = {name: value[0] for name, value in told.items()}
    weight = shapes.get("weight", ())
    if not weight and not is_norm(module):  # it has none, or one that is made from other parameters
        return {}
    if isinstance(module, nn.Linear):
        return {"out_features": weight[0], "in_features": weight[1]}
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        groups = one.get("groups", module.groups)
        return {"out_channels": weight[0], "in_channels": weight[1] * groups, "groups": groups}
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        groups = one.get("groups", module.groups)
        return {"in_channels": weight[0], "out_channels": weight[1] * groups, "groups": groups}
    if isinstance(module, nn.GroupNorm):
        channels = one.get("num_channels", module.num_channels)
        return {"num_channels": channels, "num_groups": one.get("num_groups", module.num_groups)}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return {"normalized_shape": tuple(told.get("normalized_shape", module.normalized_shape))}
    if is_norm(module):
        found = next((shapes[n] for n in ("weight", "running_mean") if shapes.get(n)), told.get("num_features"))
        return {} if found is None else {"num_features": found[0]}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": weight[0]}
    if isinstance(module, nn.Embedding):
        return {"num_embeddings": weight[0], "embedding_dim": weight[1]}
    return {}


def guess_sizes(
    net: nn.Module,
    pools: Mapping[str, Iterable[Label]],
    sizes: Mapping[str, int],
    every: Callable[[nn.Module], bool],
) -> dict[tuple[str, str], tuple[Label, ...]]:
    """(module, attribute) → labels, for numbers equal to the size of something growing that the module handles.

    Attributes whose names speak of sizes are taken; in modules for which `every` is true, all others too.
    """
    found: dict[tuple[str, str], tuple[Label, ...]] = {}
    for path, module in net.named_modules():
        if is_layer(module) or is_norm(module) or isinstance(module, nn.Sequential):
            continue
        by_size: dict[int, list[Label]] = {}
        for label in pools.get(path, ()):
            if any(axis_names(label)):
                by_size.setdefault(label_size(label, sizes), []).append(label)
        for name, value in vars(module).items():
            if name.startswith("_") or not _is_size(value) or not (every(module) or _speaks(name)):
                continue
            labels = tuple(_best(name, n, by_size) for n in (value if isinstance(value, (tuple, list)) else [value]))
            if any(any(axis_names(label)) for label in labels):
                found[path, name] = labels
    return found


def _is_size(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return 0 < len(value) <= 8 and all((type(v) is int and v == 1) or _is_size(v) for v in value)
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _speaks(name: str) -> bool:
    return _SIZES.search(name.lower()) is not None and _PLACES.search(name.lower()) is None


def _best(name: str, value: int, by_size: Mapping[int, list[Label]]) -> Label:
    """Of several labels of that size: a plain axis for a count (heads), else what comes first."""
    fitting = by_size.get(value, [])
    counts = _COUNTS.search(name.lower()) is not None
    ranked = sorted(fitting, key=lambda label: isinstance(label, Named) != counts) if "attn" in name else fitting
    if counts:
        ranked = sorted(fitting, key=lambda label: not isinstance(label, Named))
    return ranked[0] if ranked else value


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace one tensor of a module (the last part of its path) by a frozen one."""
    if name in module._parameters or (name == "bias" and is_layer(module)):
        module.register_parameter(name, nn.Parameter(value.detach(), requires_grad=False))
    else:
        module.register_buffer(name, value.detach(), persistent=name not in module._non_persistent_buffers_set)


def list_weights(module: nn.RNNBase) -> None:
    """A recurrent layer computes with a list of its weights: let it be of those that it has now."""
    weights = [getattr(module, name) for name in module._flat_weights_names]
    module._flat_weights = weights
    module._flat_weight_refs = [weakref.ref(weight) for weight in weights]


def replace(root: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """Put another module in the place of the one at a path; the root comes back."""
    if not path:
        return new
    parent, _, child = path.rpartition(".")
    setattr(root.get_submodule(parent), child, new)
    return root


def replace_kept(root: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """The same wherever modules keep others in plain lists, tuples and dictionaries; `made` goes by identity."""
    for module in root.modules():
        for name, value in vars(module).items():
            if name not in MODULE_ATTRIBUTES and (other := _replaced(value, made)) is not value:
                vars(module)[name] = other


def _replaced(value: Any, made: Mapping[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return made.get(id(value), value)
    if type(value) in (list, tuple):
        inner = [_replaced(v, made) for v in value]
        return value if all(a is b for a, b in zip(inner, value, strict=True)) else type(value)(inner)
    if type(value) is dict:
        changed = {k: _replaced(v, made) for k, v in value.items()}
        return value if all(changed[k] is v for k, v in value.items()) else changed
    return value


def caches(net: nn.Module) -> Iterator[dict[Any, Any]]:
    """Dictionaries in which modules keep tensors they computed: they survive a copy and would be wrong in it."""
    for module in net.modules():
        for name, value in vars(module).items():
            if name.startswith("_") and name in MODULE_ATTRIBUTES:
                continue
            if isinstance(value, dict) and any(isinstance(v, Tensor) for v in value.values()):
                yield value


def forget_caches(net: nn.Module) -> nn.Module:
    """The network, with nothing left of earlier inputs."""
    for cache in list(caches(net)):
        cache.clear()
    return net


def copied(net: nn.Module, made: dict[int, Any] | None = None) -> nn.Module:
    """What `copy.deepcopy` makes, in a quarter of its time: most of what modules hold are empty tables of hooks."""
    made = {} if made is None else made
    for module in net.modules():
        for value in vars(module).values():
            if type(value) in (OrderedDict, dict, set) and not value:
                made[id(value)] = type(value)()
    return copy.deepcopy(net, made)


def hollow(
    net: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None, *, constants: bool = False
) -> nn.Module:
    """A copy of the network without storage; tensors named in `shapes` get these instead of their own.

    Nothing is copied on the way, and what is tied stays tied. With `constants`, plain tensor attributes are copied.
    """
    made: dict[int, Any] = {}
    named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) not in made:
            shape = tuple(tensor.shape) if shapes is None else shapes.get(name, tuple(tensor.shape))
            empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    plain = [
        (path, name, value)
        for path, module in net.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    for _, _, value in plain:
        if id(value) not in made:
            made[id(value)] = torch.empty_like(value, device="meta")
    bare = forget_caches(copied(net, made))
    for path, name, value in plain if constants else ():
        setattr(bare.get_submodule(path), name, value.detach().clone())
    return bare


def reshaped(
    net: nn.Module,
    tensors: Mapping[str, tuple[Label, ...]],
    attributes: Mapping[tuple[str, str], tuple[Label, ...]],
    widths: Mapping[str, int],
) -> nn.Module:
    """A hollow copy with these widths: to see whether it runs and what its axes are."""
    shapes = {name: tuple(label_size(label, widths) for label in labels) for name, labels in tensors.items()}
    return _tell_sizes(hollow(net, shapes), attributes, widths)


def narrowed(
    net: nn.Module,
    tensors: Mapping[str, tuple[Label, ...]],
    attributes: Mapping[tuple[str, str], tuple[Label, ...]],
    sizes: Mapping[str, int],
    widths: Mapping[str, int],
    dtype: torch.dtype,
) -> nn.Module:
    """A copy with only the first features of every axis, in another precision.

    Fewer inputs want larger weights, as in a fresh network of these widths.
    """
    later = {axis: (torch.arange(n) >= widths[axis]).long() for axis, n in sizes.items()}
    made: dict[int, Any] = {}
    for name, tensor in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in made:
            part = select(tensor.detach(), [(d, births_of(label, later) == 0) for d, label in enumerate(tensors[name])])
            part = part.to(dtype) if part.is_floating_point() else part
            if part.dim() > 1 and part.is_floating_point() and isinstance(tensor, nn.Parameter):
                part *= math.sqrt(tensor[0].numel() / part[0].numel())
            made[id(tensor)] = nn.Parameter(part, requires_grad=False) if isinstance(tensor, nn.Parameter) else part
    return _tell_sizes(forget_caches(copied(net, made)), attributes, widths)


def _tell_sizes(
    net: nn.Module, attributes: Mapping[tuple[str, str], tuple[Label, ...]], widths: Mapping[str, int]
) -> nn.Module:
    """Let the modules of a network remember the sizes of its tensors and these widths."""
    told: dict[str, dict[str, tuple[int, ...]]] = {}
    for (path, attribute), labels in attributes.items():
        told.setdefault(path, {})[attribute] = tuple(label_size(label, widths) for label in labels)
    for path, module in net.named_modules():
        own = {n: tuple(t.shape) for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}
        for attribute, value in remembered_sizes(module, own, told.get(path, {})).items():
            setattr(module, attribute, value)
    return net.eval()


# How tensors lie in memory: bits depend on it, so a network keeps its own.


def plain_layout(tensor: Inputs) -> Inputs:
    """A copy that lies in memory in the usual order, with the usual strides even where a dimension is one long."""
    if isinstance(tensor, Batch):
        return tensor.map(plain_layout)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory as `plain_layout` would lay it."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def layout_of(net: nn.Module) -> torch.memory_format:
    """How a network's convolutions lie in memory."""
    last = any(
        p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
        for p in net.parameters()
    )
    return torch.channels_last if last else torch.contiguous_format


def laid_out(net: nn.Module, layout: torch.memory_format) -> nn.Module:
    """The network with its convolutions laid out so, in place."""
    if layout != torch.contiguous_format:
        for parameter in net.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=layout)
    return net
