"""What a model starts from: fresh weights, a file, those in the package, a library's, or a classifier in service."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zeroforget import nets
from zeroforget._version import __version__
from zeroforget.axes.find import CannotGrow
from zeroforget.files.hashes import sha256
from zeroforget.growing.growth import suited_to
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import libraries, resnet
from zeroforget.proving.grow import find_head, grow, split_head
from zeroforget.store.backbone import Backbone, Library
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import MODEL, Chain
from zeroforget.store.network import empty_network, example, fresh_values, library_network, plain_network
from zeroforget.store.options import MOST_PIXELS, Options, default_network
from zeroforget.store.schema import LEAST_STD, ModelFacts
from zeroforget.store.weights import (
    few,
    fill_from,
    hint_for_head,
    hint_for_library,
    hint_for_ours,
    needed,
    normalization_of,
    prefix_of,
    read_weights,
)
from zeroforget.store.writing import Watch

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


Normalization = tuple[tuple[float, ...], tuple[float, ...]]
FROZEN = "frozen"
"""Where a task's training tells whether the weights that the model started from stay as they are."""
SMALLEST = 32
"""Photos below so many pixels are not what the package's weights know."""


@dataclass(frozen=True)
class Start:
    """How the first task began, for all that come after it."""

    frozen: bool
    normalization: Normalization

    @staticmethod
    def of(chain: Chain | None) -> Start | None:
        """That of a model whose first task started from weights, with their own normalization."""
        if chain is None or not chain.tasks or FROZEN not in (first := chain.tasks[0]).training:
            return None
        return Start(first.training[FROZEN] is True, (first.preprocessing.mean, first.preprocessing.std))


def resolved(options: Options, chain: Chain | None, stack: ExitStack) -> Options:
    """The options with the network and the file of weights that a first task starts from. What a library fetches lies
    in a folder that is gone when `stack` is left."""
    if chain is not None and chain.tasks:
        if options.frozen is not None:
            raise ModelError("frozen counts for the first task only; this model has learned already")
        return options
    if options.weights is not None and options.network is None and chain is None:
        return replace(options, network=_network_of(options.weights, options))
    if options.weights is not None or options.pretrained is False:
        return options
    network = options.network if chain is None else chain.model.backbone.network
    if chain is not None and chain.model.weights is not None:  # its tasks were taken back
        own = resnet.is_embedded() and sha256(resnet.EMBEDDED_FILE.read_bytes()) == chain.model.weights
        return replace(options, weights=resnet.EMBEDDED_FILE) if own else options
    if options.pretrained and network is not None and libraries.is_foreign(network):
        file = Path(stack.enter_context(TemporaryDirectory())) / "weights.safetensors"
        save_file(libraries.pretrained(network), file)
        return replace(options, weights=file)
    if options.pretrained and network not in (None, resnet.EMBEDDED):
        raise ModelError(
            f"no weights of '{network}' come with zeroforget: bring a file and name it with --weights FILE "
            f"(safetensors, .pt or .pth; torchvision's names fit squeezenet). Without --network, --pretrained takes "
            f"'{resnet.EMBEDDED}' with the weights in the package"
        )
    photos = not options.gray and options.width in (None, 1.0) and (options.size or SMALLEST) >= SMALLEST
    if options.pretrained or (chain is None and network is None and photos and resnet.is_embedded()):
        if not photos:
            raise ModelError(
                f"the weights in the package are for color photos of {SMALLEST} pixels and more at full width: leave "
                "out --gray and --width, or --pretrained"
            )
        return replace(options, network=network or resnet.EMBEDDED, weights=resnet.embedded_weights())
    return options


def _network_of(weights: Path, options: Options) -> str | None:
    """The network of ours that a file's tensors are of, by their names and shapes; None leaves it to the size."""
    values, fits = read_weights(weights), dict[str, int]()
    for name in nets.names():
        shape = (1 if options.gray else 3, *nets.find(name).shape[1:])
        with suppress(ValueError, RuntimeError), torch.device("meta"):
            state = nets.build(name, shape, width=1.0 if options.width is None else options.width).state_dict()
            wanted = {key: value.shape for key, value in state.items() if value.dim() == 4}
            if wanted and all(key in values and values[key].shape == kind for key, kind in wanted.items()):
                fits[name] = len(wanted)
    if not fits and options.size is None and options.width is None:
        raise ModelError(
            f"{weights} holds the weights of no network of ours: name the one that they are of with --network, such as "
            "torchvision/resnet18 or timm/resnet18 (zeroforget networks lists ours)"
        )
    return max(fits, key=lambda name: fits[name], default=None)


def normalization(options: Options, channels: int) -> Normalization | None:
    """Of the pixels that the weights to start from were trained on: as their file tells, or ImageNet's."""
    if options.weights is None:
        return None
    mean, std = normalization_of(options.weights) or IMAGENET
    if channels == 1 and len(mean) == 3:
        return (round(sum(mean) / 3, 6),), (round(sum(std) / 3, 6),)
    return (mean, std) if len(mean) == channels else None


def size_of(options: Options, network: str, published: int) -> int:
    """Pixels of a side, where none are asked for: with weights, those that they were trained for."""
    if options.size is not None:
        return options.size
    return published if options.weights is not None and network != resnet.EMBEDDED else 64


def backbone_of(chain: Chain | None, options: Options, name: str) -> Backbone:
    """The model's own, which the options may not contradict, or a new one as the options say."""
    if chain is None:
        _no_growth(options)
        network, width = default_network(options.size or 64)
        if options.network is not None:
            network, width = options.network, 1.0
        width = width if options.width is None else options.width
        if libraries.is_foreign(network):
            libraries.find(network)
            return Backbone(network, {}, (1 if options.gray else 3, 1, 1))
        if ":" in network:
            raise ModelError(
                f"'{network}' is code of your own, which a model's folder does not hold: name a network of 'zeroforget "
                "networks' (for 'zeroforget adopt' also one of torchvision or timm), or use zeroforget.grow or "
                "zeroforget.adopt in Python, where any module will do, and net.save to keep it"
            )
        size = size_of(options, network, nets.find(network).shape[-1])
        return Backbone(
            network,
            {"width": width},
            (1 if options.gray else 3, size, size),
            align=options.align or suited_to(options.device),
        )
    if name in (task.name for task in chain.tasks):
        raise ModelError(
            f"there is a task '{name}' already, and learned tasks never change; choose another name, or learn it again "
            "as a new version, --again (again=True)"
        )
    if not chain.tasks:
        _no_growth(options)
    own = chain.model.backbone
    asked = {
        "network": (options.network, own.network),
        "width": (options.width, own.options.get("width", 1.0)),
        "size": (options.size, own.shape[1]),
        "align": (options.align, own.align),
    }
    for what, (wanted, has) in asked.items():
        if wanted is not None and wanted != has:
            raise ModelError(
                f"this model was made with {what} {has}, which cannot change; leave out {what} or make another"
            )
    kind, other = ("gray", "color") if own.shape[0] == 1 else ("color", "gray")
    if options.gray not in (None, kind == "gray"):
        raise ModelError(f"this model is for {kind} pictures, which cannot change; leave out --{other} or make another")
    if options.weights is not None and chain.tasks:
        raise ModelError("weights to start from count for the first task only; this model has learned already")
    return own


def _no_growth(options: Options) -> None:
    if options.growth is not None:
        raise ModelError(
            "growth is what a later task adds, and this is the first task of a new model: leave out --growth; --width "
            "says how wide the network begins"
        )


def library_start(options: Options) -> Classifier:
    """A library's network with the weights to start from; its head is not used."""
    assert options.network is not None
    if options.weights is None:
        raise ModelError(
            f"'{options.network}' starts from its published weights: say --pretrained, or --weights FILE where you "
            "have them; 'zeroforget adopt' takes it with its head as the first task"
        )
    if options.width not in (None, 1.0):
        raise ModelError("width is for networks of ours")
    built = libraries.beside_pretrained(options.network) if options.pretrained else {}
    given, channels = Given(options.weights, options=built), 1 if options.gray else 3
    found = from_library(given, options.network, size=options.size, channels=channels, seed=options.seed)
    return replace(found, backbone=replace(found.backbone, align=options.align or 1))


def grown_from(
    classifier: Classifier, given: Given, model: Path, made: str, seed: int, watch: Watch
) -> tuple[ModelFacts, GrowingNetwork]:
    """The growing network that a classifier is without its head, and what model.json says of it."""
    weights, backbone = sha256(given.weights.read_bytes()), classifier.backbone
    net = _grown(classifier, given, watch)
    if backbone.library is not None:
        recipe = net.axes.recipe
        library = replace(backbone.library, keep=recipe.keep, care=recipe.care, held=recipe.held)
        backbone = replace(backbone, library=library)
    program, where = f"zeroforget {__version__}", model / MODEL
    facts = ModelFacts(backbone, seed, made, program, weights, fresh_values(net))
    again = empty_network(ModelFacts.from_json(facts.to_json(), where), where)
    if replace(again.axes, unfollowed={}) != replace(net.axes, unfollowed={}):
        raise ModelError(
            "the folder would not be enough to build this network again; nothing was made. Please report this"
        )
    return facts, net


def _grown(classifier: Classifier, given: Given, watch: Watch) -> GrowingNetwork:
    backbone, net = classifier.backbone, classifier.net
    x = example(backbone)
    features = net.get_submodule("features") if backbone.library is None else split_head(net, x)[0]
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            grown = grow(features, x, keep=given.keep, unknown=given.unknown, **backbone.growing())
        except CannotGrow as error:
            raise ModelError(f"{error} (on the command line: --keep MODULE, --unknown keep)") from error
    for note in notes:
        watch.say(str(note.message))
    return grown
