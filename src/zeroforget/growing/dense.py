"""A task's own plain network, cut out of the growing one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.find import Axes
from zeroforget.axes.inputs import Several, unpacks
from zeroforget.axes.labels import label_size
from zeroforget.axes.plain_modules import copied, laid_out, remembered_sizes, replace, replace_kept, set_tensor
from zeroforget.files.hashes import Digest
from zeroforget.growing import user_buffers
from zeroforget.growing.births import Summary
from zeroforget.growing.layers import GrowingLayer, GrowingNorm
from zeroforget.growing.per_task import HeadPlace, PerTask
from zeroforget.growing.tensors import GrowingTensor


class CutFrom(Summary):
    """A network whose tasks have networks of their own: what these are made of."""

    axes: Axes
    heads: PerTask
    extras: PerTask
    inside: tuple[str, ...]
    """Where heads stand inside of the network, if they do."""
    _channels_last: bool

    @property
    def takes_several(self) -> bool:
        """Whether the network takes more than one input."""
        return unpacks(self._skeleton[0])

    def cut(self, number: int, *, lend: bool = False) -> nn.Module:
        """A new network of a task's own. One that is lent shares weights with this one: ask it, then let go of it."""
        return DenseInTurn(self, lend=lend).turn(number)

    def _numbers(self, path: str, module: nn.Module, widths: Mapping[str, int]) -> dict[str, Any]:
        """The sizes that the module at `path` remembers where the axes have these widths."""
        prefix = f"{path}." if path else ""
        held = [n for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None]
        shapes = {
            n: tuple(label_size(label, widths) for label in self.axes.tensors[prefix + n])
            for n in held
            if prefix + n in self.axes.tensors
        }
        told = {
            attribute: tuple(label_size(label, widths) for label in labels)
            for (where, attribute), labels in self.axes.attributes.items()
            if where == path
        }
        return remembered_sizes(module, shapes, told)

    def _resize(self, task: int, fill: Mapping[str, float]) -> None:
        """Modules of the user's own remember the sizes of a task."""
        widths = self._widths(task)
        for path, module in self._skeleton[0].named_modules():
            live = self._live(path)
            if live is not None and not isinstance(live, (GrowingLayer, GrowingNorm, HeadPlace)):
                for attribute, value in self._numbers(path, module, widths).items():
                    setattr(live, attribute, value)
        user_buffers.resize(self.body, self.axes.tensors, self._births, task, fill)

    def _live(self, path: str) -> nn.Module | None:
        """The live module at a path of the plain network; none for the parts of a normalization layer."""
        live: nn.Module = self.body
        for name in path.split(".") if path else []:
            if isinstance(live, (GrowingLayer, GrowingNorm)):
                return None
            live = live.get_submodule(name)
        return live


class DenseInTurn:
    """One plain network that is each task's in turn: where tasks have one form, only its numbers are exchanged.

    So many tasks can be asked with the memory of one of them. What `turn` gives is good until the next `turn`.
    """

    def __init__(self, net: CutFrom, *, lend: bool = False) -> None:
        self.net, self.lend = net, lend
        self._made: nn.Module | None = None
        self._parts: list[tuple[str, nn.Module, nn.Module]] = []
        self._widths: dict[str, int] = {}

    @torch.no_grad()
    def turn(self, task: int) -> nn.Module:
        """A task's own network."""
        widths = self.net._widths(task)
        if self._made is None or widths != self._widths:
            return self._new(task, widths)
        for path, live, module in self._parts:
            if isinstance(live, GrowingNorm):
                live.fill(task, module)
            else:
                self._fill(live, path, task, module)
        if not self.net.inside:
            self._fill_head(task, self._made.get_submodule("head"))
        return self._laid_out(self._made)

    def _new(self, task: int, widths: dict[str, int]) -> nn.Module:
        features = copied(self.net._skeleton[0])
        made: dict[int, nn.Module] = {}
        self._parts, self._widths, self._made = [], widths, None
        for path, module in list(features.named_modules(remove_duplicate=False)):
            if id(module) not in made:
                made[id(module)] = self._plain(module, path, task)
            if made[id(module)] is not module:
                features = replace(features, path, made[id(module)])
        replace_kept(features, made)
        head: nn.Module = nn.Identity()
        if not self.net.inside:
            head = copy.deepcopy(self.net.heads[task])
            self._fill_head(task, head)
        row = Several if unpacks(features) else nn.Sequential
        whole = row(OrderedDict(features=features, head=head)).requires_grad_(False).eval()
        self._made = self._laid_out(whole)
        return self._made

    def _laid_out(self, whole: nn.Module) -> nn.Module:
        return laid_out(whole, torch.channels_last if self.net._channels_last else torch.contiguous_format)

    def _plain(self, module: nn.Module, path: str, task: int) -> nn.Module:
        """A task's own version of a module of the skeleton: changed in place, or another one for a normalization."""
        live = self.net._live(path)
        if live is None:
            return module
        plain, at_head = live.dense(task) if isinstance(live, GrowingNorm) else module, isinstance(live, HeadPlace)
        kinds = (GrowingLayer, GrowingNorm, HeadPlace)
        if isinstance(live, kinds) or module._parameters or live._buffers:
            self._parts.append((path, live, plain))
        if plain is module:
            self._fill(live, path, task, module)
            for attribute, value in self.net._numbers(path, module, self._widths).items() if not at_head else ():
                setattr(module, attribute, value)
        return plain

    def _fill(self, live: nn.Module, path: str, task: int, module: nn.Module) -> None:
        if isinstance(live, HeadPlace):
            live.fill(task, module)
            return
        if isinstance(live, GrowingLayer):
            weight, bias = live.dense(task, lend=self.lend)
            set_tensor(module, "weight", weight)
            if bias is not None:
                set_tensor(module, "bias", bias)
            return
        for name in list(module._parameters):
            tensor = self.net.loose._modules.get(_key(path, name))
            if tensor is not None:
                assert isinstance(tensor, GrowingTensor)
                set_tensor(module, name, tensor.at(task, lend=self.lend))
        kept = self.net.extras[task] if task < len(self.net.extras) else None
        for name, buffer in live._buffers.items():
            value = buffer if kept is None else kept._buffers.get(_key(path, name))
            if value is None:
                module._buffers[name] = None
            else:
                set_tensor(module, name, value.clone())

    def _fill_head(self, task: int, head: nn.Module) -> None:
        own_head = self.net.heads[task]
        for name in ("weight", "bias"):
            value: Tensor = getattr(own_head, name)
            head._buffers.pop(name, None)
            head.register_parameter(name, nn.Parameter(value.detach().clone(), requires_grad=False))
        head.out_features = own_head.out_features


def each_dense(net: CutFrom) -> Iterator[nn.Module]:
    """Every task's own network, in order, each good until the next one."""
    one = DenseInTurn(net)
    return (one.turn(task) for task in range(len(net.history)))


def _key(path: str, name: str) -> str:
    return user_buffers.key(user_buffers.joined(path, name))


def fingerprint(module: nn.Module) -> str:
    """The SHA-256 of every tensor in a module's state dict, with its name, type and shape; the same on every device."""
    out = Digest()
    for name, tensor in sorted(module.state_dict().items()):
        plain = (tensor if tensor.layout == torch.strided else tensor.to_dense()).detach().cpu().contiguous()
        out.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        out.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return out.hexdigest()
