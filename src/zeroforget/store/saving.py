"""Any growing network of one input becomes a model in a folder, with its proofs; the code that built it is named."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget._version import __version__
from zeroforget.files import atomic
from zeroforget.files.hashes import sha256
from zeroforget.growing.dense import each_dense
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import own_code
from zeroforget.store import task_guess
from zeroforget.store.backbone import Backbone, Library
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import BORN, MODEL, PROBE, SPREAD, TASK, Chain, Folder, as_path
from zeroforget.store.learning import PROBES, now
from zeroforget.store.names import task_name
from zeroforget.store.network import environment, fresh_values, operations, preparation, probe_logits, prove
from zeroforget.store.schema import (
    VALUES,
    Calibration,
    DataFacts,
    ModelFacts,
    Preprocessing,
    TaskFacts,
    text_of,
)
from zeroforget.store.tensors import born
from zeroforget.store.writing import Watch, changing
from zeroforget.training.seeding import generator


def save(
    net: GrowingNetwork,
    path: str | os.PathLike[str],
    *,
    build: str,
    options: Mapping[str, Any] | None = None,
    head: str = "",
    inputs: Tensor | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Path:
    """Put a growing network with its tasks into a new folder, with a proof of each; also `net.save("garden", ...)`.

    The folder holds weights and names, no code. Who opens it names `build` as trusted, and it is imported and called:
    `zeroforget.open("garden", trust="package.module:function")`. No accuracy is recorded: nobody measured it here.

    Args:
        build: `package.module:function`, which makes the network as it was given to `grow`.
        options: its keyword arguments: numbers, words, lists of numbers.
        head: of what `adopt` took, the path of the last linear layer.
        inputs: a few inputs that prove the answers; by default drawn ones.
        mean, std: if inputs are pictures: of their channels, from 0 to 1. `predict` and `learn` then take pictures.
    """
    if not net.history:
        raise ModelError("the network has no task yet, and its weights are kept with the first: fit it before")
    if net.takes_several:
        raise ModelError("a network of several inputs cannot be kept in a folder; torch.save keeps it")
    if net.inside:
        raise ModelError(
            "a network that goes on with its heads' scores cannot be kept in a folder; torch.save keeps it"
        )
    folder = Folder(as_path(path))
    folder.check_place()
    if folder.exists() or folder.entries():
        raise ModelError(f"{folder.path} holds a model already; name a folder that is new")
    own_code.build(f"{own_code.CODE}/{own_code.trust(build)}", **(options or {}))  # what is wrong with it is told first
    saving = _Saving(net, folder, _backbone(net, build, options or {}, head), inputs, mean, std)
    with changing(folder, Watch()):
        saving.write()
    return folder.path


def _backbone(net: GrowingNetwork, build: str, options: Mapping[str, Any], head: str) -> Backbone:
    limits, recipe = net.limits, net.axes.recipe
    code = Library(own_code.CODE, "1", head, recipe.keep, recipe.care, recipe.held)
    return Backbone(
        f"{own_code.CODE}/{build}", dict(options), _as_pictures(net.shape), net.start, limits.limit, limits.unit,
        limits.align, net.fn, net.bridge, code,
    )  # fmt: skip


def _as_pictures(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """What the type of a backbone says; of own code it may be any."""
    return shape  # type: ignore[return-value]


class _Saving:
    """A network on its way into a folder."""

    def __init__(
        self,
        net: GrowingNetwork,
        folder: Folder,
        backbone: Backbone,
        inputs: Tensor | None,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
    ) -> None:
        self.net, self.folder, self.backbone = net, folder, backbone
        shape, pictures = net.shape, mean is not None and std is not None
        if pictures and (len(shape) != 3 or shape[0] not in {1, 3}):
            raise ModelError(f"mean and std are of pictures with 1 or 3 channels; the network takes {shape}")
        if pictures:
            mode, size = "RGB" if shape[0] == 3 else "L", shape[1:]
            self.about = Preprocessing(mode, size, tuple(map(float, mean or ())), tuple(map(float, std or ())))
        else:
            self.about = Preprocessing(VALUES, shape, (0.0,), (1.0,))
        if inputs is None:
            drawn = generator("drawn")
            inputs = torch.randn(PROBES, *shape, generator=drawn)
            if pictures:
                inputs = torch.randint(256, (PROBES, *shape), generator=drawn).byte()
        wanted = torch.uint8 if pictures else torch.float32
        if inputs.dtype != wanted or tuple(inputs.shape[1:]) != shape or not len(inputs):
            found = f"{inputs.dtype} of {tuple(inputs.shape)}"
            raise ModelError(f"inputs are {wanted} of (some, {', '.join(map(str, shape))}), not {found}")
        self.inputs = inputs[:PROBES].cpu().contiguous()

    def write(self) -> None:
        """All tasks, proved as read back, before the folder has a model."""
        facts = ModelFacts(self.backbone, 0, now(), f"zeroforget {__version__}", None, fresh_values(self.net))
        content = text_of(facts, self.folder.path / MODEL)
        chain, head, tasks = Chain(facts, sha256(content), ()), sha256(content), []
        for number, dense in enumerate(each_dense(self.net)):
            made = self._task(number, dense, head)
            head = made[0].hash
            tasks.append(made)
        try:
            prove(self.folder, chain, tasks)
        except ModelError as error:
            raise ModelError(f"{self.backbone.network[5:]} does not build this network again: {error}") from error
        self.folder.create(content)
        for task, aside in tasks:
            self.folder.commit(aside, task.folder)

    @torch.no_grad()
    def _task(self, number: int, dense: nn.Module, before: str) -> tuple[TaskFacts, Path]:
        record, net = self.net.history[number], self.net
        classes = record.names or tuple(str(place) for place in range(record.classes))
        name, widths = task_name(record.name), net.widths(number)
        older = net.widths(number - 1) if number else dict.fromkeys(widths, 0)
        images, dense = self.inputs, dense.to("cpu")
        logits = probe_logits(dense, images, self.about)
        values = dense.get_submodule("features")(preparation(self.about).test(images)).double()
        spread = task_guess.spread(values, torch.zeros(len(values), dtype=torch.int64), 1)
        tensors = {key: value.cpu() for key, value in born(net, number).items()}
        facts = TaskFacts(
            number=number + 1, name=name, before=before, learned=now(), program=f"zeroforget {__version__}",
            classes=classes, growth=record.growth, rank=record.rank,
            born={axis: width - older[axis] for axis, width in widths.items()},
            weights=sum(value.numel() for value in tensors.values()), operations=operations(dense, net.shape),
            preprocessing=self.about, accuracy=0.0,
            data=DataFacts(sha256(images.numpy().tobytes()), (0,) * len(classes), 0, 0, 1.0, 0),
            training={"stopped": "saved as it was"},
            calibration=Calibration(1.0, task_guess.quantiles(task_guess.distance(values, spread))),
            network=net.fingerprint(number), probe=sha256(logits.numpy().tobytes()),
            environment=environment(self.backbone), files={},
        )  # fmt: skip
        aside = self.folder.aside(facts.folder)
        contents = {BORN: tensors, PROBE: {"images": images, "logits": logits}, SPREAD: spread}
        files = {file: self.folder.write_tensors(aside, file, held) for file, held in contents.items()}
        content = text_of(replace(facts, files=files), aside / TASK)
        atomic.write_new(aside / TASK, content)
        return replace(facts, files=files, hash=sha256(content)), aside
