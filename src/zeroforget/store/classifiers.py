"""A classifier in service, built again from the name of its architecture and its file of weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroforget.axes.find import CannotGrow
from zeroforget.nets import libraries
from zeroforget.proving.adopt import find_head
from zeroforget.store.backbone import Backbone, Library
from zeroforget.store.errors import ModelError
from zeroforget.store.network import example, library_network, plain_network
from zeroforget.store.options import MOST_PIXELS
from zeroforget.store.schema import LEAST_STD
from zeroforget.store.weights import (
    few,
    fill_from,
    hint_for_head,
    hint_for_library,
    hint_for_ours,
    needed,
    prefix_of,
    read_weights,
)

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of its pixels, from 0 to 1."""
FAR = 1e6
"""No mean or standard deviation of pixels is as large."""
ERRORS = (ValueError, RuntimeError, AssertionError, TypeError, IndexError)
"""What a network may raise on images that it does not take."""


@dataclass(frozen=True)
class Given:
    """What is known about a classifier."""

    weights: Path
    mean: tuple[float, ...] | None = None
    """What it subtracts from pixels, for each channel; by default what its library says, or ImageNet's.
    Of these, a gray picture has the mean."""
    std: tuple[float, ...] | None = None
    classes: tuple[str, ...] | None = None
    """The names of its outputs in order; by default the names of the picture folders, sorted."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of a library's network: what it was built with, where its weights do not tell."""
    keep: tuple[str, ...] = ()
    """Modules whose features shall not grow."""
    unknown: str = "refuse"
    """What to do about features that cannot be followed: "refuse" the network, or "keep" them as they are."""

    def __post_init__(self) -> None:
        _check_normalization(self.mean or (), self.std or ())


@dataclass(frozen=True)
class Classifier:
    """A network with its values and its head, in service."""

    net: nn.Module
    head: str
    """The path of its last linear layer."""
    backbone: Backbone
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def linear(self) -> nn.Linear:
        """Its head."""
        layer = self.net.get_submodule(self.head)
        assert isinstance(layer, nn.Linear)
        return layer


def ours(given: Given, backbone: Backbone, seed: int) -> Classifier:
    """A network of ours; the head has whatever name in the file."""
    plain, path = plain_network(backbone, seed), given.weights
    values = read_weights(path)
    prefix = prefix_of(values, needed(plain), path, f"'{backbone.network}' and a head")
    rest = fill_from(plain, values, prefix, path, lambda: hint_for_ours(backbone, values, prefix))
    with torch.no_grad():
        features = plain.eval()(example(backbone)).shape[1]
    head = _head(rest, features, path)
    whole = nn.Sequential(OrderedDict(features=plain, head=head))
    return _in_service(whole, "head", backbone, given)


def from_library(given: Given, name: str, *, size: int | None, channels: int, seed: int) -> Classifier:
    """A network of torchvision or timm. What its weights tell of how it was built need not be said."""
    options = dict(given.options)
    if channels != 3:
        if libraries.library_of(name) != "timm":
            raise ModelError(f"the networks of {libraries.library_of(name)} take color pictures; leave out --gray")
        options["in_chans"] = channels
    libraries.check_options(options)
    values = read_weights(given.weights)
    if size is None:
        about = libraries.published(name, library_network(name, options, seed))
        size = min(MOST_PIXELS, int(about.get("input_size", (3, 224, 224))[-1]))
    problem: Exception | None = None
    for tried in libraries.suggested(name, options, size):
        backbone = Backbone(name, tried, (channels, size, size))
        try:
            return _fitted(given, backbone, values, seed)
        except (libraries.NoLibrary, CannotGrow):
            raise
        except ERRORS as error:
            if problem is None or (isinstance(error, ModelError) and not isinstance(problem, ValueError)):
                problem = error  # that a tensor does not fit says more than that the network does not run
    assert problem is not None
    if isinstance(problem, ValueError):
        raise problem
    raise ModelError(f"{name} does not run on {size}×{size} pictures ({problem}); give its own --size") from problem


def _fitted(given: Given, backbone: Backbone, values: Mapping[str, Tensor], seed: int) -> Classifier:
    """The network built with these options, and with as many classes as its weights have, filled."""
    name, options, path = backbone.network, dict(backbone.options), given.weights
    library = libraries.library_of(name)
    net = library_network(name, options, seed)
    head, _ = find_head(net, example(backbone))
    prefix = prefix_of(values, needed(net), path, name)
    rows = values[f"{prefix}{head}.weight"]
    if "num_classes" not in options and rows.dim() == 2 and len(rows) != len(net.get_submodule(head).weight):  # type: ignore[arg-type]
        options["num_classes"] = len(rows)
        net = library_network(name, options, seed)
    rest = fill_from(net, values, prefix, path, lambda: hint_for_library(backbone, net, head, values, prefix))
    if odd := [key for key, value in rest.items() if not _needless(net, key.removeprefix(prefix), value)]:
        raise ModelError(
            f"{path} holds '{odd[0]}', which {name} has no place for; was it built with other options "
            "(--set KEY=VALUE), or is it another network?"
        )
    made = Library(library, libraries.version(library), head)
    return _in_service(net, head, replace(backbone, options=options, library=made), given)


def _needless(net: nn.Module, name: str, value: Tensor) -> bool:
    """A tensor that the network has by itself, or a classifier at its side that only its training used."""
    own = dict(net.named_buffers()).get(name)
    if own is not None and own.shape == value.shape:
        return torch.equal(own, value.to(own.dtype))
    return name.startswith(libraries.SIDES)


def _head(rest: Mapping[str, Tensor], features: int, path: Path) -> nn.Linear:
    """The linear layer that a file holds beside a network of so many features."""
    weights = [name for name, value in rest.items() if name.endswith("weight") and value.dim() == 2]
    if not weights and any(value.dim() == 4 and value.shape[2:] == (1, 1) for value in rest.values()):
        raise ModelError(
            f"{path} ends in a convolution ({few(list(rest))}), as SqueezeNet does, and not in a linear layer: no head "
            "of ours gives its scores. 'zeroforget learn --weights' starts from its features without that head"
        )
    if len(weights) != 1:
        raise ModelError(
            f"{path} should hold one linear layer beside the network, its head (such as 'head.weight' and "
            f"'head.bias'); {_found(weights, rest)}"
        )
    weight, prefix = rest[weights[0]], weights[0].removesuffix("weight")
    head = nn.Linear(features, len(weight))
    none = {f"{prefix}bias": torch.zeros(len(weight))}
    fill_from(head, none | dict(rest), prefix, path, lambda: _no_head(weight, features))
    return head


def _no_head(weight: Tensor, features: int) -> str:
    if weight.shape[1] == features:
        return f"its weight has {len(weight)} classes, so the bias must have as many numbers"
    return hint_for_head(len(weight), weight.shape[1], features)


def _found(weights: Sequence[str], rest: Mapping[str, Tensor]) -> str:
    if weights:
        return f"it holds {len(weights)}: {few(weights)}. Save the one that writes the class scores alone"
    shown = [f"{name} {tuple(value.shape)}" for name, value in rest.items()]
    return f"beside the network it holds {few(shown)}. Save the whole classifier, with its head"


def _in_service(net: nn.Module, head: str, backbone: Backbone, given: Given) -> Classifier:
    channels, about = backbone.shape[0], libraries.published(backbone.network, net)
    mean, std = (
        own if own is not None else _usual(about.get(key, usual), channels)
        for own, key, usual in ((given.mean, "mean", IMAGENET[0]), (given.std, "std", IMAGENET[1]))
    )
    if len(mean) != channels or len(std) != channels:
        kind = "gray pictures have 1 channel" if channels == 1 else "color pictures have 3 channels"
        raise ModelError(
            f"mean and std need {channels} number(s) each, because {kind}; there are {len(mean)} and {len(std)}"
        )
    _check_normalization(mean, std)
    if not torch.isfinite(net.requires_grad_(False).eval()(example(backbone))).all():
        raise ModelError(
            f"{given.weights}: with these weights the network answers NaN or infinite numbers to noise; they are too "
            "large, or its training diverged. Take weights from before that"
        )
    return Classifier(net, head, backbone, tuple(map(float, mean)), tuple(map(float, std)))


def _check_normalization(mean: Sequence[float], std: Sequence[float]) -> None:
    if not all(abs(number) <= FAR for number in mean) or not all(LEAST_STD <= number <= FAR for number in std):
        raise ModelError(
            f"mean and std are of pixels from 0 to 1: mean is from {-FAR:g} to {FAR:g}, std from {LEAST_STD:g} to "
            f"{FAR:g}; got {', '.join(f'{number:g}' for number in (*mean, *std))}"
        )


def _usual(numbers: Sequence[float], channels: int) -> tuple[float, ...]:
    """What is published for each channel; for gray pictures, whose one channel is a mixture of three, their mean."""
    own = tuple(float(number) for number in numbers)
    return (round(sum(own) / len(own), 6),) if channels == 1 and own else own
