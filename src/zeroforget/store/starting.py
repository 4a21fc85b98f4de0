"""What a model starts from: fresh weights, a file of them, those in the package, or a library's."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from zeroforget import nets
from zeroforget._version import __version__
from zeroforget.axes.find import CannotGrow
from zeroforget.files.hashes import sha256
from zeroforget.growing.growth import suited_to
from zeroforget.growing.network import GrowingNetwork
from zeroforget.nets import libraries, resnet
from zeroforget.proving.adopt import split_head
from zeroforget.proving.grow import grow
from zeroforget.store.backbone import Backbone
from zeroforget.store.classifiers import IMAGENET, Classifier, Given, from_library
from zeroforget.store.errors import ModelError
from zeroforget.store.folder import MODEL, Chain
from zeroforget.store.network import empty_network, example, fresh_values
from zeroforget.store.options import Options, default_network
from zeroforget.store.schema import ModelFacts
from zeroforget.store.weights import normalization_of, read_weights
from zeroforget.store.writing import Watch

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
