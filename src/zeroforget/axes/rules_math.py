"""Rules of operators that compute: elementwise ones, layers with weights, normalization, pooling and reductions.

A rule says which dimensions of an operator's arguments and results are the same features. An operator without a rule
is reported, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroforget.axes.labels import Axis, Clash, Prod, Term, cut, fix, size, unify
from zeroforget.axes.trace import Arguments, Labels, Watcher, dimension, rule, tensors

# --- Elementwise --------------------------------------------------------------------------------------------------


@rule(
    "add sub rsub mul div true_divide floor_divide remainder fmod maximum minimum where addcmul addcdiv lerp atan2 "
    "masked_fill relu relu6 gelu silu mish elu selu celu leaky_relu rrelu hardtanh hardswish hardsigmoid sigmoid tanh "
    "softplus softsign log_sigmoid threshold hardshrink softshrink tanhshrink exp exp2 expm1 log log1p log2 log10 sqrt "
    "rsqrt pow abs neg sign square reciprocal erf erfc erfinv sin cos tan sinh cosh atan floor ceil round trunc frac "
    "clamp clamp_min clamp_max clip nan_to_num logit isnan isfinite dropout native_dropout feature_dropout "
    "alpha_dropout bernoulli clone contiguous _to_copy float double half bfloat16 detach alias lift_fresh "
    "copy eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not "
    "__and__ __or__ zeros_like ones_like empty_like full_like rand_like randn_like fill zero requires_grad "
    "multiply subtract divide absolute negative positive float_power greater greater_equal less less_equal not_equal "
    "acos asin arccos arcsin arctan arctan2 arctanh atanh asinh acosh sinc hypot xlogy copysign sgn logaddexp isinf "
    "fix special_expit special_erf heaviside fmax fmin deg2rad uniform normal exponential "
    "real imag polar angle resolve_conj resolve_neg conj _conj"
)
def _elementwise(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Dimensions that meet are the same; those of size 1 are broadcast."""
    shape = outs[0].shape
    labels: list[Term] = [1] * len(shape)
    for tensor in tensors(given.values()):
        label = w.of(tensor)
        if len(label) > len(shape):
            raise Clash("the result has fewer dimensions than an operand")
        if w.is_parameter(tensor) and tensor.numel() < outs[0].numel():
            w.broadcasts(tensor)
        for i, term in enumerate(label, start=len(shape) - len(label)):
            if size(term) == 1 != shape[i]:
                fix(term)
            elif labels[i] == 1:
                labels[i] = term
            else:
                unify(labels[i], term)
    return [tuple(labels)] * len(outs)


@rule("new_zeros new_ones new_full zeros ones full")
def _fresh(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """One number over and over: it goes with whatever features it meets, if the code makes it of their width."""
    return [tuple(Axis(n) if n > 1 else n for n in outs[0].shape)]


@rule("new_empty new_tensor")
def _fixed(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """A new tensor takes its kind from another, not its features."""
    return [tuple(outs[0].shape)]


@rule("to type_as")
def _of_a_kind(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """The same numbers, of the kind of another tensor perhaps."""
    return [w.of(given["self"])]


@rule("glu")
def _glu(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """A value and its gate lie one after the other in one axis: they grow together."""
    x = w.of(given["self"])
    dim = dimension(given["dim"], len(x))
    half = size(x[dim]) // 2
    value, gate = cut(x[dim], [half, half])
    unify(value, gate)
    return [(*x[:dim], value, *x[dim + 1 :])]


@rule("prelu")
def _prelu(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x, (slope,) = w.of(given["self"]), w.of(given["weight"])
    if size(slope) > 1:
        unify(x[1], slope)
    else:
        fix(slope)
    return [x]


# --- Layers with weights ------------------------------------------------------------------------------------------


@rule("linear")
def _linear(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x, (out, into) = w.of(given["input"]), w.of(given["weight"])
    unify(x[-1], into)
    if given.get("bias") is not None:
        unify(out, w.of(given["bias"])[0])
    if not w.is_weight(given["weight"]) and len(x) == 2 and w.is_learned(given["input"]):
        # The other way round: a weight's rows with what is computed.
        w.writes_on_the_left(given["input"], x[0], outs[0])
        return [(x[0], out)]
    if w.is_parameter(given["input"]) and x[:-1]:
        w.still(*x[:-1])
    w.writes(given["weight"], out, outs[0])
    return [(*x[:-1], out)]


@rule("conv1d conv2d conv3d")
def _convolution(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
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
        w.attributes[w.layer(given["weight"]), "groups"] = (count,)
    if given.get("bias") is not None:
        unify(out, w.of(given["bias"])[0])
    w.writes(given["weight"], out, outs[0])
    return [(*x[: len(x) - 1 - len(kernel)], out, *outs[0].shape[-len(kernel) :])]


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def _transposed(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Here the inputs come first in the weight. Whole groups are born, if there are any."""
    x, (into, out, *kernel) = w.of(given["input"]), w.of(given["weight"])
    channels, groups = x[-1 - len(kernel)], int(given.get("groups", 1))
    for term in (*kernel, *x[len(x) - len(kernel) :]):
        fix(term)
    if groups == 1:
        w.couple([channels])
    else:
        fix(out)
        count = Axis(groups)
        unify(into, Prod((count, size(into) // groups)))
        out = Prod((count, size(out))) if size(out) > 1 else count
        w.attributes[w.layer(given["weight"]), "groups"] = (count,)
    unify(channels, into)
    if given.get("bias") is not None:
        unify(out, w.of(given["bias"])[0])
    w.writes(given["weight"], out, outs[0])
    return [(*x[: len(x) - 1 - len(kernel)], out, *outs[0].shape[-len(kernel) :])]


@rule("_weight_norm")
def _normed_weight(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """A direction with a length for each feature: zeros that new inputs bring do not change an old one's length."""
    direction, length = w.of(given["v"]), w.of(given["g"])
    dim = dimension(given.get("dim", 0), len(direction))
    if size(length[dim]) != size(direction[dim]) or dim != 0:
        raise Clash("a length that is not that of each output")
    unify(direction[0], length[0])
    w.broadcasts(given["g"])
    w.remakes(outs[0])
    return [direction]


@rule("embedding")
def _embedding(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    words, out = w.of(given["weight"])
    fix(words)
    w.writes(given["weight"], out, outs[0])
    return [(*w.of(given["indices"]), out)]


@rule("embedding_bag")
def _embedding_bag(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    words, out = w.of(given["weight"])
    fix(words)
    w.writes(given["weight"], out, outs[0])
    return [(outs[0].shape[0], out), *(tuple(other.shape) for other in outs[1:])]


@rule("cdist")
def _distance(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """How far points are from centers; those of a parameter are features."""
    a, b = w.of(given["x1"]), w.of(given["x2"])
    unify(a[-1], b[-1])
    w.couple([a[-1]])
    if w.is_parameter(given["x2"]):
        w.writes(given["x2"], b[-2], outs[0])
    return [(*_broadcast(a[:-2], b[:-2]), a[-2], b[-2])]


@rule("cosine_similarity")
def _similarity(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = _broadcast(w.of(given["x1"]), w.of(given["x2"]))
    gone = dimension(given["dim"], len(x))
    w.couple([x[gone]])
    return [tuple(term for i, term in enumerate(x) if i != gone)]


@rule("matmul mm bmm addmm baddbmm")
def _matmul(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    pair = [given[k] for k in ("batch1", "mat1", "self") if k in given][:1]
    left, right = pair[0], given[next(k for k in ("batch2", "mat2", "other") if k in given)]
    a, b = w.of(left), w.of(right)
    if len(a) < 2 or len(b) < 2:
        raise Clash("a product with a vector")
    unify(a[-1], b[-2])
    if not w.is_parameter(right):  # what old features read of new ones in a weight starts at zero
        w.couple([a[-1]])
    batch = _broadcast(a[:-2], b[:-2])
    inner = w.is_weight(left) and size(a[-2]) > 1  # of two weights one is made, which writes where it is used
    if not inner and (w.is_parameter(right) or (w.is_weight(right) and len(b) == 2)):
        w.writes(right, b[-1], outs[0])
    elif not w.is_weight(right) and w.is_learned(left) and size(a[-2]) > 1:
        w.writes_on_the_left(left, a[-2], outs[0])
    out = (*batch, a[-2], b[-1])
    if "mat1" in given or "batch1" in given:
        for term, own in zip(reversed(out), reversed(w.of(given["self"])), strict=False):
            if size(own) == size(term):
                unify(term, own)
    return [out]


@rule("mv")
def _vector(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """A sum over features, each with its own number."""
    (rows, features), (own,) = w.of(given["self"]), w.of(given["vec"])
    if w.is_weight(given["self"]) or w.is_weight(given["vec"]):
        raise Clash("a product with a vector")
    unify(features, own)
    w.couple([features])
    return [(rows,)]


@rule("tensordot")
def _contraction(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Some dimensions of one operand meet some of the other, and are summed over."""
    if w.is_weight(given["self"]):
        raise Clash("a weight on the left")
    a, b = w.of(given["self"]), w.of(given["other"])
    left = [dimension(d, len(a)) for d in given["dims_self"]]
    right = [dimension(d, len(b)) for d in given["dims_other"]]
    for i, j in zip(left, right, strict=True):
        unify(a[i], b[j])
    free = [term for j, term in enumerate(b) if j not in right]
    if not w.is_weight(given["other"]):
        w.couple(a[i] for i in left)
    elif len(free) == 1:
        w.writes(given["other"], free[0], outs[0])
    else:
        raise Clash("a weight that writes several dimensions")
    return [(*(term for i, term in enumerate(a) if i not in left), *free)]


def _broadcast(a: Labels, b: Labels) -> list[Term]:
    longer, shorter = (list(a), list(b)) if len(a) >= len(b) else (list(b), list(a))
    for i, term in enumerate(shorter, start=len(longer) - len(shorter)):
        if size(longer[i]) == size(term):
            unify(longer[i], term)
        elif size(longer[i]) == 1:
            fix(longer[i])
            longer[i] = term
        else:
            fix(term)
    return longer


@rule("scaled_dot_product_attention")
def _attention(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    q, k, v = (w.of(given[name]) for name in ("query", "key", "value"))
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    w.couple([q[-1], k[-2]])
    if given.get("enable_gqa") and size(q[-3]) != size(k[-3]):  # so many queries share a head: whole groups are born
        unify(k[-3], v[-3])
        unify(q[-3], Prod((k[-3], size(q[-3]) // size(k[-3]))))
        batch = [*_broadcast(tuple(_broadcast(q[:-3], k[:-3])), v[:-3]), q[-3]]
    else:
        batch = _broadcast(tuple(_broadcast(q[:-2], k[:-2])), v[:-2])
    if given.get("attn_mask") is not None:
        mask = w.of(given["attn_mask"])
        _broadcast((*batch, q[-2], k[-2]), mask)
    return [(*batch, q[-2], v[-1])]


@rule("einsum")
def _einsum(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """A letter is one dimension wherever it stands; one that is summed over couples its features."""
    equation = str(given["equation"]).replace(" ", "")
    if "." in equation or "->" not in equation:
        raise Clash("an einsum without plain letters for all dimensions and an output")
    inputs, out = equation.split("->")
    letters: dict[str, Term] = {}
    for word, tensor in zip(inputs.split(","), given["tensors"], strict=True):
        for letter, term in zip(word, w.of(tensor), strict=True):
            if letter not in letters or size(letters[letter]) == 1:
                letters[letter] = term
            elif size(term) != 1:
                unify(letters[letter], term)
    w.couple(term for letter, term in letters.items() if letter not in out)
    for word, tensor in zip(inputs.split(","), given["tensors"], strict=True):
        if w.is_parameter(tensor):
            for letter in word:
                if letter in out:
                    w.writes(tensor, letters[letter], outs[0])
    return [tuple(letters[letter] for letter in out)]


# --- Normalization ------------------------------------------------------------------------------------------------


@rule("batch_norm instance_norm")
def _batch_norm(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if given.get(name) is not None:
            unify(x[1], w.of(given[name])[0])
    if given.get("training"):  # with statistics of its own input, as for the standardized weights of a convolution
        w.couple([x[0], *x[2:]])
    if w.in_norm:
        w.attributes[w.paths[-1], "num_features"] = (x[1],)
    w.normalizes(given["input"])
    return [x]


@rule("layer_norm rms_norm")
def _layer_norm(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
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
def _group_norm(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
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
    "max_pool3d_with_indices adaptive_max_pool1d_with_indices upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "_upsample_nearest_exact2d lp_pool1d lp_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d fractional_max_pool2d"
)
def _pooling(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Channels stay. The places that are pooled are neighbours: no feature may come to lie among them."""
    x = w.of(given["self"] if "self" in given else given["input"])
    places = next(int(letter) for letter in w.calls[-1][0] if letter.isdigit())
    w.still(*x[len(x) - places :])
    return [(*x[: len(x) - places], *out.shape[len(x) - places :]) for out in outs]


@rule(
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d pad"
)
def _padding(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Positions change their number, and a dimension that does cannot grow."""
    x = w.of(given["self"] if "self" in given else given["input"])
    w.still(*(term for out in outs for term, n in zip(x, out.shape, strict=True) if size(term) != n))
    return [tuple(n if size(term) != n else term for term, n in zip(x, out.shape, strict=True)) for out in outs]


@rule(
    "mean sum nansum prod amax amin max min var std var_mean std_mean logsumexp norm linalg_vector_norm linalg_norm "
    "argmax argmin aminmax nanmean count_nonzero "
    "median nanmedian any all"
)
def _reduction(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    if isinstance(given.get("other"), Tensor):
        return _elementwise(w, given, outs)
    x = w.of(given["self"])
    chosen = given.get("dim")
    dims = range(len(x)) if chosen in (None, []) else [chosen] if isinstance(chosen, int) else chosen
    gone = {dimension(d, len(x)) for d in dims}
    w.couple(x[d] for d in gone)
    if given.get("keepdim"):
        return [tuple(1 if i in gone else term for i, term in enumerate(x))] * len(outs)
    return [tuple(term for i, term in enumerate(x) if i not in gone)] * len(outs)


@rule("softmax log_softmax")
def _softmax(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    x = w.of(given["self"])
    w.couple([x[dimension(given["dim"], len(x))]])
    return [x]
