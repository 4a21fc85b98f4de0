"""Plain modules of any width: setting the tensors of a module and the sizes it remembers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

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


def is_layer(module: nn.Module) -> bool:
    """Whether the module is a plain linear or convolution layer, no subclass with ways of its own."""
    return type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a normalization layer."""
    return isinstance(module, _NORMS)


def numbers(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], told: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The sizes that a module remembers, for tensors of these shapes.

    `told` holds those that no tensor shows, such as a convolution's groups, as the trace found them.
    """
    one = {name: value[0] for name, value in told.items()}
    weight = shapes.get("weight", ())
    if isinstance(module, nn.Linear):
        return {"out_features": weight[0], "in_features": weight[1]}
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        groups = one.get("groups", module.groups)
        return {"out_channels": weight[0], "in_channels": weight[1] * groups, "groups": groups}
    if isinstance(module, nn.GroupNorm):
        return {"num_channels": one["num_channels"], "num_groups": one.get("num_groups", module.num_groups)}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return {"normalized_shape": tuple(told.get("normalized_shape", module.normalized_shape))}
    if is_norm(module):
        found = next((shapes[n] for n in ("weight", "running_mean") if shapes.get(n)), None)
        return {} if found is None else {"num_features": found[0]}
    if isinstance(module, nn.Embedding):
        return {"num_embeddings": weight[0], "embedding_dim": weight[1]}
    return {}


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace one tensor of a module (the last part of its path) by a frozen one."""
    if name in module._parameters or (name == "bias" and is_layer(module)):
        module.register_parameter(name, nn.Parameter(value.detach(), requires_grad=False))
    else:
        module.register_buffer(name, value.detach(), persistent=name not in module._non_persistent_buffers_set)
