"""One model of the zoo: converted, proved, grown by a second task, and its first task compared bit for bit."""

from __future__ import annotations

import functools
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_models import Choice, build
from zeroforget.axes.find import CannotGrow
from zeroforget.axes.inputs import as_batch
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import adopt, grow
from zeroforget.proving.trial import without_gradient


def answer(choice: Choice, pipe: Connection) -> None:
    """Send a row through the pipe, or the error that prevented it."""
    torch.set_num_threads(1)
    try:
        pipe.send(convert(choice))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        places = " | ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
        pipe.send({"status": "error", "why": f"{type(error).__name__}: {error} | {places}"[:900]})


def convert(choice: Choice) -> dict[str, Any]:
    """A row of the results."""
    torch.manual_seed(0)
    plain, x, output = build(choice)
    _age(plain.requires_grad_(False).eval())
    shape = next(iter(x.values())).shape if isinstance(x, dict) else x.shape
    row: dict[str, Any] = {"weights": sum(p.numel() for p in plain.parameters()), "size": shape[-1]}
    warnings.simplefilter("ignore")
    began = time.process_time()
    try:
        net, row["adopted"] = _take(choice, plain, x, output)
    except CannotGrow as error:
        return row | {"status": "refused", "why": str(error)[:900], "seconds": _since(began)}
    row |= {"seconds": _since(began)} | _facts(net)
    began = time.process_time()
    wrong = _grow_and_compare(net, lambda: _asked(plain, x, output), x, adopted=row["adopted"])
    row["trained"] = _since(began)
    if wrong:
        return row | {"status": "wrong", "why": wrong}
    first = next(iter(net.axes.unfollowed.values()), "")
    if net.axes.kept and not first:
        first = "tied to a fixed size: " + ", ".join(net.axes.kept[:4])
    return row | {"status": "grown in part" if net.axes.kept else "grown", "why": first[:300]}


@torch.no_grad()
def _age(plain: nn.Module) -> None:
    """Give every parameter different values, as training would: a head or scale of zeros would hide what is wrong."""
    for parameter in plain.parameters():
        if parameter.is_floating_point() and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _asked(plain: nn.Module, x: Any, output: str | None) -> Tensor:
    """What the given network answers."""
    answer = plain(**x) if isinstance(x, dict) else plain(x)
    out: Tensor = answer if output is None else answer[output]
    return out


def _take(choice: Choice, plain: nn.Module, x: Any, output: str | None) -> tuple[GrowingNetwork, bool]:
    """A classifier is adopted with its own head; where none can be told, its logits count as features."""
    if choice.library == "torchvision" or output is not None:
        try:
            return adopt(plain, x, task="imagenet", unknown="keep", output=output), True
        except CannotGrow as error:
            if "head" not in str(error):
                raise
    net = grow(plain, x, unknown="keep", output=output)
    net.add_task("imagenet", 10)
    return net.eval(), False


def _facts(net: GrowingNetwork) -> dict[str, Any]:
    axes = net.axes
    return {
        "axes": len(axes.sizes),
        "coupled": len(axes.coupled),
        "kept": len(axes.kept),
        "reasons": {path: why[:160] for path, why in list(axes.unfollowed.items())[:4]},
        "features": sum(axes.sizes.values()),
    }


def _grow_and_compare(net: GrowingNetwork, given: Callable[[], Tensor], x: Any, *, adopted: bool) -> str:
    """Teach a second task one step; what is wrong with the first one afterwards, or nothing."""
    with torch.no_grad():
        before = net(x, 0)
        if not torch.equal(_first(net, x, whole=adopted), given()):
            return "the converted network's outputs are not those of the given one"
    net.add_task("more", 3, growth={axis: max(1, size // 20) for axis, size in net.axes.sizes.items()})
    net.train()
    step = torch.optim.SGD(net.newborn(), lr=0.01, momentum=0.9, weight_decay=0.1)
    nn.functional.cross_entropy(net(x, 1), torch.tensor([0, 1])).backward()
    given_one = functools.partial(without_gradient, net.axes)
    if missing := [name for name, p in net.named_parameters() if p.grad is None and not given_one(name)]:
        return f"no gradient reaches {missing[0]} and {len(missing) - 1} more"
    step.step()
    net.eval()
    with torch.no_grad():
        if net(x, 1).shape != (2, 3):
            return "the second task does not run"
        if not torch.equal(net(x, 0), before):
            return "the first task's logits changed"
    return ""


def _first(net: GrowingNetwork, x: Any, *, whole: bool) -> Tensor:
    """What the first task's own network answers: logits, or of a grown feature extractor the features."""
    dense = net.dense(0)
    asked = dense if whole else dense.get_submodule("features")
    out: Tensor = asked(as_batch(asked, x)) if isinstance(x, dict) else asked(x)
    return out


def _since(began: float) -> float:
    return round(time.process_time() - began, 2)
