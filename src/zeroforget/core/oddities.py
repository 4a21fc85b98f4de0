"""What is odd about a network that was handed to us, in words: looked for before growing, and when a trial fails."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeroforget.core.axes import CannotGrow
from zeroforget.core.trace import without_caches

_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError)


def refuse_uncopyable(net: nn.Module) -> None:
    """Raise CannotGrow for a network of which no copy can be made: proof and growth begin with one."""
    for path, module in net.named_modules():
        for hook in module._forward_pre_hooks.values():
            name = type(hook).__name__
            if type(hook).__module__.startswith("torch.nn.utils.") and name in {"WeightNorm", "SpectralNorm"}:
                kind = {"WeightNorm": "weight_norm", "SpectralNorm": "spectral_norm"}[name]
                raise CannotGrow(
                    f"module '{path}' computes its weight anew in a hook (torch.nn.utils.{kind}): fix it at its value "
                    f"of now with torch.nn.utils.remove_{kind}(module) first, or use "
                    f"torch.nn.utils.parametrizations.{kind} instead"
                )
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise CannotGrow(
                    f"module '{path}' keeps '{name}', a tensor that gradients flow through, so it cannot be copied: "
                    f"keep {name}.detach() instead, or set it to None before"
                )


def unused(net: nn.Module, example: Tensor) -> list[str]:
    """The parameters that take no part in the answer to the example, in eval mode."""
    modes = [(module, module.training) for module in net.modules()]
    asked = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    try:
        net.eval()
        for parameter, _ in asked:
            parameter.requires_grad_(parameter.is_floating_point())
        names, parameters = zip(*((n, p) for n, p in net.named_parameters() if p.requires_grad), strict=True)
        with torch.enable_grad(), without_caches(net):
            out = net(example[:2])
            grads = torch.autograd.grad(out.float().sum(), parameters, allow_unused=True)
    except _ERRORS:  # the trials will say what is wrong
        return []
    finally:
        for parameter, learned in asked:
            parameter.requires_grad_(learned)
        for module, mode in modes:
            module.training = mode
    return [name for name, grad in zip(names, grads, strict=True) if grad is None]


def hints(net: nn.Module) -> str:
    """What about this network may explain a failed trial, as sentences to put behind the message."""
    hooked = [path for path, m in net.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    plain = [
        f"{path}.{name}" if path else name
        for path, module in net.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    found = ""
    if hooked:
        found += f". Its modules have forward hooks ({_few(hooked)}): remove them, or do their work in forward"
    if plain:
        found += (
            f". It keeps plain tensors ({_few(plain)}): make them buffers with register_buffer, so that they are copied"
        )
    return found


@torch.no_grad()
def wavers(net: nn.Module, example: Tensor) -> bool:
    """Whether a network in eval mode gives one input two answers."""
    modes = [(module, module.training) for module in net.modules()]
    try:
        net.eval()
        return not torch.equal(torch.nan_to_num(net(example)), torch.nan_to_num(net(example)))
    finally:
        for module, mode in modes:
            module.training = mode


def plain_layout(tensor: Tensor) -> Tensor:
    """A copy that lies in memory in the usual order, with the usual strides even where a dimension is one long."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


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


def _few(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
