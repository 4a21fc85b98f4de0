"""Files of weights from elsewhere, safetensors or torch.save's, read without running any code that they hold, and what
to do about those that do not fit a network."""

from __future__ import annotations

import contextlib
import json
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zeroforget import nets
from zeroforget.nets import libraries
from zeroforget.store.backbone import Backbone
from zeroforget.store.errors import ModelError

REMEDY = "save what you mean by itself: safetensors.torch.save_file(network.state_dict(), 'weights.safetensors')"
_TORCH = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04")
"""How torch.save's files begin, new and old."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The named tensors of a safetensors file, or of a state dict that torch.save wrote."""
    if not path.is_file():  # to open a pipe would wait for whoever writes into it
        raise ModelError(f"{path} is no file; name one of weights, safetensors, .pt or .pth")
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(_TORCH):
        return _state_dict(_load(path), path)
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise ModelError(f"{path} is no safetensors file, nor one of torch.save ({error})") from error


def normalization_of(path: Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std of the pixels that the weights were trained on, where a safetensors file tells."""
    try:
        with safe_open(path, framework="pt") as opened:
            about = opened.metadata() or {}
        mean, std = (tuple(map(float, json.loads(about[key]))) for key in ("mean", "std"))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError):
        return None
    return mean, std


def _load(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how the file was pickled; what matters is whether tensors came
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} holds more than tensors, and loading that could run any code. Where you trust it, {REMEDY}"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{path} is no file of tensors that can be read ({first}). {REMEDY.capitalize()}") from error


def _state_dict(found: object, path: Path) -> dict[str, Tensor]:
    """The state dict itself, or the only one among the entries of a checkpoint."""
    if _is_state(found):
        return dict(found)  # type: ignore[call-overload,no-any-return]
    entries = found.items() if isinstance(found, Mapping) else ()
    states = {str(key): value for key, value in entries if _is_state(value)}
    if len(states) == 1:
        return dict(next(iter(states.values())))
    if states:
        raise ModelError(f"{path} holds several sets of weights ({', '.join(states)}); {REMEDY}")
    raise ModelError(f"{path} holds no state dict (names and their tensors), but {type(found).__name__}; {REMEDY}")


def _is_state(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(key, str) and isinstance(item, Tensor) for key, item in value.items())
    )


def needed(net: nn.Module) -> list[str]:
    """The names that a file must have. How many batches a normalization has seen does not matter."""
    return [name for name in net.state_dict() if not name.endswith("num_batches_tracked")]


def prefix_of(values: Mapping[str, Tensor], names: Collection[str], path: Path, whose: str) -> str:
    """What stands before all of these names in a file ('module.', say); there must be one such prefix and no other."""
    wanted, found = set(names), Counter[str]()
    for key in values:
        parts = key.split(".")
        tails = ((".".join(parts[:i]), ".".join(parts[i:])) for i in range(len(parts)))
        found.update(f"{head}." if head else "" for head, tail in tails if tail in wanted)
    whole = [prefix for prefix, count in found.items() if count == len(wanted)]
    if len(whole) == 1:
        return whole[0]
    if whole:
        shown = ", ".join(f"'{prefix}'" for prefix in sorted(whole))
        raise ModelError(f"{path} holds the network several times, behind {shown}; {REMEDY}")
    best = max(found, key=lambda prefix: (found[prefix], -len(prefix)), default="")
    missing = [name for name in names if best + name not in values]
    more = f" and {len(missing) - 1} more" if missing[1:] else ""
    known = {best + name for name in names}
    strange = [key for key in values if key not in known]
    raise ModelError(
        f"{path} lacks '{best}{missing[0]}'{more}; it should hold the tensors of {whose}, such as "
        f"{few([best + name for name in missing])}, and has instead {few(strange)}. If these are the same tensors, "
        "rename them: safetensors.torch.save_file({'its new name': values['its old name'], ...}, "
        "'weights.safetensors'). If not, choose the --network that they are of (torchvision/resnet18 is torchvision's, "
        "resnet18 is ours)"
    )


def few(names: Collection[str]) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(list(names)[:3]) or "none"
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@torch.no_grad()
def fill_from(
    net: nn.Module, values: Mapping[str, Tensor], prefix: str, path: Path, hint: Callable[[], str]
) -> dict[str, Tensor]:
    """Fill a network from a file's tensors; those that it has no place for come back.

    `hint` is asked what to do where a tensor has another shape than the network's.
    """
    rest = dict(values)
    for name, tensor in net.state_dict().items():
        if prefix + name not in values:
            continue
        value = rest.pop(prefix + name)
        if value.shape != tensor.shape:
            found, has = tuple(value.shape), tuple(tensor.shape)
            raise ModelError(f"{path}: '{prefix}{name}' is {found}, but the network has {has}; {hint()}")
        _check_numbers(value, tensor, path, prefix + name)
        tensor.copy_(value)
        if value.dtype != tensor.dtype and not torch.equal(tensor.to(value.dtype), value):
            raise ModelError(
                f"{path}: '{prefix}{name}' has {value.dtype} values that {tensor.dtype} cannot hold; the network would "
                "not answer as it did. Convert it yourself first"
            )
    return rest


def _check_numbers(value: Tensor, own: Tensor, path: Path, name: str) -> None:
    """Refuse NaN and infinities, but for those that the network itself has there (in a mask, say)."""
    wide = value.float() if value.is_floating_point() and value.itemsize < 4 else value
    odd = ~torch.isfinite(wide)
    count = int((odd & (wide != own)).sum()) if odd.any() else 0
    if count:
        raise ModelError(
            f"{path}: '{name}' holds NaN or infinite values ({count} of {value.numel()}), so the network cannot "
            "answer; its training may have diverged. Take weights from before that, or save them again"
        )


USUAL_SIZES = (8, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 84, 96, 112, 128, 144, 160, 176, 192, 224, 256)
"""Pixels of a side that are tried, to tell for which pictures weights were made."""
_PLACES = ("pos_embed", "pos_embedding", "relative_position")
"""In the names of tensors that have a value for each place in a picture."""

Shapes = dict[str, tuple[int, ...]]


def hint_for_ours(backbone: Backbone, values: Mapping[str, Tensor], prefix: str) -> str:
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


def hint_for_library(backbone: Backbone, net: nn.Module, head: str, values: Mapping[str, Tensor], prefix: str) -> str:
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


def hint_for_head(rows: int, columns: int, features: int) -> str:
    """What may have happened to a head that does not read the network's features."""
    if rows == features:
        return "it seems to lie the other way round: save it transposed, as (classes, features)"
    return (
        f"the head reads {columns} features, and the network before it gives {features}; is it the head of another "
        "network, or of one of another width?"
    )
