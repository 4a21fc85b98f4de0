"""The layers of a network that grows: linear and convolution with newborn parts, and what belongs to one task alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.axes.labels import Label, births_of
from zeroforget.growing.per_task import PerTask, seal
from zeroforget.growing.tensors import GrowingTensor
from zeroforget.operators.fused import FusedPlan, fits, fused
from zeroforget.operators.places import Affine, Places, positions, select
from zeroforget.operators.plain import Geometry, Scaling, apply, autocast_dtype, grown

Births = Mapping[str, Tensor]


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers, be it sealed or not, without those that hold nothing."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None and tensor.numel()}


def bits(module: nn.Module) -> int:
    """What a module's numbers take."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(t.numel() * t.element_size() * 8 for t in tensors if t.is_floating_point())


class FeatureNorm(nn.Module):
    """One task's feature normalization: scale and shift of the features it covers (equation 7)."""

    scale: nn.Parameter | None
    shift: nn.Parameter | None

    def __init__(self, covered: Places, like: Tensor) -> None:
        super().__init__()
        self.covered = covered
        self.register_parameter("scale", nn.Parameter(like.new_ones(len(covered))) if len(covered) else None)
        self.register_parameter("shift", nn.Parameter(like.new_zeros(len(covered))) if len(covered) else None)

    def vectors(self, features: int) -> tuple[Tensor, Tensor]:
        """Scale and shift for all features of the layer: identity where none is covered."""
        assert self.scale is not None
        assert self.shift is not None
        rest = features - len(self.covered)
        if self.covered.start == 0:
            ones, zeros = self.scale.new_ones(rest), self.shift.new_zeros(rest)
            return torch.cat([self.scale, ones]), torch.cat([self.shift, zeros])
        index = self.covered.on(self.scale.device)
        scale = self.scale.new_ones(features).index_copy(0, index, self.scale)
        return scale, self.shift.new_zeros(features).index_copy(0, index, self.shift)


class GrowingLayer(nn.Module):
    """A linear or convolution layer whose weight grows, with feature normalization of its output for each task."""

    def __init__(self, plain: nn.Module, weight: GrowingTensor, bias: GrowingTensor | None, fn: str) -> None:
        super().__init__()
        self.grown = weight
        self.grown_bias = bias
        self.fn = fn
        self.norms = PerTask()
        self.may_fold = True
        """False where the network overwrites this layer's output in place, which folding needs for backward."""
        self.folds = True
        self.relu = False
        """Whether the rectifier behind this layer runs as part of it."""
        self._scaled: Scaling | None = None
        self._fused: tuple[FusedPlan, Tensor, Tensor] | None = None
        self._remembered = {k: getattr(plain, k) for k in _REMEMBERED if hasattr(plain, k)}
        self.convolution = {k: getattr(plain, k) for k in _CONV_NUMBERS} if isinstance(plain, _CONVOLUTIONS) else None
        """Stride, padding and the like; None of a linear layer."""

    def __getattr__(self, name: str) -> Any:
        """What other code reads of the plain layer: its sizes as they are now, the rest as it was."""
        if name in self.__dict__.get("_remembered", ()):
            before, shape = self._remembered, self.grown.value.shape
            if name in {"out_features", "out_channels"}:
                return shape[0]
            if name == "groups" and before["groups"] > 1:  # whole ones are born
                return shape[0] * before["groups"] // before["out_channels"]
            if name in {"in_features", "in_channels"}:
                return shape[1] * (self.groups if "groups" in before else 1)
            return before[name]
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """The whole weight, for code that reads it directly."""
        return self.grown.whole()

    @property
    def bias(self) -> Tensor | None:
        """The whole bias."""
        return None if self.grown_bias is None else self.grown_bias.whole()

    def add_task(self, births: Births, task: int) -> None:
        """A feature normalization for the newest task; its tensors have already grown."""
        out = births_of(self.grown.labels[0], births)
        covered = {"none": out < 0, "reused": out < task, "all": out <= task}[self.fn]
        self.norms.append(FeatureNorm(Places.where(covered), self.grown.value))

    def own(self, task: int) -> dict[str, Tensor]:
        """What belongs to a task alone, by name: its feature normalization."""
        return own_tensors(self.norms[task])

    def drop_task(self) -> None:
        """Forget the newest task's feature normalization; the one before is open again."""
        self.norms.drop()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, as torch's layers call it
        """The newest task's output, differentiable in its newborn parts."""
        single = input.dim() == (1 if self.convolution is None else 1 + len(self.convolution["stride"]))
        return self._batch(input.unsqueeze(0)).squeeze(0) if single else self._batch(input)

    def _batch(self, x: Tensor) -> Tensor:
        norm = self.norms[-1]
        assert isinstance(norm, FeatureNorm)
        geometry = None
        if self.convolution is not None:
            x, geometry = self._geometry(x)
        known = x.shape[1] == self.grown.value.shape[1]  # of any other input torch shall say that it does not fit
        if known and fits(x, geometry) and self._fuses(norm):
            plan, affine = self._fuse(norm, geometry, x.device)
            weight = self.grown.synced(autocast_dtype(x))
            return fused(x, self.grown.rows, self.grown.cols, weight, affine, plan, self.grown.low_rank())
        y = self._plainly(x, norm, geometry)
        return F.relu(y) if self.relu else y

    def _plainly(self, x: Tensor, norm: FeatureNorm, geometry: Geometry | None) -> Tensor:
        """The same without the rectifier, one operator after the other."""
        born, bias = None, None
        if self.grown_bias is not None:
            born, bias = self.grown_bias.rows, self.grown_bias.synced()
        rows = self.grown.rows
        if rows is not None and self._all_newborn(norm) and autocast_dtype(x) is None:
            return apply(x, rows, born, geometry)
        parts, low_rank = (rows, self.grown.cols, born), self.grown.low_rank()
        if geometry is None or not len(norm.covered) or not self.folds:
            weight = self.grown.synced(autocast_dtype(x))
            y = grown(x, parts, weight, bias, self.grown.block, geometry, low_rank=low_rank)
            return _normalize(y, norm, -1 if geometry is None else y.dim() - 1 - len(geometry.stride))
        # A convolution's output is larger than its weight, so the normalization goes into the weight.
        assert norm.scale is not None
        assert norm.shift is not None
        learned = (self._scaling(norm, autocast_dtype(x)), norm.scale, norm.shift)
        return grown(x, parts, self.grown.synced(), bias, self.grown.block, geometry, learned, low_rank)

    def _all_newborn(self, norm: FeatureNorm) -> bool:
        """Whether this is an ordinary layer, as in a first task: nothing is frozen and nothing is normalized."""
        tensors = [self.grown] if self.grown_bias is None else [self.grown, self.grown_bias]
        return not len(norm.covered) and all(t.rows is not None and not len(t.block.old_out) for t in tensors)

    def _fuses(self, norm: FeatureNorm) -> bool:
        return self.folds or not (len(norm.covered) or self.relu)

    def _fuse(self, norm: FeatureNorm, geometry: Geometry | None, device: torch.device) -> tuple[FusedPlan, Affine]:
        """What the fused operator needs to know, kept from step to step."""
        block, features = self.grown.block, self.grown.value.shape[0]
        kept = self._fused
        if (
            kept is None
            or kept[0].block is not block
            or kept[0].covered is not norm.covered
            or kept[1].device != device
        ):
            at = [positions(places, features).to(device) for places in (block.new_out, norm.covered)]
            self._fused = kept = (FusedPlan(block, norm.covered, geometry, self.relu), at[0], at[1])
        plan, born_at, covered_at = kept
        bias = self.grown_bias
        born = None if bias is None else bias.rows
        return plan, Affine(None if bias is None else bias.value, born, norm.scale, norm.shift, born_at, covered_at)

    def _scaling(self, norm: FeatureNorm, dtype: torch.dtype | None) -> Scaling:
        """The normalization's present values, in tensors that are kept from step to step."""
        assert norm.scale is not None
        assert norm.shift is not None
        value = self.grown.value
        dtype = value.dtype if dtype is None or value.dtype == torch.float64 else dtype
        kept = self._scaled
        if (
            kept is None
            or kept.covered is not norm.covered
            or kept.weight.dtype != dtype
            or not _laid_out_as(kept, value)
        ):
            features = value.shape[0]
            with torch.inference_mode(False):  # it is kept for steps that are not
                ones, zeros = value.new_ones(features), value.new_zeros(features)
                self._scaled = kept = Scaling(ones, zeros, norm.covered, torch.empty_like(value, dtype=dtype))
        norm.covered.put(kept.scale.data, 0, norm.scale.data)
        norm.covered.put(kept.shift.data, 0, norm.shift.data)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_scaled": None, "_fused": None}

    @property
    def learned_scale(self) -> Tensor | None:
        """The scales of the newest task, if they may be folded in."""
        norm = self.norms[-1] if self.may_fold and len(self.norms) else None
        return norm.scale.detach() if isinstance(norm, FeatureNorm) and norm.scale is not None else None

    def _geometry(self, x: Tensor) -> tuple[Tensor, Geometry]:
        """The convolution's numbers; padding that is not plain zeros on both sides is done here."""
        assert self.convolution is not None
        numbers: dict[str, Any] = self.convolution
        padding = numbers["padding"]
        if isinstance(padding, str) or numbers["padding_mode"] != "zeros":
            mode = "constant" if numbers["padding_mode"] == "zeros" else numbers["padding_mode"]
            x = F.pad(x, numbers["_reversed_padding_repeated_twice"], mode=mode)
            padding = (0,) * len(numbers["stride"])
        each = self.grown.value.shape[1]
        groups = 1 if numbers["groups"] == 1 else x.shape[1] // each
        return x, Geometry(numbers["stride"], padding, numbers["dilation"], groups)

    def dense(self, task: int, *, lend: bool = False) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a task's own plain layer, its feature normalization folded in."""
        norm = self.norms[task]
        assert isinstance(norm, FeatureNorm)
        lend = lend and not len(norm.covered)
        weight = self.grown.at(task, lend=lend)
        bias = None if self.grown_bias is None else self.grown_bias.at(task, lend=lend)
        if not len(norm.covered):
            return weight, bias
        with torch.no_grad():
            scale, shift = norm.vectors(weight.shape[0])
            along = scale.view(-1, *[1] * (weight.dim() - 1))
            weight = weight.mul_(along) if along.dtype == weight.dtype else weight * along  # it is a copy of our own
            return weight, shift.clone() if bias is None else bias * scale + shift


def refresh(layers: Iterable[GrowingLayer]) -> None:
    """Fold normalizations in only while their scales are away from zero, by which their gradients divide."""
    found = [(layer, scale) for layer in layers if (scale := layer.learned_scale) is not None]
    if found:
        smallest = [scale.abs().min().to(found[0][1].device) for _, scale in found]
        folds = (torch.stack(smallest) > _SMALLEST_SCALE).tolist()  # a GPU is waited for once, not for each layer
        for (layer, _), fold in zip(found, folds, strict=True):
            layer.folds = fold


def _normalize(y: Tensor, norm: FeatureNorm, dim: int) -> Tensor:
    """Equation 7 on a layer's output."""
    if not len(norm.covered):
        return y
    scale, shift = norm.vectors(y.shape[dim])
    shape = [1] * y.dim()
    shape[dim] = -1
    return y * scale.to(y.dtype).view(shape) + shift.to(y.dtype).view(shape)


def _laid_out_as(kept: Scaling, value: Tensor) -> bool:
    """Whether what was kept for a weight still lies in memory as that weight does."""
    same = kept.weight.shape == value.shape and kept.weight.device == value.device
    return same and kept.scale.dtype == value.dtype and kept.weight.stride() == value.stride()


_SMALLEST_SCALE = 0.05
_REMEMBERED = (
    *("in_features", "out_features", "in_channels", "out_channels", "groups", "kernel_size", "stride", "padding"),
    *("dilation", "padding_mode", "transposed", "output_padding"),
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONV_NUMBERS = ("stride", "padding", "dilation", "groups", "padding_mode", "_reversed_padding_repeated_twice")


class GrowingNorm(nn.Module):
    """A normalization layer, one for each task: affine parameters and statistics are that task's alone, and so is what
    a subclass has inside (an activation that learns)."""

    def __init__(self, plain: nn.Module, labels: Mapping[str, tuple[Label, ...]]) -> None:
        super().__init__()
        self.labels = dict(labels)
        self.tasks = PerTask()
        self.frozen = {name for name, p in plain.named_parameters() if not p.requires_grad}
        """Parameters that were given as constants: they stay what they are in the first task."""
        self.tied = {name: id(p) for name, p in plain.named_parameters()}
        """A number for each parameter, the same where several layers share one."""
        self.given: nn.Module | None = copy.deepcopy(plain)  # what the first task starts from
        seal(self.given)
        self._template = (copy.deepcopy(plain).to("meta"),)  # in a tuple: not a submodule

    @property
    def template(self) -> nn.Module:
        """The plain layer as it was given, without storage."""
        return self._template[0]

    def add_task(self, births: Births, task: int, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Start as the task before was (the first one as the network was given); new features at the identity."""
        before = self.tasks[-1] if len(self.tasks) else self.given
        assert before is not None
        source = dict([*before.named_parameters(), *before.named_buffers()])
        new = copy.deepcopy(self.template)
        for name, labels in self.labels.items():
            where = [births_of(label, births) for label in labels]
            value = source[name]
            if task == 0:
                value = select(value, [(d, b <= 0) for d, b in enumerate(where)])
            elif name == "num_batches_tracked":
                value = torch.zeros_like(value)
            else:
                value = widen(value, where, task - 1, _fresh(name, value))
            _assign(new, name, value)
        for path, remembered in numbers.items():
            for attribute, number in remembered.items():
                setattr(new.get_submodule(path), attribute, number)
        self.given = None
        self.tasks.append(new.train(self.training))
        self._freeze()

    def __getattr__(self, name: str) -> Any:
        """What other code reads of the plain layer (`eps`, `weight`) is the newest task's."""
        tasks = self.__dict__.get("_modules", {}).get("tasks")
        if name in self.__dict__.get("_modules", {}) or not tasks:
            return super().__getattr__(name)
        return getattr(tasks[-1], name)

    def own(self, task: int) -> dict[str, Tensor]:
        """What belongs to a task alone, by name: affine parameters and statistics."""
        return own_tensors(self.tasks[task])

    def drop_task(self) -> None:
        """Forget the newest task's normalization; the one before is open again."""
        self.tasks.drop()
        self._freeze()

    def _freeze(self) -> None:
        for name in self.frozen if len(self.tasks) == 1 else ():
            self.tasks[0].get_parameter(name).requires_grad_(False)

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Normalize as the newest task does."""
        out: Tensor = self.tasks[-1](*given, **named)
        return out

    def dense(self, task: int) -> nn.Module:
        """A plain copy of one task's layer."""
        plain = copy.deepcopy(self.tasks[task])
        for part, model in zip(plain.modules(), self.template.modules(), strict=True):
            for name in model._parameters:
                if name in part._buffers:
                    value = part._buffers.pop(name)
                    part.register_parameter(name, None if value is None else nn.Parameter(value))
        return plain

    def fill(self, task: int, plain: nn.Module) -> None:
        """Give a plain copy of one task's layer another task's numbers."""
        for part, kept in zip(plain.modules(), self.tasks[task].modules(), strict=True):
            held = own_tensors(part)
            for name, value in own_tensors(kept).items():
                held[name].copy_(value)


def tie(norms: Iterable[GrowingNorm]) -> None:
    """What normalization layers shared when they were given, they share in the newest task."""
    first: dict[int, nn.Parameter] = {}
    for norm in norms:
        for name, number in norm.tied.items():
            part, own = _home(norm.tasks[-1], name)
            shared = part._parameters[own]
            assert shared is not None
            part._parameters[own] = first.setdefault(number, shared)


def _home(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return module.get_submodule(path), own


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    module, name = _home(module, name)
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(value)
    else:
        module._buffers[name] = value


def _fresh(name: str, value: Tensor) -> float:
    """What a new feature starts with: the identity, and of a parameter that only a subclass has, the mean."""
    known = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
    return known[name] if name in known else float(value.detach().double().mean())


def widen(value: Tensor, births: list[Tensor], keep: int, fill: float) -> Tensor:
    """The value with new features beside the old ones; they hold `fill`."""
    value = value.detach()
    if not births:
        return value.clone()
    for dim, where in enumerate(births):
        old = Places.where(where <= keep)
        shape = list(value.shape)
        shape[dim] = len(where)
        wider = value.new_full(shape, fill)
        old.put(wider, dim, value)
        value = wider
    return value
