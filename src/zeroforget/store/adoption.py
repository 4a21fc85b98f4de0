"""A classifier in service becomes a model's first task, from its file of weights; nothing is trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from zeroforget.data import Preparation, Split, Task
from zeroforget.files.text import composed
from zeroforget.growing.network import GrowingNetwork
from zeroforget.methods.base import TaskSpec
from zeroforget.methods.tfm import Tfm
from zeroforget.nets import libraries
from zeroforget.proving.trial_networks import in_service
from zeroforget.store import task_guess
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import SPREAD, Folder
from zeroforget.store.learning import PROBES, Learning, now
from zeroforget.store.names import task_name
from zeroforget.store.network import example, preparation
from zeroforget.store.options import Options
from zeroforget.store.pictures import Lesson, check, check_apart, lesson, list_pictures, pixels, read_pictures
from zeroforget.store.schema import Calibration, DataFacts, ModelFacts, Preprocessing, TaskFacts
from zeroforget.store.starting import Classifier, Given, backbone_of, from_library, grown_from, ours
from zeroforget.store.weights import few
from zeroforget.store.writing import Watch, changing
from zeroforget.training import FitLog
from zeroforget.training.seeding import generator

__all__ = ["Given", "adopt", "doubt", "imagenet"]


def adopt(path: Path, pictures: Path | None, name: str, given: Given, options: Options, watch: Watch) -> TaskFacts:
    """Make a model whose first task is this classifier, measured on a folder of class folders.

    Without pictures its classes come from `given`, it is not measured, and drawn pictures prove its answers.
    """
    name, folder = task_name(name), Folder(path)
    if pictures is not None:
        check_apart(path, pictures)
    _check_new(folder)
    classifier, ready = _measurable(pictures, name, given, options, watch) if pictures else _drawn(name, given, options)
    adoption = _Adoption(folder, given, classifier, ready, options, watch)
    net, log = adoption.learn()  # whatever may be refused is refused here, before there is a folder
    with changing(folder, watch):
        _check_new(folder)
        return adoption.write(net, log)


def _measurable(pictures: Path, name: str, given: Given, options: Options, watch: Watch) -> tuple[Classifier, Lesson]:
    """The classifier with its outputs in the order of the picture folders, and these pictures."""
    listing = list_pictures(pictures)
    classifier = _classifier(given, options, name)
    order = _order(listing.classes, given.classes, classifier.linear.out_features)
    decoded = read_pictures(listing, classifier.backbone.shape, told=watch.decoding)
    for note in check(decoded, strict=options.strict, unreadable=options.unreadable):
        watch.say(note)
    about = (classifier.mean, classifier.std)
    ready = lesson(name, decoded, share=options.held_out, seed=options.seed, flip=False, shift=0, normalized=about)
    return _ordered(classifier, order), ready


def _drawn(name: str, given: Given, options: Options) -> tuple[Classifier, Lesson]:
    """The classifier as it is, and smooth noise to prove it by."""
    if given.classes is None:
        raise ModelError(
            "without pictures nobody knows what its outputs mean: name them with --classes FILE, a line each, or with "
            "--classes imagenet"
        )
    classifier = _classifier(given, options, name)
    outputs, classes = classifier.linear.out_features, tuple(composed(one) for one in given.classes)
    if len(classes) != outputs:
        raise ModelError(f"the classifier has {outputs} outputs, but {len(classes)} names of classes are given")
    if twice := sorted(one for one in set(classes) if classes.count(one) > 1):
        raise ModelError(f"two outputs have the name '{twice[0]}'; every class needs a name of its own")
    channels, height, width = classifier.backbone.shape
    coarse = torch.rand(PROBES, channels, 8, 8, generator=generator("drawn", options.seed))
    images = (255 * nn.functional.interpolate(coarse, (height, width), mode="bilinear")).round().byte()
    part = Split(images, torch.arange(PROBES) % outputs)
    mean, std = classifier.mean, classifier.std
    about = Preprocessing("RGB" if channels == 3 else "L", (height, width), mean, std)
    data = DataFacts(pixels(part), (0,) * outputs, 0, 0, 1.0, options.seed)
    return classifier, Lesson(Task(name, classes, part, part, part, Preparation(mean, std)), about, data)


def doubt(facts: TaskFacts, names: Sequence[str] | None = None) -> str | None:
    """What may be wrong with a classifier that is seldom right, or None; `names` are those of its outputs, if given."""
    if not facts.measured:
        return None
    by_chance = no_better(facts)
    if by_chance is None and facts.accuracy >= 0.5:
        return None
    low = f"only {100 * facts.accuracy:.1f} % of {facts.data.held_out} pictures are right"
    if by_chance is not None:
        low += f", {by_chance}"
    about = facts.preprocessing
    mean, std = (",".join(f"{number:g}" for number in numbers) for numbers in (about.mean, about.std))
    order = few(names or facts.classes)
    return (
        f"{low}. If it should do better, look at the order of its classes (taken as {order}; --classes "
        f"tells another), at --mean {mean} and --std {std}, and whether these are pictures of its classes; then remove "
        "the folder and adopt it again"
    )


def imagenet() -> tuple[str, ...]:
    """The names of ImageNet's thousand classes, as a library that is installed here has them."""
    try:
        return libraries.imagenet()
    except ValueError as error:
        raise ModelError(
            f"--classes imagenet takes the names from torchvision or timm, and {error}: "
            "pip install 'zeroforget[vision]', or name a file with a class on each line"
        ) from error


def no_better(facts: TaskFacts) -> str | None:
    """Words for an accuracy that one and the same answer to everything might have had, or None."""
    guess = max(facts.data.counts) / sum(facts.data.counts)
    surely = guess + 2 * math.sqrt(guess * (1 - guess) / facts.data.held_out)
    if facts.accuracy == 1 or facts.accuracy > surely:
        return None
    return f"not clearly better than to answer always the same ({100 * guess:.1f} %)"


def _check_new(folder: Folder) -> None:
    folder.check_place()
    if folder.exists() or folder.entries():
        raise ModelError(f"{folder.path} is there already; a classifier is adopted as the first task of a new model")


def _classifier(given: Given, options: Options, name: str) -> Classifier:
    if options.network is not None and libraries.is_foreign(options.network):
        if options.width not in (None, 1.0):
            raise ModelError("width is for networks of ours; what a library's was built with is said by --set")
        channels = 1 if options.gray else 3
        found = from_library(given, options.network, size=options.size, channels=channels, seed=options.seed)
        return replace(found, backbone=replace(found.backbone, align=options.align or 1))
    if given.options:
        raise ModelError("--set is for networks of torchvision and timm; ours have --width")
    return ours(given, backbone_of(None, options, name), options.seed)


class _Adoption(Learning):
    """Like learning a first task, but its values come from a classifier whose outputs are in the task's order."""

    def __init__(
        self, folder: Folder, given: Given, classifier: Classifier, ready: Lesson, options: Options, watch: Watch
    ) -> None:
        self.given, self.classifier = given, classifier
        super().__init__(folder, None, classifier.backbone, ready, options, watch)

    def _start(self) -> tuple[ModelFacts, GrowingNetwork]:
        model, net = grown_from(self.classifier, self.given, self.folder.path, now(), self.options.seed, self.watch)
        self.weights, self.backbone = model.weights, model.backbone
        return model, net

    @torch.no_grad()
    def _train(self, grower: Tfm) -> FitLog:
        grower.add_task(TaskSpec(self.ready.task.name, len(self.ready.task.classes)))
        own, head = grower.net.heads[0], self.classifier.linear
        own.get_parameter("weight").copy_(head.weight)
        own.get_parameter("bias").zero_()
        if head.bias is not None:
            own.get_parameter("bias").copy_(head.bias)
        grower.net.eval()
        x = example(self.backbone)
        with in_service(self.classifier.net):
            if not torch.equal(self.classifier.net(x), grower.net(x, 0)):
                raise ModelError("the model would not answer as the classifier does; nothing was made")
        return FitLog(stopped="adopted as it was")

    def _measure(self, dense: nn.Module, facts: TaskFacts, aside: Path) -> TaskFacts:
        """As for any task; without pictures, how the features of noise are spread, which no guess goes by."""
        if facts.measured:
            return super()._measure(dense, facts, aside)
        part, prepare = self.ready.task.test, preparation(facts.preprocessing)
        values = task_guess.features(dense, part, prepare)
        about = task_guess.spread(values, torch.zeros(len(part), dtype=torch.int64), 1)
        far = task_guess.quantiles(task_guess.distance(values, about))
        written = {**facts.files, SPREAD: self.folder.write_tensors(aside, SPREAD, about)}
        return replace(facts, calibration=Calibration(1.0, far), files=written)


def _order(folders: Sequence[str], names: Sequence[str] | None, outputs: int) -> list[int]:
    """For each picture folder the classifier's output that means it."""
    names = [composed(name) for name in (folders if names is None else names)]
    if len(names) != outputs:
        raise ModelError(
            f"the classifier has {outputs} outputs, but there are {len(names)} names of classes ({few(names)}); give "
            "pictures with a folder for each output, and with --classes a name for each"
        )
    if sorted(names) != sorted(folders):
        odd = sorted(set(names) ^ set(folders)) or sorted(name for name in names if names.count(name) > 1)
        raise ModelError(
            f"the picture folders ({few(folders)}) and the names of classes ({few(names)}) differ: '{odd[0]}' is not "
            "once in both"
        )
    return [names.index(folder) for folder in folders]


@torch.no_grad()
def _ordered(classifier: Classifier, order: list[int]) -> Classifier:
    """The same with its outputs in the order of the task's classes."""
    net = copy.deepcopy(classifier.net)
    head = net.get_submodule(classifier.head)
    for name, value in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(value[order].clone(), requires_grad=False))
    return replace(classifier, net=net)
