"""What each operator says about feature axes. An operator without a rule is reported, never guessed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from zeroforget.core.labels import Axis, Clash, Prod, Sum, Term, axes, fix, product, resolve, size, total, unify
from zeroforget.core.trace import RULES, Given, Labels, Rule, Watcher, tensors


def rule(operators: str) -> Callable[[Rule], Rule]:
    """Declare a function as the rule of these operators (their in-place forms included)."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators.split(), function))
        return function

    return register


def _dim(index: int, rank: int) -> int:
    return index + rank if index < 0 else index


# --- Elementwise --------------------------------------------------------------------------------------------------


@rule(
    "add sub mul div true_divide maximum minimum where addcmul lerp masked_fill relu relu6 gelu silu mish elu selu "
    "celu leaky_relu hardtanh hardswish hardsigmoid sigmoid tanh softplus softsign log_sigmoid threshold hardshrink "
    "softshrink tanhshrink exp expm1 log log1p sqrt rsqrt pow abs neg sign square reciprocal erf sin cos floor round "
    "clamp clamp_min clamp_max dropout feature_dropout alpha_dropout clone contiguous to _to_copy type_as detach alias"
)
def _elementwise(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    """Dimensions that meet are the same; those of size 1 are broadcast."""
    shape = outs[0].shape
    labels: list[Term] = [1] * len(shape)
    for tensor in tensors(given.values()):
        label = w.of(tensor)
        if len(label) > len(shape):
            raise Clash("the result has fewer dimensions than an operand")
        for i, term in enumerate(label, start=len(shape) - len(label)):
            if size(term) == 1 != shape[i]:
                fix(term)
            elif labels[i] == 1:
                labels[i] = term
            else:
                unify(labels[i], term)
    return [tuple(labels)]


@rule("prelu")
def _prelu(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x, (slope,) = w.of(given["self"]), w.of(given["weight"])
    if size(slope) > 1:
        unify(x[1], slope)
    else:
        fix(slope)
    return [x]


# --- Layers with weights ------------------------------------------------------------------------------------------


@rule("linear")
def _linear(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x, (out, into) = w.of(given["input"]), w.of(given["weight"])
    unify(x[-1], into)
    if given.get("bias") is not None:
        unify(out, w.of(given["bias"])[0])
    w.writes(given["weight"], out, outs[0])
    return [(*x[:-1], out)]


@rule("conv1d conv2d conv3d")
def _convolution(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x, (out, into, *kernel) = w.of(given["input"]), w.of(given["weight"])
    channels, groups = x[-1 - len(kernel)], int(given.get("groups", 1))
    for term in (*kernel, *x[len(x) - len(kernel) :]):
        fix(term)
    if groups == 1:
        unify(channels, into)
    else:
        # Features come in groups of fixed size and whole groups are born, so old groups never read new features.
        fix(into)
        count = Axis(groups)
        unify(channels, Prod((count, size(into))))
        unify(out, Prod((count, size(out) // groups)))
        w.attributes[w.owner(given["weight"]), "groups"] = (count,)
    if given.get("bias") is not None:
        unify(out, w.of(given["bias"])[0])
    w.writes(given["weight"], out, outs[0])
    return [(*x[: len(x) - 1 - len(kernel)], out, *outs[0].shape[-len(kernel) :])]


@rule("embedding")
def _embedding(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    words, out = w.of(given["weight"])
    fix(words)
    w.writes(given["weight"], out, outs[0])
    return [(*w.of(given["indices"]), out)]


@rule("matmul mm bmm")
def _matmul(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    a, b = w.of(given["self"]), w.of(given["mat2"] if "mat2" in given else given["other"])
    if len(a) < 2 or len(b) < 2:
        raise Clash("a product with a vector")
    unify(a[-1], b[-2])
    w.couple([a[-1]])
    batch: list[Term] = list(a[:-2] if len(a) >= len(b) else b[:-2])
    for x, y in zip(reversed(a[:-2]), reversed(b[:-2]), strict=False):
        if 1 not in (size(x), size(y)):
            unify(x, y)
        elif size(x) != size(y):
            raise Clash("a broadcast batch of matrices")
    return [(*batch, a[-2], b[-1])]


# --- Normalization ------------------------------------------------------------------------------------------------


@rule("batch_norm instance_norm")
def _batch_norm(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if given.get(name) is not None:
            unify(x[1], w.of(given[name])[0])
    w.normalizes(given["input"])
    return [x]


@rule("layer_norm rms_norm")
def _layer_norm(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["input"])
    last = x[len(x) - len(given["normalized_shape"]) :]
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            for term, own in zip(last, w.of(given[name]), strict=True):
                unify(term, own)
    w.couple(last)
    w.normalizes(given["input"])
    w.attributes[w.paths[-1], "normalized_shape"] = last
    return [x]


@rule("group_norm")
def _group_norm(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x, groups = w.of(given["input"]), int(given["num_groups"])
    within = size(x[1]) // groups
    if groups >= 4:
        # Whole groups are born, so the statistics of old groups do not see new features.
        count = Axis(groups)
        unify(x[1], Prod((count, within)))
        w.attributes[w.paths[-1], "num_groups"] = (count,)
    else:
        unify(x[1], Prod((groups, Axis(within))) if groups > 1 else x[1])
        w.couple([x[1]])
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            unify(x[1], w.of(given[name])[0])
    w.attributes[w.paths[-1], "num_channels"] = (x[1],)
    w.normalizes(given["input"])
    return [x]


# --- Pooling and reductions ---------------------------------------------------------------------------------------


@rule(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices "
    "upsample_nearest2d upsample_bilinear2d constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d pad"
)
def _spatial(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    """Channels stay; positions, which carry no features, change their number."""
    x = w.of(given["self"])
    labels: list[Labels] = []
    for out in outs:
        label = [term if size(term) == n else n for term, n in zip(x, out.shape, strict=True)]
        for term, n in zip(x, out.shape, strict=True):
            if size(term) != n and any(axes(term)):
                raise Clash("a feature axis is resized")
        labels.append(tuple(label))
    return labels


@rule("mean sum amax amin var std logsumexp")
def _reduction(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    chosen = given.get("dim")
    dims = range(len(x)) if chosen in (None, []) else [chosen] if isinstance(chosen, int) else chosen
    gone = {_dim(d, len(x)) for d in dims}
    w.couple(x[d] for d in gone)
    if given.get("keepdim"):
        return [tuple(1 if i in gone else term for i, term in enumerate(x))]
    return [tuple(term for i, term in enumerate(x) if i not in gone)]


@rule("softmax log_softmax")
def _softmax(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    w.couple([x[_dim(given["dim"], len(x))]])
    return [x]


# --- Moving data --------------------------------------------------------------------------------------------------


@rule("view reshape _unsafe_view _reshape_alias flatten unflatten")
def _view(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    """Regroup factors in row-major order; a fixed size may be split, a feature axis may not."""
    factors: list[Term] = []
    for term in w.of(given["self"]):
        whole = resolve(term)
        factors += whole.factors if isinstance(whole, Prod) else (whole,)
    labels: list[Term] = []
    for n in outs[0].shape:
        group: list[Term] = []
        have = 1
        while have < n:
            if not factors:
                raise Clash("the view does not line up")
            factor = factors.pop(0)
            need = n // have
            if isinstance(factor, int) and factor > need and factor % need == 0:
                factors.insert(0, factor // need)
                factor = need
            group.append(factor)
            have *= size(factor)
        if have != n:
            raise Clash("the view cuts through a feature axis")
        labels.append(product(group))
    if math.prod(size(f) for f in factors) != 1:
        raise Clash("the view does not line up")
    return [tuple(labels)]


@rule("permute transpose t swapaxes movedim")
def _permute(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    order = list(range(len(x)))
    if isinstance(given.get("dims"), (list, tuple)):
        order = [_dim(d, len(x)) for d in given["dims"]]
    elif "source" in given:
        source, target = given["source"], given["destination"]
        moves = [(source, target)] if isinstance(source, int) else list(zip(source, target, strict=True))
        moved = {_dim(b, len(x)): _dim(a, len(x)) for a, b in moves}
        rest = iter(i for i in order if i not in moved.values())
        order = [moved[i] if i in moved else next(rest) for i in range(len(x))]
    else:
        pair = [given[k] for k in ("dim0", "dim1", "axis0", "axis1") if k in given] or [0, -1]
        a, b = (_dim(d, len(x)) for d in pair)
        order[a], order[b] = order[b], order[a]
    return [tuple(x[i] for i in order)]


@rule("squeeze")
def _squeeze(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    chosen = given.get("dim", range(len(x)))
    dims = {_dim(d, len(x)) for d in ([chosen] if isinstance(chosen, int) else chosen)}
    return [tuple(term for i, term in enumerate(x) if not (i in dims and size(term) == 1))]


@rule("unsqueeze")
def _unsqueeze(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = list(w.of(given["self"]))
    x.insert(_dim(given["dim"], len(x) + 1), 1)
    return [tuple(x)]


@rule("expand expand_as")
def _expand(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x, shape = w.of(given["self"]), outs[0].shape
    old: list[Term] = [*[1] * (len(shape) - len(x)), *x]
    return [tuple(term if size(term) == n else n for term, n in zip(old, shape, strict=True))]


@rule("cat concat concatenate")
def _cat(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    parts = [w.of(t) for t in given["tensors"]]
    dim = _dim(given.get("dim", 0), len(parts[0]))
    for other in parts[1:]:
        for i, (a, b) in enumerate(zip(parts[0], other, strict=True)):
            if i != dim:
                unify(a, b)
    joined = total([resolve(part[dim]) for part in parts])
    return [(*parts[0][:dim], joined, *parts[0][dim + 1 :])]


def _cut(term: Term, sizes: Sequence[int]) -> list[Term]:
    """A dimension cut into runs of these sizes: a fixed one anywhere, a sum at its seams, an axis into a sum."""
    term = resolve(term)
    match term:
        case int():
            return list(sizes)
        case Axis():
            pieces: list[Term] = [Axis(n, writers=list(term.writers), coupled=term.coupled) for n in sizes]
            term.bound = Sum(tuple(pieces))
            return pieces
        case Prod():
            raise Clash("a cut through a flattened axis")
        case Sum():
            rest = list(term.parts)
            runs: list[Term] = []
            for n in sizes:
                run: list[Term] = []
                while sum(size(p) for p in run) < n:
                    part = rest.pop(0)
                    room = n - sum(size(p) for p in run)
                    if size(part) > room:
                        part, left = _cut(part, [room, size(part) - room])
                        rest.insert(0, left)
                    run.append(part)
                runs.append(total(run))
            return runs


@rule("chunk split split_with_sizes tensor_split")
def _split(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    dim = _dim(given.get("dim", 0), len(x))
    pieces = _cut(x[dim], [o.shape[dim] for o in outs])
    return [(*x[:dim], piece, *x[dim + 1 :]) for piece in pieces]


@rule("slice narrow")
def _slice(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    dim = _dim(given.get("dim", 0), len(x))
    n, taken, start = size(x[dim]), outs[0].shape[dim], given.get("start") or 0
    if taken == n:
        return [x]
    if not any(axes(x[dim])):
        return [(*x[:dim], taken, *x[dim + 1 :])]
    if given.get("step", 1) != 1:
        raise Clash("a strided slice of a feature axis")
    start = _dim(int(start), n)
    sizes = [start, taken, n - start - taken]
    pieces = dict(zip([i for i, s in enumerate(sizes) if s], _cut(x[dim], [s for s in sizes if s]), strict=True))
    return [(*x[:dim], pieces[1], *x[dim + 1 :])]


@rule("select")
def _select(w: Watcher, given: Given, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    dim = _dim(given["dim"], len(x))
    if any(axes(x[dim])):
        raise Clash("one feature is picked out of an axis")
    return [(*x[:dim], *x[dim + 1 :])]
