"""The heads of a classifier that goes on with its scores: picks the last word's, averages places or several heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zeroforget.axes.find import watched
from zeroforget.axes.labels import Axis, axes, resolve
from zeroforget.axes.plain_modules import is_layer

_GOES_ON = (
    "select slice narrow index gather take_along_dim index_select mean sum stack unbind split chunk squeeze unsqueeze "
    "view reshape _unsafe_view flatten permute transpose t movedim contiguous clone alias detach mul div add sub to "
    "_to_copy float double expand arange eq ne lt le gt ge argmax argmin amax amin max clamp relu dropout lift_fresh "
    "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d cumsum any all where item "
    "_local_scalar_dense zeros_like ones_like full_like bitwise_not logical_not rsub remainder floor_divide"
)
"""What may come behind a head. These give each class its own score; a softmax would mix them."""


def heads_inside(classifier: nn.Module, example: Any) -> tuple[str, ...]:
    """The linear layers and convolutions of one point that write the class scores, and nothing else; none if it cannot
    be told."""
    watcher, out, labels = watched(classifier, example)
    if not isinstance(out, Tensor) or out.dim() != 2:
        return ()
    scores = resolve(labels[1])
    if not isinstance(scores, Axis) or scores.coupled or not scores.writers:
        return ()
    paths = tuple(scores.writers)
    modules = dict(classifier.named_modules())
    if not all(path and _may_be_head(modules[path]) for path in paths):
        return ()
    last = max(i for i, (_, path) in enumerate(watcher.calls) if path in paths)
    known = set(_GOES_ON.split())
    if any(operator.rstrip("_") not in known for operator, _ in watcher.calls[last + 1 :]):
        return ()
    own = {f"{path}.{name}" for path in paths for name in ("weight", "bias")}
    ids = {id(watcher.named[name]) for name in own if name in watcher.named}
    for name, tensor in watcher.named.items():
        met = any(scores is axis for term in watcher.of(tensor) for axis in axes(term))
        if (met or id(tensor) in ids) and name not in own:
            return ()  # tied, or other layers read the scores
        if met and any(scores is axis for term in watcher.of(tensor)[1:] for axis in axes(term)):
            return ()
    return paths


def _may_be_head(module: nn.Module) -> bool:
    if not is_layer(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    if isinstance(module, nn.Linear):
        return True
    numbers: Any = module
    plain = all(n == 1 for n in (*numbers.kernel_size, *numbers.stride)) and numbers.groups == 1
    return plain and not isinstance(numbers.padding, str) and not any(numbers.padding)
