"""A file's tensors have other shapes than the network that was asked for: which choice was another one for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from zeroforget import nets
from zeroforget.nets import libraries
from zeroforget.store.backbone import Backbone
from zeroforget.store.weights import needed

USUAL_SIZES = (8, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 84, 96, 112, 128, 144, 160, 176, 192, 224, 256)
"""Pixels of a side that are tried, to tell for which pictures weights were made."""
_PLACES = ("pos_embed", "pos_embedding", "relative_position")
"""In the names of tensors that have a value for each place in a picture."""

Shapes = dict[str, tuple[int, ...]]


def of_ours(backbone: Backbone, values: Mapping[str, Tensor], prefix: str) -> str:
    """What to do about weights that do not fit a network of ours, found by building it otherwise."""
    asked = _shapes(backbone)
    if asked is None:
        return _another(backbone)
    found = {name: tuple(values[prefix + name].shape) for name in asked}
    channels, (known, width) = _channels(found), _width(backbone, found)
    if channels is None or not known:
        return _another(backbone)
    if channels not in (1, 3):
        return f"its pictures had {channels} channels, and only 1 (--gray) or 3 can be used; train it on such ones"
    made = replace(backbone, shape=(channels, *backbone.shape[1:]), options={"width": width})
    differs = _differences(backbone, channels, width)
    left = [name for name, shape in (_shapes(made) or {}).items() if found[name] != shape]
    if any(len(found[name]) != 2 for name in left):  # the size of pictures shows only behind a flatten
        return _another(backbone)
    if left:
        shown = " or ".join(f"--size {size}" for size in _sizes(made, found)) or "their --size"
        differs.append(f"its pictures were of another size than {backbone.shape[1]}×{backbone.shape[2]}: give {shown}")
    return "; ".join(differs) or _another(backbone)


def _differences(backbone: Backbone, channels: int, width: float) -> list[str]:
    out = []
    if channels != backbone.shape[0]:
        gray = channels == 1
        out.append(
            f"its pictures were {'gray, with 1 channel' if gray else 'in color, with 3 channels'}: "
            f"{'give' if gray else 'leave out'} --gray"
        )
    if width != (asked := backbone.options.get("width", 1.0)):
        out.append(f"its width is {width:g}, not {asked:g}: give --width {width:g}")
    return out


def _another(backbone: Backbone) -> str:
    return (
        f"no --width, --size or --gray makes them fit '{backbone.network}'; are they of another --network "
        "(zeroforget networks lists ours), or was a layer changed?"
    )


def _shapes(backbone: Backbone) -> Shapes | None:
    """The shapes of a network's tensors, without making them; None if there is no such network."""
    with contextlib.suppress(ValueError, RuntimeError), torch.device("meta"):
        net = nets.build(backbone.network, backbone.shape, **backbone.options)
        state = net.state_dict()
        return {name: tuple(state[name].shape) for name in needed(net)}
    return None


def _channels(found: Shapes) -> int | None:
    """Of the first convolution, the one that reads pictures."""
    return next((shape[1] for shape in found.values() if len(shape) == 4), None)


def _width(backbone: Backbone, found: Shapes) -> tuple[bool, float]:
    """The width at which every layer has as many outputs as in the file, as short a number as will do."""
    for width in _widths(backbone, found):
        shapes = _shapes(replace(backbone, options={"width": width}))
        if shapes is not None and _outputs(shapes) == _outputs(found):
            return True, width
    return False, 1.0


def _widths(backbone: Backbone, found: Shapes) -> Iterator[float]:
    yield backbone.options.get("width", 1.0)
    full = _shapes(replace(backbone, options={"width": 1.0}))
    if full is None:
        return
    widest = max(full, key=lambda name: full[name][0])
    share = (found[widest] or (0,))[0] / full[widest][0]
    yield from (round(share, digits) for digits in range(1, 6) if 0 < round(share, digits) <= 16)


def _outputs(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Shapes without the number of inputs, which depends on the pictures too."""
    return {name: (*shape[:1], *shape[2:]) for name, shape in shapes.items()}


def _sizes(made: Backbone, found: Shapes) -> list[int]:
    """The usual sizes of pictures for which a network has exactly these shapes."""
    return [size for size in USUAL_SIZES if _shapes(replace(made, shape=(made.shape[0], size, size))) == found]


def of_library(backbone: Backbone, net: nn.Module, head: str, values: Mapping[str, Tensor], prefix: str) -> str:
    """What to do about weights that do not fit a network of a library, as far as their shapes tell."""
    state = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items() if prefix + name in values}
    found = {name: tuple(values[prefix + name].shape) for name in state}
    odd = [name for name, shape in state.items() if found[name] != shape]
    if all(name.startswith(f"{head}.") for name in odd):
        classes, own = (found.get(f"{head}.weight") or (0,))[0], state[f"{head}.weight"][0]
        if classes != own and "num_classes" in backbone.options:
            return f"it has {classes} classes, not {own}: leave out --set num_classes, which is found"
        return "its head was changed; has it a layer more, or is it the head of another network?"
    if all(any(word in name for word in _PLACES) for name in odd):
        return "its pictures were of another size: give the --size that it was trained with"
    first = next((name for name, shape in state.items() if len(shape) == 4), None)
    if first in odd and len(found[first]) == 4 and _only_inputs(state[first], found[first]):
        return _other_channels(backbone, found[first][1])
    return "was it built with other options (--set KEY=VALUE), or is it another network?"


def _only_inputs(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return (one[0], *one[2:]) == (other[0], *other[2:]) and one[1] != other[1]


def _other_channels(backbone: Backbone, channels: int) -> str:
    library = libraries.library_of(backbone.network)
    if channels == 3:
        return "its pictures were in color, with 3 channels: leave out --gray"
    if channels == 1 and library == "timm":
        return "its pictures were gray, with 1 channel: give --gray"
    kinds = "3 channels" if library != "timm" else "1 (--gray) or 3 channels"
    return f"its pictures had {channels} channel(s), and the networks of {library} are taken with {kinds}"


def of_head(rows: int, columns: int, features: int) -> str:
    """What may have happened to a head that does not read the network's features."""
    if rows == features:
        return "it seems to lie the other way round: save it transposed, as (classes, features)"
    return (
        f"the head reads {columns} features, and the network before it gives {features}; is it the head of another "
        "network, or of one of another width?"
    )
