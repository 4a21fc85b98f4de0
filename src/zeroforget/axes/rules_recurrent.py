"""Rules of recurrent layers: the hidden size of an LSTM, a GRU or a plain one grows, by the same number everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zeroforget.axes.labels import Axis, Clash, Prod, Term, resolve, total, unify
from zeroforget.axes.trace import Arguments, Labels, Watcher, rule

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@rule("lstm gru rnn_tanh rnn_relu")
def _recurrent(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Each gate has all hidden features, one after the other; each layer reads those of the one before."""
    x = w.of(given["data" if "data" in given else "input"])  # of sentences of several lengths, or of one
    gates, hidden = _GATES[w.calls[-1][0]], _states(given["hx"])
    directions, biases = 2 if given["bidirectional"] else 1, 2 if given["has_biases"] else 0
    layers = int(given["num_layers"])
    if len(given["params"]) != layers * directions * (2 + biases):
        raise Clash("a projection of its hidden state")
    features = Axis(hidden[0].shape[-1])
    reads = x[-1]
    params = iter(given["params"])
    for layer in range(layers):
        for _ in range(directions):
            _cell_weights(w, [next(params) for _ in range(2 + biases)], (gates, features, reads), outs[0])
        reads = total([features] * directions)
        if layer == 0:
            w.attributes[w.paths[-1], "input_size"] = (x[-1],)
            w.attributes[w.paths[-1], "hidden_size"] = (features,)
    for state in hidden:
        _meets(w, state, features)
    out: list[Labels] = [(*x[:-1], reads)]
    return out + [(*tuple(other.shape[:-1]), features) for other in outs[1:]]


@rule("_pack_padded_sequence")
def _pack(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """The words of all sentences in a row."""
    *places, features = w.of(given["input"])
    w.still(*places)
    return [(outs[0].shape[0], features), *(tuple(out.shape) for out in outs[1:])]


@rule("_pad_packed_sequence")
def _pad(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """Each sentence again."""
    return [(*outs[0].shape[:2], w.of(given["data"])[-1]), *(tuple(out.shape) for out in outs[1:])]


@rule("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def _cell(w: Watcher, given: Arguments, outs: list[Tensor]) -> Sequence[Labels]:
    """One step of it."""
    x, hidden = w.of(given["input"]), _states(given["hx"])
    gates, features = _GATES[w.calls[-1][0].removesuffix("_cell")], Axis(hidden[0].shape[-1])
    params = [given[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh") if given.get(name) is not None]
    _cell_weights(w, params, (gates, features, x[-1]), outs[0])
    w.attributes[w.paths[-1], "input_size"] = (x[-1],)
    w.attributes[w.paths[-1], "hidden_size"] = (features,)
    for state in hidden:
        _meets(w, state, features)
    return [(*x[:-1], features)] * len(outs)


def _states(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)


def _meets(w: Watcher, state: Tensor, features: Term) -> None:
    *places, last = w.of(state)
    w.still(*places)
    unify(last, features)


def _cell_weights(w: Watcher, params: list[Tensor], sizes: tuple[int, Axis, Term], out: Tensor) -> None:
    """What a layer computes with: weights for its input and its state, and a bias for each if it has any."""
    gates, features, reads = sizes
    written: Term = Prod((gates, features)) if gates > 1 else features
    for weight, into in zip(params[:2], (reads, features), strict=True):
        unify(w.of(weight)[0], written)
        unify(w.of(weight)[1], resolve(into))
        w.writes(weight, w.of(weight)[0], out)
    for bias in params[2:]:
        unify(w.of(bias)[0], written)
        w.broadcasts(bias)
