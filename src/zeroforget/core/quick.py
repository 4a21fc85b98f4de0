"""A training step on a GPU, of any method: where the library takes several passes over the data, one.

Adding the biases of convolutions and summing their gradients over all positions is a fifth of a plain VGG's step there,
pooling a twelfth, and so is writing gradients down in one precision to read them in another. Inside `with Quick():`
every convolution that fits adds and sums by the kernels that growing layers use, maxima of two by two are found without
a table of where they were, and linear layers hand over their gradients in the precision of their weights; anything
else, and everything on a CPU, runs as it always does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeroforget.core import kernels
from zeroforget.core.ops import Geometry, apply, autocast_dtype, cast, convolution_backward


class Quick(TorchFunctionMode):
    """The context: it watches for layers and pooling, from modules or function calls alike."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, or the quick one in its place."""
        if func is F.conv2d and (found := _read(*args, **(kwargs or {}))) is not None:
            with torch.cuda.device_of(found[0]):  # kernels are launched on the current device
                return _Biased.apply(*found)  # type: ignore[no-untyped-call]
        if func is F.max_pool2d and (image := _halved(*args, **(kwargs or {}))) is not None:
            with torch.cuda.device_of(image):
                return _Pooled.apply(image)  # type: ignore[no-untyped-call]
        if func is F.linear and (mixed := _mixed(*args, **(kwargs or {}))) is not None:
            return _Linear.apply(*mixed)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _read(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Geometry] | None:
    """A convolution's arguments, if this is a case for us; the names are those of torch."""
    if bias is None or isinstance(padding, str) or not fits(input):
        return None
    strides, paddings, dilations = ((n, n) if isinstance(n, int) else tuple(n) for n in (stride, padding, dilation))
    return input, weight, bias, Geometry(strides, paddings, dilations, groups)


def _halved(
    input: Tensor,  # noqa: A002
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """What is pooled, if that is two by two and nothing else."""
    numbers = [(n, n) if isinstance(n, int) else n for n in (kernel_size, stride or kernel_size, padding, dilation)]
    plain = [tuple(pair) for pair in numbers] == [(2, 2), (2, 2), (0, 0), (1, 1)]
    return input if plain and not (ceil_mode or return_indices) and fits(input) else None


def _mixed(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """A linear layer's arguments, if it computes in a lower precision than its weight is kept in."""
    lower = input.dim() == 2 and autocast_dtype(input) == torch.bfloat16 and weight.dtype == torch.float32
    return (input, weight, bias) if lower and wide_products(input.device) else None


@functools.cache
def wide_products(device: torch.device) -> bool:
    """Whether products of bf16 can be had in float32, as they come out of the matrix units: on GPUs, mostly."""
    try:
        one = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
        return bool((_wide(one, one) == 8).all())
    except (RuntimeError, TypeError):  # this device's, or an older torch
        return False


def _wide(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = torch.mm(a, b, out_dtype=torch.float32)
    return out


def fits(x: Tensor) -> bool:
    """Whether the kernels take this input: images on a GPU, channels last."""
    return kernels.on_gpu(x) and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
        ctx.geometry = geometry
        ctx.dtypes = x.dtype, weight.dtype, bias.dtype
        dtype = autocast_dtype(x)
        x, weight = cast(x, dtype), cast(weight, dtype)
        out = apply(x, weight, None, geometry).contiguous(memory_format=torch.channels_last)
        kernels.finish(_matrix(out), kernels.Vectors(shift=bias), relu=False)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        g = g.contiguous(memory_format=torch.channels_last)
        grads: list[Tensor | None] = [None, None, None]
        if need_x or need_weight:
            found = convolution_backward(g, x, weight, ctx.geometry, [need_x, need_weight, False])
            grads[:2] = [part if need else None for part, need in zip(found, (need_x, need_weight), strict=False)]
        if need_bias:
            grads[2] = kernels.totals(_matrix(g))
        return (*(t if t is None else t.to(d) for t, d in zip(grads, ctx.dtypes, strict=True)), None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.dtype = x.dtype
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            g.mm(weight).to(ctx.dtype) if need_x else None,
            _wide(g.t(), x) if need_weight else None,
            g.sum(0, dtype=torch.float32) if need_bias else None,
        )


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return kernels.pool(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return kernels.unpool(g.contiguous(memory_format=torch.channels_last), x)


def _matrix(x: Tensor) -> Tensor:
    """One row for each position, one column for each channel: a view."""
    return x.permute(0, 2, 3, 1).view(-1, x.shape[1])
