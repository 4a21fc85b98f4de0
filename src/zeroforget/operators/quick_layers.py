"""Common layers of any network while a step is recorded: where the library takes several passes over the data, one.

Adding the biases of convolutions and summing their gradients over all positions is a fifth of a plain VGG's step there,
pooling a twelfth, and so is writing gradients down in one precision to read them in another; batch normalization and
the rectifiers behind it are a third. Inside `with Quick():` every convolution that fits adds and sums by the kernels
that growing layers use, a rectifier behind it in the same pass, and so does batch normalization; maxima of two by two
are found without a table of where they were; linear layers hand over their gradients in the precision of their weights.
Anything else, and everything on a CPU, runs as it always does.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeroforget.operators import reference as kernels
from zeroforget.operators.places import Moments, Norm, Vectors, matrix
from zeroforget.operators.plain import Geometry, apply, autocast_dtype, cast, convolution_backward
from zeroforget.operators.side_streams import Beside, Origin


class Quick(TorchFunctionMode):
    """The context: it watches for layers and pooling, from modules or function calls alike.

    `rectified` are weights of layers whose outputs go to a rectifier and nowhere else, as `Readers` finds them.
    """

    def __init__(self, rectified: Iterable[weakref.ref[Tensor]] = ()) -> None:
        super().__init__()
        self._rectified = {id(weight): ref for ref in rectified if (weight := ref()) is not None}
        self._done: dict[int, Tensor] = {}
        """Outputs that are rectified already, until the rectifier asks."""

    @property
    def rectified(self) -> int:
        """How many layers rectify what they give."""
        return len(self._rectified)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, or the quick one in its place."""
        kwargs = kwargs or {}
        if func is F.relu and args and id(args[0]) in self._done:
            return self._done.pop(id(args[0]))
        if func not in _KNOWN or _saved_elsewhere():
            return func(*args, **kwargs)
        if func is F.conv2d and (found := _read(*args, **kwargs)) is not None:
            return self._rectify(_Convolved, found, found[1])
        if func is F.batch_norm and (norm := _norm(*args, **kwargs)) is not None:
            return self._rectify(_Standardized, norm, norm[1])
        if func is F.max_pool2d and (image := _halved(*args, **kwargs)) is not None:
            with torch.cuda.device_of(image):
                return _Pooled.apply(image)  # type: ignore[no-untyped-call]
        if func is F.linear and (mixed := _mixed(*args, **kwargs)) is not None:
            return _Linear.apply(*mixed)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _rectify(self, layer: type[torch.autograd.Function], given: tuple[Any, ...], weight: Tensor) -> Tensor:
        """What the layer makes of this, rectified already where that comes next."""
        relu = (ref := self._rectified.get(id(weight))) is not None and ref() is weight
        with torch.cuda.device_of(given[0]):  # kernels are launched on the current device
            out: Tensor = layer.apply(*given, relu)
        if relu:
            self._done[id(out)] = out
        return out


_KNOWN = {F.conv2d, F.max_pool2d, F.linear, F.batch_norm}


def _saved_elsewhere() -> bool:
    """Whether somebody else sees to what autograd saves: where a network computes parts of itself anew on the way back
    (torch.utils.checkpoint), that happens outside of our context and must find the same operators."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Readers(TorchFunctionMode):
    """Within the block a step runs as always; afterwards it is known whose outputs only a rectifier read.

    Convolutions and batch norms before a plain `nn.ReLU` in a plain `nn.Sequential` come into question, no others:
    there is nothing in between that could not be seen. An output that is looked at in any other way, or kept, is left
    alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._weights = {id(weight): weight for weight in _before_rectifiers(modules)}
        self._outputs: list[_Output] = []
        self._present: dict[int, _Output] = {}
        """By the number of the tensor, until it is overwritten by a rectifier."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and remember."""
        kwargs = kwargs or {}
        if func not in _SHAPES:
            self._look(func, (*args, *kwargs.values()))
        out = func(*args, **kwargs)
        place = {F.conv2d: 1, F.batch_norm: 3}.get(func, -1)
        weight = args[place] if 0 < place < len(args) else kwargs.get("weight")
        if place > 0 and id(weight) in self._weights:
            made = self._present[id(out)] = _Output(id(weight), weakref.ref(out))
            self._outputs.append(made)
        elif func is F.relu and out is args[0]:  # in place: from now on everybody sees it rectified
            self._present.pop(id(out), None)
        return out

    def _look(self, reader: Any, values: Iterable[Any]) -> None:
        """Whether the outputs are among these values, or in a list of them."""
        for value in values:
            if isinstance(value, (tuple, list)):
                self._look(reader, value)
            elif isinstance(value, dict):
                self._look(reader, value.values())
            elif (found := self._present.get(id(value))) is not None and found.tensor() is value:
                found.readers.append(reader)

    def rectified(self) -> list[weakref.ref[Tensor]]:
        """The weights of these layers, when the step is done. What is still there somebody keeps, to read it later."""
        kept = {id(each) for each in self._present.values() if each.tensor() is not None}
        seen = {each.weight for each in self._outputs}
        others = {each.weight for each in self._outputs if each.readers != [F.relu] or id(each) in kept}
        return [weakref.ref(weight) for key, weight in self._weights.items() if key in seen - others]


@dataclass
class _Output:
    """What a layer gave, and who read it."""

    weight: int
    tensor: weakref.ref[Tensor]
    readers: list[Any] = field(default_factory=list)


def _before_rectifiers(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The weights of layers that a rectifier follows; none if something cannot be watched."""
    weights: list[Tensor] = []
    for chain in modules:
        if any(isinstance(part, _UNSEEN) for part in (chain, *vars(chain).values())):
            return []
        if type(chain) is nn.Sequential:
            for layer, after in itertools.pairwise(chain):
                tasks = getattr(layer, "tasks", None)  # a normalization may have one layer a task, the last in use
                inner = [layer, *tasks.children()][-1] if isinstance(tasks, nn.Module) else layer
                plain = type(inner) in (nn.Conv2d, nn.BatchNorm2d) and type(after) is nn.ReLU
                weight = inner._parameters.get("weight") if plain else None
                if weight is not None and not any(map(_hooked, (layer, inner, after))):
                    weights.append(weight)
    return weights


_SHAPES = {Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point}
"""Whoever asks for these does not look at values."""
_UNSEEN = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
"""What these read cannot be watched."""


def _hooked(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _read(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Geometry] | None:
    """A convolution's arguments, if this is a case for us; the names are those of torch."""
    if isinstance(padding, str) or not fits(input):
        return None
    strides, paddings, dilations = ((n, n) if isinstance(n, int) else tuple(n) for n in (stride, padding, dilation))
    return input, weight, bias, Geometry(strides, paddings, dilations, groups)


def _norm(
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float, float] | None:
    """Batch normalization's arguments, if it goes by the batch's own moments; one position alone has none. What torch
    would refuse is left to it."""
    if not training or weight is None or bias is None or (running_mean is None) != (running_var is None):
        return None
    if not input.is_floating_point() or not fits(input) or input.numel() <= input.shape[1] or not eps > 0:
        return None
    wide = torch.promote_types(input.dtype, torch.float32)
    numbers = [t for t in (weight, bias, running_mean, running_var) if t is not None]
    plain = all(t.dtype == wide and t.shape == input.shape[1:2] and t.is_contiguous() for t in numbers)
    return (input, weight, bias, running_mean, running_var, momentum, eps) if plain else None


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
    plain = plain and not (ceil_mode or return_indices)
    return input if plain and fits(input) and min(input.shape[2:]) >= 2 else None


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
        return bool((wide_product(one, one) == 8).all())
    except (RuntimeError, TypeError):  # this device's, or an older torch
        return False


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = torch.mm(a, b, out_dtype=torch.float32)
    return out


def fits(x: Tensor) -> bool:
    """Whether the kernels take this input: images on a GPU, channels last."""
    return kernels.on_gpu(x) and x.dim() == 4 and kernels.lies_side_by_side(x)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, relu: bool) -> Tensor:
        ctx.geometry, ctx.relu = geometry, relu
        ctx.dtype, ctx.given = x.dtype, (Origin.of(weight), Origin.of(bias))
        dtype = autocast_dtype(x)
        x, weight = cast(x, dtype), cast(weight, dtype)
        out = apply(x, weight, None, geometry).contiguous(memory_format=torch.channels_last)
        kernels.finish(matrix(out), Vectors(shift=None if bias is None else bias.contiguous()), relu)
        ctx.save_for_backward(x, weight, out if relu else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        g = g.contiguous(memory_format=torch.channels_last)
        if ctx.relu:
            flat, _ = kernels.unfinish(matrix(g), matrix(out), Vectors(), relu=True)
            g = kernels.like(flat, g)
        grad_x = grad_weight = grad_bias = None
        with Beside(g) as beside:
            beside.reads(g, x)
            with beside.aside():
                if need_weight:
                    found = convolution_backward(g, x, weight, ctx.geometry, [False, True, False])
                    grad_weight = beside.give(ctx.given[0], found[1])
            with beside.aside(1):
                if need_bias:
                    grad_bias = beside.give(ctx.given[1], kernels.totals(matrix(g)))
            if need_x:
                grad_x = convolution_backward(g, x, weight, ctx.geometry, [True, False, False])[0].to(ctx.dtype)
        return grad_x, grad_weight, grad_bias, None, None


class _Standardized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        given, x = Norm(weight, bias, mean, var, momentum, eps), kernels.side_by_side(x)
        out = kernels.images(x, tuple(x.shape))
        moments = kernels.standardize(matrix(x), matrix(out), given, relu)
        ctx.relu, ctx.numbers = relu, (momentum, eps)
        ctx.save_for_backward(x, weight, bias if relu else None, moments.mean, moments.inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        given = Norm(weight, weight if bias is None else bias, None, None, *ctx.numbers)  # unread without relu
        rows, moments = matrix(kernels.side_by_side(g)), Moments(mean, inverse)
        found = kernels.unstandardize(rows, matrix(x), moments, given, ctx.relu, wants_x=ctx.needs_input_grad[0])
        by_x, by_weight, by_bias = found
        return None if by_x is None else kernels.like(by_x, x), by_weight, by_bias, *[None] * 5


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.dtype, ctx.given = x.dtype, (Origin.of(weight), Origin.of(bias))
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        with Beside(g) as beside:
            beside.reads(g, x)
            with beside.aside():
                grad_weight = beside.give(ctx.given[0], wide_product(g.t(), x)) if need_weight else None
            with beside.aside(1):
                grad_bias = beside.give(ctx.given[1], g.sum(0, dtype=torch.float32)) if need_bias else None
            grad_x = g.mm(weight).to(ctx.dtype) if need_x else None
        return grad_x, grad_weight, grad_bias


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return kernels.pool(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return kernels.unpool(kernels.side_by_side(g), x)
