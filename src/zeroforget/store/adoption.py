"""A classifier in service becomes a model's first task, from its file of weights; nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zeroforget._version import __version__
from zeroforget.core.grow import grow
from zeroforget.core.network import GrowingNetwork
from zeroforget.methods.base import TaskSpec
from zeroforget.store import files
from zeroforget.store.errors import ModelError
from zeroforget.store.facts import ModelFacts, TaskFacts, task_name
from zeroforget.store.fields import sha256
from zeroforget.store.folder import Folder
from zeroforget.store.learning import Grower, _backbone, _Learning, now
from zeroforget.store.lock import locked
from zeroforget.store.network import command, example, fresh_values, plain_network
from zeroforget.store.options import Options, Watch
from zeroforget.store.pictures import Lesson, check, lesson, list_pictures, read_pictures
from zeroforget.training import FitLog

PREFIXES = ("", "features.", "backbone.", "module.", "0.")


@dataclass(frozen=True)
class Given:
    """What is known about a classifier beside its weights."""

    weights: Path
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] | None = None
    """The names of its outputs in order; by default the names of the picture folders, sorted."""


def adopt(path: Path, pictures: Path, name: str, given: Given, options: Options, watch: Watch) -> TaskFacts:
    """Make a model whose first task is this classifier, measured on a folder of class folders."""
    name, folder = task_name(name), Folder(path)
    if folder.exists() or folder.entries():
        raise ModelError(f"{path} is there already; a classifier is adopted as the first task of a new model")
    backbone = _backbone(None, options, name)
    if len(given.mean) != backbone.shape[0] or len(given.std) != backbone.shape[0] or min(given.std) <= 0:
        raise ModelError(
            f"mean and std need {backbone.shape[0]} number(s) each, as its pictures have channels; std > 0"
        )
    decoded = read_pictures(list_pictures(pictures), backbone.shape, told=watch.decoding)
    for note in check(decoded, strict=options.strict):
        watch.say(note)
    ready = lesson(name, decoded, share=options.held_out, seed=options.seed, flip=False, shift=0)
    ready = replace(ready, preprocessing=replace(ready.preprocessing, mean=given.mean, std=given.std))
    with files.told(path):
        files.make(path)
        with locked(path, command(), wait=watch.wait, say=watch.say):
            return _Adoption(folder, given, ready, options, watch).run()


class _Adoption(_Learning):
    """Like learning a first task, but its values come from a file."""

    def __init__(self, folder: Folder, given: Given, ready: Lesson, options: Options, watch: Watch) -> None:
        self.given = given
        self.head: dict[str, Tensor] = {}
        super().__init__(folder, None, _backbone(None, options, ready.task.name), ready, options, watch)

    def _start(self) -> tuple[ModelFacts, GrowingNetwork]:
        plain, backbone = plain_network(self.backbone, self.options.seed), self.backbone
        self.head = _load(plain, self.given.weights)
        self.weights = sha256(self.given.weights.read_bytes())
        net = grow(plain, example(backbone), start=backbone.start, limit=backbone.limit, unit=backbone.unit)
        program = f"zeroforget {__version__}"
        return ModelFacts(backbone, self.options.seed, now(), program, self.weights, fresh_values(net)), net

    @torch.no_grad()
    def _train(self, grower: Grower) -> FitLog:
        grower.add_task(TaskSpec(self.ready.task.name, len(self.ready.task.classes)))
        order = _order(self.ready.task.classes, self.given.classes, len(self.head["weight"]))
        own = grower.net.heads[0]
        own.get_parameter("weight").copy_(self.head["weight"][order])
        own.get_parameter("bias").copy_(self.head["bias"][order])
        grower.net.eval()
        return FitLog(stopped="adopted as it was")


def _order(folders: Sequence[str], names: Sequence[str] | None, outputs: int) -> list[int]:
    """For each picture folder the classifier's output that means it."""
    names = list(folders) if names is None else list(names)
    if len(names) != outputs:
        raise ModelError(f"the classifier has {outputs} outputs, but there are {len(names)} names of classes")
    if sorted(names) != sorted(folders):
        odd = sorted(set(names) ^ set(folders))
        raise ModelError(f"the picture folders and the names of classes differ: '{odd[0]}' is not in both")
    return [names.index(folder) for folder in folders]


@torch.no_grad()
def _load(plain: nn.Module, path: Path) -> dict[str, Tensor]:
    """Fill the plain network from a safetensors file; the head's weight and bias, whatever their name, come back."""
    own = plain.state_dict()
    needed = [name for name in own if not name.endswith("num_batches_tracked")]
    try:
        with safe_open(path, framework="pt") as file:
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise ModelError(f"{path} is no safetensors file ({error})") from error
    missing = {p: [n for n in needed if p + n not in values] for p in PREFIXES}
    prefix = min(PREFIXES, key=lambda p: len(missing[p]))
    if missing[prefix]:
        more = f" and {len(missing[prefix]) - 1} more" if missing[prefix][1:] else ""
        raise ModelError(
            f"{path} lacks '{missing[prefix][0]}'{more}; it should hold the tensors of the network by the names that "
            "nets.build gives them, and a head"
        )
    for name, tensor in own.items():
        if prefix + name in values:
            value = values.pop(prefix + name)
            if value.shape != tensor.shape:
                found, has = tuple(value.shape), tuple(tensor.shape)
                raise ModelError(f"{path}: '{name}' is {found}, but the network has {has}; is the width the same?")
            tensor.copy_(value)
    return _head(values, path)


def _head(rest: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    weights = [name for name, value in rest.items() if name.endswith("weight") and value.dim() == 2]
    if len(weights) != 1:
        raise ModelError(
            f"{path} should hold one linear layer beside the network, its head (such as 'head.weight' and "
            f"'head.bias'); there {'are ' + str(len(weights)) if weights else 'is none'}"
        )
    weight = rest[weights[0]]
    bias = rest.get(weights[0].removesuffix("weight") + "bias", torch.zeros(len(weight)))
    return {"weight": weight, "bias": bias}
