"""What belongs to one task each: heads, normalizations, a user's buffers.

The newest task's is a part of the network as any module is. Earlier ones never learn again, so they lie outside the
tree of modules: walking it, as a step of training does, costs the same however many tasks there are. State dicts name
them as a list of modules would, and devices and types reach them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.axes.labels import Label, births_of
from zeroforget.axes.plain_modules import remembered_sizes, set_tensor


def seal(module: nn.Module) -> None:
    """Turn a module's parameters into buffers: it works as before, but no optimizer can find it."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            del part._parameters[name]
            part.register_buffer(name, None if parameter is None else parameter.detach().clone())


def unseal(module: nn.Module, like: nn.Module) -> None:
    """Undo `seal`: what is a parameter in `like` is one again."""
    for part, model in zip(module.modules(), like.modules(), strict=True):
        for name in model._parameters:
            value = part._buffers.pop(name)
            part.register_parameter(name, None if value is None else nn.Parameter(value.detach().clone()))


class PerTask(nn.Module):
    """A list of modules, one for each task, of which only the last is a submodule."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.earlier: list[nn.Module] = []
        for module in modules:
            self.append(module)

    def append(self, module: nn.Module) -> None:
        """The newest task's; the one before is sealed."""
        for before in self._modules.values():
            assert before is not None
            seal(before)
            self.earlier.append(before)
        self._modules.clear()
        self.add_module(str(len(self.earlier)), module)

    def drop(self) -> None:
        """Forget the newest task's; the one before is open again. A copy of it: what fails later can be taken back."""
        like = self[-1]
        self._modules.clear()
        if self.earlier:
            last = copy.deepcopy(self.earlier.pop())
            unseal(last, like)
            self.add_module(str(len(self.earlier)), last)

    def __len__(self) -> int:
        return len(self.earlier) + len(self._modules)

    def __getitem__(self, task: int) -> nn.Module:
        number = task + len(self) if task < 0 else task
        if 0 <= number < len(self.earlier):
            return self.earlier[number]
        found = self._modules.get(str(number))
        if found is None:
            raise IndexError(f"no task {task} of {len(self)}")
        return found

    def __iter__(self) -> Iterator[nn.Module]:
        yield from self.earlier
        yield from self.children()

    def _apply(self, fn: Any, recurse: bool = True) -> PerTask:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module in self.earlier:
            module._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for number, module in enumerate(self.earlier):
            module.state_dict(destination=destination, prefix=f"{prefix}{number}.", keep_vars=keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given: dict[str, dict[str, Tensor]] = {}
        for key, value in state_dict.items():
            if key.startswith(prefix):
                number, _, name = key.removeprefix(prefix).partition(".")
                given.setdefault(number, {})[name] = value
        for place, module in enumerate(self.earlier):
            where = f"{prefix}{place}."
            try:
                assign = bool(local_metadata.get("assign_to_params_buffers", False))
                odd = module.load_state_dict(given.pop(str(place), {}), strict=False, assign=assign)
            except RuntimeError as error:
                error_msgs.append(f"{where}: {error}")
                continue
            missing_keys.extend(where + key for key in odd.missing_keys)
            unexpected_keys.extend(where + key for key in odd.unexpected_keys if strict)
        rest = given.keys() - self._modules.keys()
        unexpected_keys.extend(f"{prefix}{number}.{name}" for number in rest if strict for name in given[number])


_CONVOLUTIONS = (F.linear, F.conv1d, F.conv2d, F.conv3d)


class HeadPlace(nn.Module):
    """Where the heads of all tasks stand, the newest of which runs here. A convolution of one point is a head, too."""

    heads: PerTask
    index: int

    def __init__(self, plain: nn.Module, reads: Label, heads: PerTask, index: int) -> None:
        super().__init__()
        weight = plain.get_parameter("weight")
        self.reads, self.points = reads, weight.dim() - 2
        # Not as a part of its own: the network holds the heads.
        self.__dict__.update(heads=heads, index=index)

    def part(self, task: int = -1) -> nn.Linear:
        """A task's head at this place."""
        head = self.heads[task]
        part = head[self.index] if isinstance(head, nn.ModuleList) else head
        assert isinstance(part, nn.Linear)
        return part

    @property
    def weight(self) -> Tensor:
        """The newest head's, in the form that the layer had."""
        return self._formed(self.part().weight)

    @property
    def bias(self) -> Tensor:
        """The newest head's."""
        return self.part().bias

    def _formed(self, weight: Tensor) -> Tensor:
        return weight.reshape(*weight.shape, *[1] * self.points)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, as torch's layers call it
        """The newest task's scores."""
        return _CONVOLUTIONS[self.points](input, self.weight, self.bias)

    def fill(self, task: int, plain: nn.Module) -> None:
        """Put a task's head into a plain layer, whose sizes become its own."""
        part = self.part(task)
        weight = self._formed(part.weight.detach().clone())
        set_tensor(plain, "weight", weight)
        set_tensor(plain, "bias", part.bias.detach().clone())
        for name, value in remembered_sizes(plain, {"weight": tuple(weight.shape)}, {}).items():
            setattr(plain, name, value)


def places(body: nn.Module) -> Iterator[HeadPlace]:
    """The places of heads inside of a network."""
    return (module for module in body.modules() if isinstance(module, HeadPlace))


def new_head(body: nn.Module, output: Label, births: Mapping[str, Tensor], classes: int, like: Tensor) -> nn.Module:
    """A head behind all features; or for the place inside, or one for each of several."""
    labels = [place.reads for place in sorted(places(body), key=lambda place: place.index)] or [output]
    made = [nn.Linear(len(births_of(label, births)), classes, device=like.device, dtype=like.dtype) for label in labels]
    return made[0] if len(made) == 1 else nn.ModuleList(made)
