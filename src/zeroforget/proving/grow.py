"""From a user's network, plain or a classifier in service, to one that grows: proved on copies before it is given."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.axes.find import Axes, CannotGrow, watched
from zeroforget.axes.labels import Axis, axes, resolve
from zeroforget.axes.plain_modules import is_layer, plain_layout
from zeroforget.axes.trace import unchanged
from zeroforget.growing.growth import GrowthLimits, is_share, limits_of
from zeroforget.growing.network import GrowingNetwork
from zeroforget.growing.rank_births import Rank
from zeroforget.proving.input_checks import one_input_and_output, taking, wavers
from zeroforget.proving.prove import check_start, proven_axes
from zeroforget.proving.trial import give_back
from zeroforget.proving.trial_networks import in_service


def grow(
    net: nn.Module,
    example: Any,
    *,
    start: float = 1.0,
    limit: float | None = None,
    unit: str = "features",
    align: int = 1,
    keep: Collection[str] = (),
    fn: str = "reused",
    bridge: str = "zero",
    unknown: str = "refuse",
    output: str | int | None = None,
    rank: Rank = 0,
) -> GrowingNetwork:
    """Turn a plain feature extractor (no head; it returns (batch, features)) into a network that grows by tasks.

    The given network is left as it is. It sets the full width of each layer, and the values that the first task has.

    Args:
        net: any module; its axes are found by watching it run, not by its class.
        example: a batch of inputs: a tensor, a tuple of arguments, or a dictionary of named ones (then the network is
            asked by `net(**batch, task=...)`).
        output: where an answer has several parts, the name or the place of the features among them.
        start: the share of the full network that the first task begins with.
        limit: how far the network may grow, as a share of its full width; by default 1 if start < 1, else no limit.
        unit: "features" or "weights": what shares are shares of.
        align: keep the widths of layers at multiples of this (8 keeps a GPU's tensor cores busy). Heads and groups
            count by their channels.
        keep: paths of modules whose features shall not grow.
        fn: feature normalization of "reused" features, of "all", or of "none".
        bridge: "zero" starts what old features read of new ones at zero, so that growing changes nothing at first;
            "random" starts it as a fresh network would.
        unknown: "refuse" a network if some of its features cannot be followed, naming what to pass as `keep`; or "keep"
            those features as they are, with a warning.
        rank: the rank of the step that each later task adds to older weights, unless its `add_task` says otherwise.

    Example:
        >>> import torch, zeroforget
        >>> net = zeroforget.grow(torch.nn.Linear(8, 64), torch.randn(4, 8), start=0.5)
        >>> net.add_task("birds", classes=3)
        >>> net.eval()(torch.randn(2, 8), "birds").shape
        torch.Size([2, 3])

    Raises:
        CannotGrow: an operator cannot be followed; the message names it and what to pass as `keep`.
        ValueError: an argument is out of range.
    """
    check_growth(start, fn, bridge, unknown, unit, align, keep)
    net, example = one_input_and_output(net, example, output)
    shares = (start, limit, unit, align)
    return growing(net, plain_layout(example), shares, (fn, bridge, rank), keep=keep, unknown=unknown)


def growing(
    net: nn.Module,
    example: Any,
    shares: tuple[float, float | None, str, int],
    ways: tuple[str, str, Rank],
    *,
    keep: Collection[str],
    unknown: str,
    inside: Sequence[str] = (),
) -> GrowingNetwork:
    """A network of one input and output, proved and growing: `shares` are start, limit, unit and align; `ways` are fn,
    bridge and rank; `inside` are the layers that each task has for itself, as its head."""
    start, limit, unit, align = shares
    fn, bridge, rank = ways
    keep = [*keep, *inside]
    with torch.inference_mode(False), taking(net, example):  # what is made in inference mode could never learn
        axes = proven_axes(net, example, keep=keep, unknown=unknown)
        axes = dataclasses.replace(axes, kept=tuple(path for path in axes.kept if path not in inside))
    limits = _checked_limits(net, axes, start, limit, unit, align)
    if start < 1:
        none = dict.fromkeys(axes.sizes, 0)
        with torch.inference_mode(False), taking(net, example):
            check_start(net, axes, example, limits.plan(dict.fromkeys(axes.sizes, 0.0), none, start)[1])
    give_back()
    with torch.inference_mode(False):
        grown = GrowingNetwork(net, axes, tuple(example.shape[1:]), limits, start, fn, bridge, rank, inside)
    idle = {name.rpartition(".")[0] or name for name in axes.idle if name not in axes.elsewhere}
    unread = {name.rpartition(".")[0] or name for name in axes.unread}
    _notice(axes, [*keep, *idle])
    _warn_of_silent(axes, [*keep, *axes.idle])
    _warn_of_idle(idle & unread, idle - unread)
    return grown


def _checked_limits(
    net: nn.Module, axes: Axes, start: float, limit: float | None, unit: str, align: int
) -> GrowthLimits:
    if not axes.sizes and start < 1:
        raise ValueError(
            f"nothing in this network can grow, so a first task cannot start with {start} of it: pass start=1"
        )
    limits = limits_of(net, axes, 1.0 if limit is None and start < 1 else limit, unit, align)
    if limits.limit is not None and limits.limit < start:
        raise ValueError(f"limit {limit} is below start {start}; nothing could be learned")
    return limits


def check_growth(
    start: float, fn: str, bridge: str, unknown: str, unit: str, align: int, keep: Collection[str]
) -> None:
    """ValueError for arguments that are out of range."""
    if isinstance(keep, str):
        raise ValueError(f"keep takes a list of module paths: keep=['{keep}']")
    if not is_share(start) or not 0 < start <= 1:
        raise ValueError(f"start is a share of the full network, above 0 and at most 1, not {start!r}")
    if fn not in {"reused", "all", "none"}:
        raise ValueError(f"fn is 'reused', 'all' or 'none', not '{fn}'")
    if bridge not in {"zero", "random"}:
        raise ValueError(f"bridge is 'zero' or 'random', not '{bridge}'")
    if unknown not in {"refuse", "keep"}:
        raise ValueError(f"unknown is 'refuse' or 'keep', not '{unknown}'")
    GrowthLimits({}, lambda widths: 0.0, unit=unit, align=align)  # checks these two, with no network yet


def _warn_of_idle(unread: Collection[str], cut_off: Collection[str]) -> None:
    """Say which parameters stay as they are because the example does not show what they are for."""
    if unread:
        warnings.warn(
            f"{_quoted(unread)} took no part in the answer to the example and gets no features of its own. What runs "
            "only for other inputs does not fit the network once it has grown: pass an example that reaches it, or "
            "switch it off first (torchvision: aux_logits=False)",
            stacklevel=4,
        )
    if cut_off:
        warnings.warn(
            f"no gradient from the answer reaches {_quoted(cut_off)} (torch.no_grad, detach, a branch whose output is "
            "not returned), so nothing could be learned there and no feature is added",
            stacklevel=4,
        )


def _quoted(paths: Collection[str]) -> str:
    shown = sorted(paths)
    return ", ".join(f"'{path}'" for path in shown[:6]) + (" and more" if len(shown) > 6 else "")


def _notice(axes: Axes, keep: Collection[str]) -> None:
    """Say which layers keep their width though nobody asked for it."""
    fixed = [path or "parameters of its own" for path in axes.kept if not _below(path, keep)]
    if fixed:
        why = next(iter(axes.unfollowed.values()), "their output is tied to a fixed size")
        warnings.warn(f"these layers keep their width, {why}: {_some(fixed)}", stacklevel=4)


def _warn_of_silent(axes: Axes, known: Collection[str]) -> None:
    """Say which parameters keep their shape though nothing speaks against their growing."""
    names = [name for name in axes.silent if not _below(name, known)]
    if names:
        warnings.warn(
            "these parameters keep their shape, for it does not show which of their numbers are features: "
            f"{_some(names)}. A matrix in x @ weight or weight @ x grows",
            stacklevel=4,
        )


def _below(path: str, places: Collection[str]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


class NoLinearHead(CannotGrow):
    """The class scores are not what a linear layer has just written."""


@torch.inference_mode(False)
def adopt(
    classifier: nn.Module,
    example: Any,
    *,
    task: str = "first",
    classes: Sequence[str] | None = None,
    limit: float | None = None,
    unit: str = "features",
    align: int = 1,
    keep: Collection[str] = (),
    fn: str = "reused",
    bridge: str = "zero",
    unknown: str = "refuse",
    output: str | int | None = None,
) -> GrowingNetwork:
    """Turn a trained classifier, which is left as it is, into a growing network that knows its task already.

    The last linear layer, the one that writes the class scores, becomes the task's head; all before it grows with
    later tasks. Where the network goes on with these scores, such as to pick the last word's, to average several
    heads or to flatten a convolution's, each task has layers of its own in their place. The logits of `net(x, task)`
    and of `net.dense(task)(x)` are those of the classifier, bit for bit, as it answers in service: in eval mode, its
    parameters frozen.

    Args:
        classifier: any module that returns (batch, classes); its axes are found by watching it run.
        example: a batch of inputs, of any form that `grow` takes.
        output: where an answer has several parts, the name or the place of the class scores among them.
        task: what to call what it knows.
        classes: the names of its classes, in the order of its outputs.
        limit, unit, align, keep, fn, bridge, unknown: as for `grow`.

    Example:
        >>> import torch, zeroforget
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
        >>> net = zeroforget.adopt(model, torch.randn(4, 8), task="products", classes=["cup", "pot", "pan"])

    Raises:
        CannotGrow: its class scores do not come straight from a linear layer, or its features cannot be followed.
        ValueError: an argument is out of range.
    """
    check_growth(1.0, fn, bridge, unknown, unit, align, keep)
    classifier, example = one_input_and_output(classifier, example, output)
    example = plain_layout(example)
    if classes is not None and (isinstance(classes, str) or not isinstance(classes, Collection)):
        raise ValueError(f"classes lists the names of the classes, not {classes!r}")
    network, heads, inside = _parts(classifier, example)
    names = _classes(heads[0], classes)
    ways = (fn, bridge, 0)
    net = growing(network, example, (1.0, limit, unit, align), ways, keep=keep, unknown=unknown, inside=inside)
    net.add_task(task, names)
    net.eval()
    _take_over(net.heads[0], heads)
    _compare(net, classifier, example)
    return net


def _parts(classifier: nn.Module, example: Any) -> tuple[nn.Module, list[nn.Module], tuple[str, ...]]:
    """What is to grow, the heads, and where these stand if they are inside of it."""
    with taking(classifier, example):
        watched(classifier, example)  # a copy: it tells whether the given one may be asked
        try:
            features, head = split_head(classifier, example)
        except NoLinearHead as error:
            if inside := heads_inside(classifier, example):
                return classifier, [classifier.get_submodule(path) for path in inside], inside
            raise CannotGrow(str(error)) from error
    return features, [head], ()


@torch.no_grad()
def _take_over(head: nn.Module, given: list[nn.Module]) -> None:
    """The first task's head gets the values of those that were given."""
    own = [module for module in head.modules() if isinstance(module, nn.Linear)]
    for layer, before in zip(own, given, strict=True):
        layer.weight.copy_(before.get_parameter("weight").flatten(1))
        layer.bias.zero_()
        if (bias := before._parameters.get("bias")) is not None:
            layer.bias.copy_(bias)


def _classes(head: nn.Module, names: Collection[str] | None) -> int | list[str]:
    """The classes of the first task: their names, or how many. One output is no choice of classes, so it has a name."""
    outputs = len(head.get_parameter("weight"))
    if names is None:
        return outputs if outputs > 1 else ["output"]
    if len(names) != outputs or len(set(names)) != outputs:
        raise ValueError(f"the classifier has {outputs} classes, but classes names {len(set(names))} different ones")
    return list(map(str, names))


def split_head(classifier: nn.Module, example: Tensor) -> tuple[nn.Module, nn.Linear]:
    """The classifier without its last linear layer, as a copy, and that layer."""
    path, out = find_head(classifier, example)
    head = classifier.get_submodule(path)
    assert isinstance(head, nn.Linear)
    if not path:
        raise CannotGrow(
            "the classifier is only a head, a single linear layer; there are no features to grow before it"
        )
    if out.dim() != 2:
        raise CannotGrow(
            f"a classifier must return (batch, classes), not {tuple(out.shape)}; its head cannot be split off"
        )
    if not out.isfinite().all():
        raise CannotGrow(
            "the classifier's scores for the example hold NaN or infinity; look at its weights and the example"
        )
    if wavers(classifier, example):
        raise CannotGrow(
            "in eval mode the classifier answers one input in two ways: it draws random numbers, or remembers its last "
            "input. Let it do so in training mode only"
        )
    features = without_head(classifier, path)
    try:
        with torch.no_grad():
            x = features.eval()(example)
            same = torch.allclose(head(x), out, rtol=1e-4, atol=1e-4 * float(out.abs().max()))
    except (RuntimeError, AttributeError, TypeError):
        same = False
    if not same:
        raise CannotGrow(
            f"other code reads its head '{path}', or changes what it returns, so it cannot be split off. Let the "
            "forward end with that layer alone"
        )
    _check_plain(path, head, x)
    return features.train(classifier.training), head


@torch.no_grad()
def _check_plain(path: str, head: nn.Linear, x: Tensor) -> None:
    """A head is taken over by its weight and bias, so they must be all that it computes with."""
    if torch.equal(head(x), F.linear(x, head.weight, head.bias)):
        return
    if head._forward_hooks or head._forward_pre_hooks:
        raise CannotGrow(
            f"its head '{path}' has forward hooks that change its answer, and a head is its weight and bias alone: "
            "remove them, or put their work into these two"
        )
    raise CannotGrow(
        f"its head '{path}', a {type(head).__name__}, computes other things than its weight and bias say: put an "
        "nn.Linear in its place whose values alone give its answers"
    )


def without_head(classifier: nn.Module, path: str) -> nn.Module:
    """A copy that passes on what its head would read. It shares the classifier's tensors: nothing changes them."""
    shared: dict[int, Any] = {id(t): t for t in (*classifier.parameters(), *classifier.buffers())}
    made: nn.Module = copy.deepcopy(classifier, shared | {id(classifier.get_submodule(path)): nn.Identity()})
    return made


def find_head(classifier: nn.Module, example: Tensor) -> tuple[str, Tensor]:
    """The path of the linear layer whose output is the classifier's own."""
    written: list[tuple[str, Any]] = []
    modules = dict(classifier.named_modules())
    handles = [
        module.register_forward_hook(lambda _m, _a, out, path=path: written.append((path, out)))
        for path, module in modules.items()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.no_grad(), unchanged(classifier):
            out = classifier(example)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(out, Tensor):
        raise CannotGrow(
            f"the classifier returned {type(out).__name__}, so its head cannot be found. Wrap it in a module whose "
            "forward returns the class scores alone"
        )
    paths = [path for path, value in written]
    last = next((path for path, value in reversed(written) if value is out), None)
    if last is None or paths.count(last) != 1:
        hooked = [f"'{path}'" if path else "the classifier itself" for path, m in modules.items() if m._forward_hooks]
        raise NoLinearHead(
            "the class scores do not come straight from one linear layer, so there is no head to split off. Replace "
            "what comes last by nn.Identity() and pass that network to grow(), then add a task for its classes"
            + (f". If it is a forward hook that writes them (of {', '.join(hooked[:4])}), remove it" if hooked else "")
        )
    return last, out


@torch.no_grad()
def _compare(net: GrowingNetwork, classifier: nn.Module, example: Tensor) -> None:
    with in_service(classifier):
        expected = classifier(example)
    with unchanged(classifier):
        as_given = classifier(example)
    got = net.cut(0, lend=True)(example)
    if not torch.equal(got, expected):
        worst = float((got - expected).abs().max())
        raise CannotGrow(
            f"the adopted network's logits differ from the classifier's by {worst:.3g}. Some of its parameters may lie "
            "in memory in another order than the rest (channels last): bring all to the usual one with "
            ".to(memory_format=torch.contiguous_format) first"
        )
    if not torch.equal(as_given, expected):
        worst = float((as_given - expected).abs().max())
        warnings.warn(
            "torch computes this classifier in another order while its parameters want gradients, even where none are "
            f"computed: its logits then differ by {worst:.3g}. The adopted network answers as it does in service, "
            "classifier.requires_grad_(False); compare with that",
            stacklevel=3,
        )


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
