"""Classifiers of torchvision and timm by name ('torchvision/resnet50'); weights come only when asked for."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

LIBRARIES = ("torchvision", "timm")
_NAME = re.compile(r"\w+(\.\w+)?", re.ASCII)
_FETCHES = re.compile(r"pretrained|weights|checkpoint|cache|progress|^features_only$")
_HARMLESS = ("init_weights",)
_AUXILIARY = ("googlenet", "inception_v3")
"""Networks of torchvision with classifiers at their sides, which only their own training used."""
SIDES = ("aux1.", "aux2.", "AuxLogits.")
"""How the names of their tensors begin."""


class NoLibrary(ValueError):
    """A network comes from a library that cannot be imported here."""


def is_foreign(name: str) -> bool:
    """Whether a network's name is one of a library, such as 'timm/convnext_tiny'."""
    return "/" in name


def library_of(name: str) -> str:
    """The library that a network's name begins with. ValueError if there is none like it."""
    library = name.partition("/")[0]
    if library not in LIBRARIES:
        raise ValueError(f"no library '{library}' to take '{name}' from; there are {' and '.join(LIBRARIES)}")
    return library


def version(library: str) -> str:
    """The library's version, as it is installed here; what it was compiled for ('+cpu') changes no network."""
    found = getattr(_import(library), "__version__", None)
    return str(found or metadata.version(library)).partition("+")[0]


def find(name: str) -> tuple[str, str]:
    """Library and model; a misspelling is an error that names the nearest ones."""
    library, model = library_of(name), name.partition("/")[2]
    known = _names(library)
    if not _NAME.fullmatch(model) or model.partition(".")[0] not in known:
        near = difflib.get_close_matches(model, known, n=3)
        hint = f"; near names are {', '.join(near)}" if near else ""
        raise ValueError(f"{library} {version(library)} has no classifier '{model}'{hint}")
    return library, model


def build(name: str, **options: Any) -> nn.Module:
    """A classifier with fresh values. The options are those of the library's own constructor."""
    from torch import nn

    library, model = find(name)
    check_options(options)
    if library == "torchvision" and model in _AUXILIARY:
        options = {"aux_logits": False, "init_weights": False} | options
    module = _import(library)
    try:
        if library == "timm":
            made = module.create_model(model, pretrained=False, **options)
        else:
            made = module.models.get_model(model, weights=None, **options)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ValueError(
            f"{library} {version(library)} cannot build '{model}' with {given or 'no option'} ({error})"
        ) from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"{library} made no module of '{model}'")
    return made


def beside_pretrained(name: str) -> dict[str, Any]:
    """Options, beside its defaults, that the library builds a network with where it fills it with published weights."""
    library, model = find(name)
    return {"transform_input": True} if library == "torchvision" and model in _AUXILIARY else {}


def pretrained(name: str) -> dict[str, Tensor]:
    """The published weights of a network, from the library's own cache or fetched into it by the library."""
    library, model = find(name)
    module = _import(library)
    try:
        if library == "timm":
            made = module.create_model(model, pretrained=True)
        else:
            made = module.models.get_model(model, weights="DEFAULT")
    except Exception as error:  # whatever a library and the network between do not manage
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the weights of '{name}' cannot be had here ({why}). Where there is a network, bring the file: "
            f"{_published_at(library, model)}; then name it with --weights FILE"
        ) from error
    return {key: value.detach().contiguous().clone() for key, value in made.state_dict().items()}


def _published_at(library: str, model: str) -> str:
    """Which file holds a network's published weights, and where the library would look for it."""
    import torch

    try:
        if library == "timm":
            place = _import(library).get_pretrained_cfg(model).hf_hub_id or f"timm/{model}"
            return f"model.safetensors of '{place}' on the Hugging Face hub"
        url = str(_import(library).models.get_model_weights(model).DEFAULT.url)
        return f"{url.rpartition('/')[2]} (which torchvision keeps in {torch.hub.get_dir()}/checkpoints)"
    except Exception:
        return f"the one that {library} publishes for it"


def imagenet() -> tuple[str, ...]:
    """The names of ImageNet's thousand classes, in their order, from torchvision, else timm. NoLibrary without both."""
    try:
        found = _import("torchvision").models.get_model_weights("resnet50").DEFAULT.meta["categories"]
    except NoLibrary:
        try:
            info = _import("timm.data").ImageNetInfo()
        except NoLibrary as error:
            raise NoLibrary("neither of them can be imported here") from error
        found = [info.index_to_description(place) for place in range(info.num_classes())]
    names = [str(name) for name in found]
    return tuple(name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names))


def check_options(options: Mapping[str, Any]) -> None:
    """Plain values, and nothing may be fetched or read while a network is built. ValueError names what is wrong."""
    for key, value in options.items():
        if key not in _HARMLESS and _FETCHES.search(key):
            raise ValueError(f"option '{key}' is not for building a network; its values come from the file of weights")
        many = value if isinstance(value, (list, tuple)) else [value]
        if not key.isidentifier() or len(many) > 64 or not all(_plain(one, alone=many is not value) for one in many):
            raise ValueError(f"option '{key}' must be a number, true or false, a word, or a list of numbers")


def _plain(value: object, *, alone: bool) -> bool:
    if isinstance(value, str):
        return alone and len(value) <= 128
    return isinstance(value, (bool, int, float)) and abs(value) < 2**31


def suggested(name: str, options: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Options to try in turn, beside those given: as it comes, then told the size of its images."""
    told = "img_size" if library_of(name) == "timm" else "image_size"
    return [dict(options)] + ([] if told in options else [{**options, told: size}])


def published(name: str, net: nn.Module) -> dict[str, Any]:
    """What the library says about a network's images: `input_size`, `mean`, `std`; nothing where it does not."""
    library, _, model = name.partition("/")
    if library != "torchvision":
        found = getattr(net, "pretrained_cfg", None)
        return dict(found) if isinstance(found, Mapping) else {}
    try:
        told = _import(library).models.get_model_weights(model).DEFAULT.transforms()
        return {"input_size": (3, *2 * [int(told.crop_size[0])]), "mean": tuple(told.mean), "std": tuple(told.std)}
    except Exception:  # not every network has published weights, and not every version tells of them
        return {}


def _names(library: str) -> list[str]:
    module = _import(library)
    return list(module.list_models() if library == "timm" else module.models.list_models(module=module.models))


def _import(library: str) -> Any:
    try:
        if library == "torchvision":
            importlib.import_module("torchvision.models")
        return importlib.import_module(library)
    except Exception as error:  # one that does not fit torch fails in many ways
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, ModuleNotFoundError) and "." not in (error.name or "."):
            what = f"cannot be imported here ({why}); pip install {library}"
        else:
            what = f"is installed but broken ({why}); install builds of torch and torchvision that belong together"
        raise NoLibrary(f"this network comes from {library}, which {what}") from error
