"""Networks of which something does not grow: it is told what, why and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.growing.helpers import train
from tests.growing.test_ways import ROWS, WORDS, Made, matrix, two
from zeroforget.axes.find import CannotGrow
from zeroforget.proving.grow import grow


def test_places_that_a_weight_mixes_give_way_to_features() -> None:
    """Tokens are mixed by a weight on the left, their features flattened: of the two it is the features that grow."""
    tokens = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(2))
    plain = Made(
        lambda s, x: s.b((s.v.softmax(-1) @ s.a(x)).flatten(1)), v=matrix(7, 7), a=nn.Linear(5, 6), b=nn.Linear(42, 4)
    )
    with pytest.warns(UserWarning, match="keep their width, .*: parameters of its own$"):
        net = grow(plain, tokens)
    assert dict(net.axes.sizes) == {"a": 6, "b": 4}


def test_a_weight_that_does_not_show_its_features_is_named() -> None:
    tokens = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(2))
    plain = Made(
        lambda s, x: s.b(torch.bmm(s.v.expand(len(x), -1, -1), x.transpose(1, 2)).mean(2)),
        v=matrix(6, 5),
        b=nn.Linear(6, 4),
    )
    with pytest.warns(UserWarning, match=r"keep their shape, .*: v\. A matrix in x @ weight or weight @ x grows"):
        net = grow(plain, tokens)
    assert dict(net.axes.sizes) == {"b": 4}


def pruned() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    prune.l1_unstructured(net[0], "weight", 0.3)
    with torch.no_grad():
        net(ROWS)
    return net


def clinging() -> nn.Module:
    net = two(lambda s, x: s.b(s.first(x)))
    net.first = lambda x: net.a(x).relu()
    return net


def listing() -> nn.Module:
    net = two(lambda s, x: s.b(s.a(x)) * s.read[0].abs().mean())
    net.read = [net.a.weight]
    return net


@pytest.mark.parametrize(
    ("make", "x", "message"),
    [
        (pruned, ROWS, r"module '0' is pruned.*prune.remove\(module, 'weight'\)"),
        (clinging, ROWS, "the network keeps 'first', a function that holds on to a module.*make it a method"),
        (listing, ROWS, "keeps parameters of the network in 'read'.*read them from their modules"),
        (
            lambda: Made(
                lambda s, x: s.b(s.e(x).to(next(s.e.parameters()).dtype).mean(1)),
                e=nn.Embedding(11, 6),
                b=nn.Linear(6, 4),
            ),
            WORDS,
            r"asks for next\(parameters\(\)\).*ask its input or a buffer",
        ),
        (lambda: torch.jit.trace(nn.Linear(5, 6), ROWS), ROWS, "compiled by torch.jit.*pass the plain one"),
        (lambda: torch.compile(nn.Linear(5, 6)), ROWS, "wrapped by torch.compile: pass the plain one"),
        (
            lambda: Made(lambda s, x: s.b(s.e(x).mean(1)), e=nn.Embedding(11, 6, sparse=True), b=nn.Linear(6, 4)),
            WORDS,
            "embedding 'e' has sparse gradients.*set its sparse to False",
        ),
    ],
)
def test_what_no_copy_can_be_made_of_is_refused_with_the_way_out(
    make: Callable[[], nn.Module], x: Tensor, message: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        plain = make()
    with pytest.raises(CannotGrow, match=message):
        grow(plain, x)


def test_a_weight_that_is_a_buffer_keeps_its_layer() -> None:
    plain = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4))
    weight = plain[0].weight.detach()
    del plain[0].weight
    plain[0].register_buffer("weight", weight)
    with pytest.warns(UserWarning, match="keep their width.*: 0"):
        assert grow(plain, ROWS).axes.sizes == {"2": 4}


def test_a_task_with_nothing_newborn_tells_what_asks_for_parameters() -> None:
    net = grow(two(lambda s, x: s.b(s.a(x.to(next(s.parameters()).dtype)))), ROWS, fn="none")
    net.add_task("0", 2)
    train(net, ROWS)
    net.add_task("1", 2)
    net.train()
    with pytest.raises(ValueError, match=r"nothing newborn.*next\(parameters\(\)\)"):
        net(ROWS, 1)
