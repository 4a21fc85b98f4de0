"""Files of weights from elsewhere, safetensors or torch.save's, read without running any code that they hold."""

from __future__ import annotations

import json
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

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
